"""The worked examples of CONTRIBUTING.md do what they claim."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import snippets

import attnlab
from attnlab.checker.check import check
from attnlab.cli.main import main
from attnlab.mutation.power import measure_power as power
from attnlab.tensors.call import KernelCall

ROOT = Path(__file__).parent.parent.parent

SMALL = attnlab.Case(num_heads=4, query_lens=(17, 1), ctx_lens=(16, 40), distribution="normal")


def example(title: str) -> list[snippets.Snippet]:
    """Return the Python blocks of one section."""
    page = ROOT / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    start = text.index(f"## {title}\n")
    first = text.count("\n", 0, start)
    last = first + re.split(r"^## ", text[start + 3 :], maxsplit=1, flags=re.MULTILINE)[0].count(
        "\n"
    )
    return [s for s in snippets.snippets(page) if s.kind == "python" and first < s.line <= last + 1]


def run(title: str) -> dict[str, object]:
    """Run the Python blocks of one section; return their names."""
    names: dict[str, object] = {"__name__": "__main__"}
    found = example(title)
    assert found
    for snippet in found:
        snippets.run_python(snippet, names)
    return names


def test_an_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record of the example runs through check and diagnose, and a planted fault is found."""
    function, record = (one.text for one in example("Add an op"))
    for name, text in (
        ("acme", function),
        ("wrong_acme", function.replace("* scale", "* 2 * scale")),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        ops = record.replace('"acme"', f'"{name}"').replace('"acme_', f'"{name}_')
        (tmp_path / f"{name}_ops.py").write_text(ops)
    right = check(f"{tmp_path}/acme_ops.py:PAGES", cases=6)
    assert (right.cases_run, right.findings) == (6, [])
    (found,) = check(f"{tmp_path}/wrong_acme_ops.py:PAGES", cases=2, seconds=60).findings
    assert found.diagnosis == "scale_doubled"
    flags = ["--query-lens", "1,1", "--ctx-lens", "40,7", "--num-heads", "4", "--stage", "sound"]
    flags += ["--distribution", "normal", "--json"]
    for name, code, status in (("acme", 0, "nothing wrong"), ("wrong_acme", 1, "explained")):
        backend = f"{tmp_path}/{name}_ops.py:PAGES"
        assert main(["diagnose", "--backend", backend, *flags]) == code
        assert json.loads(capsys.readouterr().out)["status"] == status


def test_a_backend(tmp_path: Path) -> None:
    (snippet,) = example("Add a backend")
    file = tmp_path / "my_kernel.py"
    file.write_text(snippet.text)
    # It ignores windows and other features, which the first case does not have.
    right = check(f"{file}:my_attention", cases=1)
    assert (right.cases_run, right.findings) == (1, [])
    wrong = tmp_path / "wrong_kernel.py"
    wrong.write_text(snippet.text.replace("call.sm_scale or", "2 * call.sm_scale or"))
    (found,) = check(f"{wrong}:my_attention", cases=1).findings
    assert found.diagnosis == "scale_doubled"


def test_a_backend_in_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = example("Add a backend")
    file = tmp_path / "my_kernel.py"
    file.write_text(snippet.text)
    flags = ["--query-lens", "17,1", "--ctx-lens", "16,40", "--num-heads", "4", "--json"]
    case = ["--op", "unified_attention", "--backend", f"{file}:my_attention"]
    assert main(["run", *case, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "match"


def test_a_defect() -> None:
    defect = run("Add a defect")["SCALE_HALVED"]
    known = getattr(attnlab.DEFECTS, "values", lambda: attnlab.DEFECTS)()
    assert defect.name not in {d.name for d in known}
    report = power(SMALL, remedies=False)
    assert defect.name not in {m.name for m in report.survivors}
    assert isinstance(attnlab.run(SMALL).call, KernelCall)


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("papermill")
    monkeypatch.chdir(tmp_path)
    run("Add a notebook")
    command = ["investigate", "--notebooks-folder", str(tmp_path), "--reports", str(tmp_path / "r")]
    assert main(command) == 0
    (found,) = json.loads((tmp_path / "r" / "verdicts.json").read_text())["notebooks"]
    assert (found["name"], found["status"]) == ("99-example", "passed")


@pytest.mark.parametrize("title", ["Add a defect", "Add a notebook"])
def test_a_planted_fault_in_an_example_is_found(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = example(title)[0]
    broken = dataclasses.replace(snippet, text=snippet.text + "undefined_name\n")
    with pytest.raises(NameError):
        snippets.run_python(broken, {"__name__": "__main__"})
