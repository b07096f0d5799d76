"""Coverage of a check: what was reached, what was not, and the list of what cannot be."""

import ast
import json
from pathlib import Path

import pytest
from helpers.sources import needs_triton
from helpers.triton_example import EXAMPLE

from attnlab.checker import coverage
from attnlab.checker.coverage import Unreachable, op_coverage
from attnlab.cli.main import main
from attnlab.kernels.vllm.features import file_kernels

TEXT = """
@triton.jit
def kernel(x, FLAG):
    if FLAG:
        y = 1 if x else 2
        return y
    for i in range(x):
        x += i
    return x
"""


@pytest.fixture
def functions(tmp_path):
    """Provide one kernel, as a check's header has it."""
    file = tmp_path / "kernel.py"
    file.write_text(TEXT)
    return [one.to_dict(tmp_path) for one in file_kernels(file)]


def test_gaps_of_two_cases(functions):
    """Points of all cases count together."""
    found = op_coverage(
        "unified_attention",
        functions,
        [{"kernel.py": ["4", "4.0-", "7", "7.0+", "8"]}, {"kernel.py": ["4", "9"]}],
    )
    assert (found.lines.reached, found.lines.total) == (4, 6)
    assert (found.branches.reached, found.branches.total) == (2, 6)
    gaps = {(gap.line, gap.what) for gap in found.missing}
    branches = {(4, "true"), (5, "true"), (5, "false"), (7, "not entered")}
    assert gaps == {(5, "line"), (6, "line")} | branches
    assert {gap.text for gap in found.missing} >= {"if FLAG", "if x", "return y", "for range(x)"}
    assert (found.excused, found.outdated) == ([], [])


def test_a_block_with_a_reason(functions, monkeypatch):
    """It is not missing; if a case reaches it, the entry is outdated."""
    entry = Unreachable(function="kernel", text="FLAG", outcome=True, reason="No caller.")
    monkeypatch.setattr(coverage, "UNREACHABLE", (entry,))
    found = op_coverage(
        "unified_attention", functions, [{"kernel.py": ["4", "4.0-", "7", "7.0+", "8", "9"]}]
    )
    assert [(gap.line, gap.what) for gap in found.missing] == [(7, "not entered")]
    assert {gap.line for gap in found.excused} == {4, 5, 6}
    assert {gap.reason for gap in found.excused} == {"No caller."}
    assert found.lines.percent == pytest.approx(100 * 4 / 6)
    assert found.lines.percent_of_reachable == 100.0
    reached = op_coverage("unified_attention", functions, [{"kernel.py": ["4", "4.0+", "5"]}])
    assert [(gap.line, gap.what) for gap in reached.outdated] == [(4, "true")]


@needs_triton
def test_a_users_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The document has the gaps, the pages the annotated source."""
    pages = tmp_path / "pages"
    command = ["check", f"{EXAMPLE}:my_attention", "--cases", "1", "--json"]
    assert main([*command, "--coverage-html", str(pages)]) == 0
    document = json.loads(capsys.readouterr().out)["coverage"]
    (op,) = document
    lines, branches = document[op]["lines"], document[op]["branches"]
    tree = ast.parse(EXAMPLE.read_text())
    (kernel,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list)
    assert 0 < lines["reached"] <= lines["total"]
    assert {gap["function"] for gap in document[op]["missing"]} <= {kernel.name}
    assert branches["total"] >= branches["reached"]
    page = (pages / f"{op}.html").read_text()
    assert f"{op}.html" in (pages / "index.html").read_text()
    assert page.count('class="line reached"') > 10
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    "arguments", [["--coverage"], ["--coverage", "--release", "0.11.2"]], ids=["models", "older"]
)
def test_models_have_no_coverage(arguments, capsys: pytest.CaptureFixture[str]):
    assert main(["check", *arguments]) == 2
    assert "coverage must be given with Triton kernels" in capsys.readouterr().err
