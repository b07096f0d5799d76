"""Coverage of a check: what was reached, what was not, and the list of what cannot be."""

import ast
import inspect
import json
from pathlib import Path

import pytest
import torch
from helpers.browser import layout_problems, offline_page
from helpers.sources import needs_triton, of_release
from helpers.triton_example import EXAMPLE

from attnlab.case import op_arguments as case_arguments
from attnlab.case.ops import OPS, TRITON_OPS, UNIFIED
from attnlab.checker import coverage
from attnlab.checker.coverage import Unreachable, op_coverage, parameter_uses
from attnlab.checker.hostile import DEFAULT_CASES, hostile_cases, launches
from attnlab.checker.plan import Plan
from attnlab.checker.report import check_library
from attnlab.cli.main import main
from attnlab.kernels import find_backend
from attnlab.kernels.triton.coverage import measuring
from attnlab.kernels.vllm import op_arguments as vllm_arguments
from attnlab.kernels.vllm.features import file_kernels, op_functions
from attnlab.kernels.vllm.op_arguments import argument_facts, with_gaps

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


@needs_triton
@pytest.mark.browser
def test_the_pages_are_legible(tmp_path: Path) -> None:
    """On a phone no text is too small, and the name of an op is on one line."""
    command = ["check", f"{EXAMPLE}:my_attention", "--cases", "1", "--coverage-html", str(tmp_path)]
    assert main(command) == 0
    with offline_page(viewport={"width": 390, "height": 844}) as page:
        for path in sorted(tmp_path.glob("*.html")):
            page.goto(path.as_uri())
            assert layout_problems(page) == [], path.name
        page.goto((tmp_path / "index.html").as_uri())
        assert page.locator("td a code").bounding_box()["height"] < 30


# Coverage of arguments: what did not occur is listed, unless there is a reason; no parameter is unknown.


RELEASES = ("0.11.2", "0.33.0")


def parameters(version: str, op: str) -> tuple[str, ...]:
    """Return the parameters of an op of a release."""
    found = op_functions(of_release(version), op)
    return next(one.parameters for one in found if one.name == OPS[op].function)


def op(q, block_table, *, softcap=0, causal=True):
    """Stand for an op."""


def facts(**arguments):
    return argument_facts(op, arguments)


def test_facts_of_a_call():
    cache = torch.zeros(3, 4, 5)
    found = facts(q=cache[:, :, :2], block_table=torch.zeros(1, 2).int(), softcap=2.0)
    assert found["q"] == ["dtype float32", "dim 2", "dim 1", "stride 1", "dim 0", "stride 0"]
    assert found["block_table"] == ["dtype int32", "dim 1"]
    assert (found["softcap"], found["causal"]) == (["value 2.0"], ["value True"])


def test_what_did_not_occur_is_listed():
    cases = [
        facts(q=torch.zeros(3, 4, 5), block_table=torch.zeros(2, 2).int()),
        facts(q=torch.zeros(3, 4, 8)[..., :5], block_table=torch.zeros(2, 2).int(), softcap=1.0),
    ]
    uses = {one.name: one for one in parameter_uses(UNIFIED, ("q", "block_table"), cases)}
    assert uses["q"].gaps == ()
    assert any(reason.startswith("stride 2") for reason in uses["q"].reasons)
    assert set(uses["block_table"].gaps) == {
        "stride 0 is that of a contiguous tensor",
        "never int64",
    }
    uses = {one.name: one for one in parameter_uses(UNIFIED, ("softcap", "causal"), cases)}
    assert uses["softcap"].gaps == ()
    assert uses["causal"].gaps == ("one value only",)
    (unread,) = parameter_uses(UNIFIED, ("max_seqlen_k",), [])
    assert (unread.gaps, len(unread.reasons)) == ((), 1)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_tensors_with_other_strides(used):
    tensor = torch.randn(3, 4, 8)
    gaps = with_gaps(tensor, used)
    assert torch.equal(gaps, tensor)
    contiguous = tensor.stride()
    assert [gaps.stride(i) != contiguous[i] for i in range(3)] == [i < used for i in range(3)]


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("op", TRITON_OPS)
def test_every_parameter_is_passed_or_has_a_reason(version, op):
    """Those that the lab binds, those of op arguments, and those with a reason; nothing else."""
    if version not in OPS[op].releases:
        pytest.skip(f"{version} does not have the op")
    argued = inspect.getsource(case_arguments) + inspect.getsource(vllm_arguments)
    for name in parameters(version, op):
        is_stated = name in OPS[op].arguments or OPS[op].why_neutral(name)
        assert is_stated or f'"{name}"' in argued, name


@pytest.mark.releases
def test_the_tables_name_parameters_that_exist():
    for name in TRITON_OPS:
        op = OPS[name]
        stated = {*op.neutral, *op.index_dtypes, *op.strides, *op.writes}
        assert stated <= set(parameters("0.33.0", name))


def layout_gaps(op, is_left_out=lambda case: False):
    """Return the strides and index dtypes that no call of an op has, by parameter.

    The op is called with the Cases for layouts, but no program of a kernel runs.
    """
    source, facts = of_release("0.33.0"), []
    backend = find_backend("vllm", source.path, "cpu")
    for case in hostile_cases(backend, op, "sm_90", DEFAULT_CASES, 0):
        argument = case.argument
        is_about_layout = argument.name == "gaps" or argument.cache
        is_index = case.stage == "int64" or case.mask in ("ranges", "tree", "prefix_and_window")
        if (is_about_layout or is_index or not facts) and not is_left_out(case):
            with measuring() as measured:
                launches(backend, case)
            facts.append({name: sorted(found) for name, found in measured.arguments.items()})
    uses = parameter_uses(op, parameters("0.33.0", op), facts)
    gaps = {use.name: [gap for gap in use.gaps if gap != "one value only"] for use in uses}
    return {name: found for name, found in gaps.items() if found}


@pytest.mark.releases
@pytest.mark.parametrize("op", TRITON_OPS)
def test_every_stride_and_index_dtype_occurs_or_has_a_reason(op):
    assert layout_gaps(op) == {}


@pytest.mark.releases
def test_a_stride_that_no_case_changes_is_a_gap():
    without = layout_gaps("decode_attention_fwd", lambda case: case.op_argument == "gaps")
    assert "stride 2 is that of a contiguous tensor" in without["k_buffer"]


@pytest.mark.releases
@pytest.mark.slow
def test_all_cases_of_an_op_leave_no_gap():
    """Every line and branch of the cache write, every parameter and stride."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    plan = Plan(backend=backend, ops=("reshape_and_cache_flash",), coverage=True)
    (found,) = check_library(plan).coverage.values()
    assert found.missing == found.outdated == []
    assert [one.name for one in found.parameters if one.gaps] == []
    assert found.lines.percent > 95
    few = check_library(
        Plan(backend=backend, ops=("reshape_and_cache_flash",), cases=6, coverage=True)
    )
    (found,) = few.coverage.values()
    assert found.missing
    assert {one.name for one in found.parameters if one.gaps} >= {"interleaved_v_pack_factor"}
