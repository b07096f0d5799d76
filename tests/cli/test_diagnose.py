"""attnlab diagnose: of a Case, an output file and a saved call."""

from pathlib import Path

import pytest
import torch
from helpers import faulty_attention
from helpers.cases import hostile
from helpers.commands import FAILING, SMALL, document, error_line, printed
from helpers.sources import needs_triton
from safetensors.torch import save_file

import attnlab
from attnlab.case.case import Case
from attnlab.cli import demo
from attnlab.cli.main import main
from attnlab.lab.lab import Lab


def kinds(found):
    """Return the kinds of a document's violations."""
    return {violation["kind"] for violation in found["violations"]}


def test_the_failing_stage_is_explained(capsys):
    """All candidates are in the JSON; of the excluded ones, the text has the nearest and their number."""
    found = document(capsys, ["diagnose", *FAILING], 1)
    assert (found["status"], found["cause"]["name"]) == ("explained", "query_start_loc_as_int32")
    assert found["unwritten"] == [5]
    assert kinds(found) == {"index_dtype", "unwritten_rows"}
    assert len(found["candidates"]) > 20
    assert found["pattern"]["facts"]
    text = printed(capsys, ["diagnose", *FAILING], 1)
    for words in (found["status"], *found["sentences"]):
        assert " ".join(words.split()) in text
    left = [one for one in found["candidates"] if not one["verdict"].startswith("excluded")]
    assert left
    assert all(candidate["name"] in text for candidate in left)
    assert not all(candidate["name"] in text for candidate in found["candidates"])


def test_a_rejected_call_has_the_kernels_text_and_the_violation(capsys):
    found = document(capsys, ["diagnose", *SMALL, "--stage", "int64"], 1)
    assert found["status"] == "rejected"
    assert found["rejection"] == "expected scalar type Int but found Long"
    assert "index_dtype" in kinds(found)
    assert found["rejection"] in printed(capsys, ["diagnose", *SMALL, "--stage", "int64"], 1)


def test_an_output_file_and_a_saved_call(capsys, tmp_path):
    case = hostile(stage="int32_before_cumsum", output_init="recycled", empty_slots="garbage")
    (tmp_path / "case.json").write_text(case.to_json())
    save_file({"output": Lab().output(case)}, tmp_path / "output")
    argv = ["diagnose", "--case", str(tmp_path / "case.json")]
    found = document(capsys, [*argv, "--output-file", str(tmp_path / "output")], 1)
    assert found["cause"]["name"] == "query_start_loc_as_int32"
    assert main(["run", *argv[1:], "--save-call", str(tmp_path / "call")]) == 1
    capsys.readouterr()
    found = document(capsys, ["diagnose", "--call", str(tmp_path / "call")], 1)
    assert found["unwritten"] == [31, 49, 90, 91, 95]


def test_a_saved_call_names_the_misread_query_start_loc(capsys, tmp_path):
    """Its only wrong row is unwritten, and the call violates the dtype of query_start_loc."""
    assert main(["run", *FAILING, "--save-call", str(tmp_path / "call")]) == 1
    capsys.readouterr()
    found = document(capsys, ["diagnose", "--call", str(tmp_path / "call")], 1)
    assert (found["status"], found["cause"]["name"]) == ("explained", "query_start_loc_as_int32")
    assert " of 0 rows" not in " ".join(found["sentences"])


def test_an_output_of_another_shape_is_refused(capsys, tmp_path):
    save_file({"output": torch.zeros(2, 2, 2)}, tmp_path / "output")
    line = error_line(capsys, ["diagnose", *SMALL, "--output-file", str(tmp_path / "output")])
    assert "(6, 4, 64)" in line
    assert "(2, 2, 2)" in line


# The command ``attnlab demo``: its kernel is right, and the fault that it plants is found.


def test_the_fault_is_one_expression_of_one_line(tmp_path: Path) -> None:
    file, line = demo.plant(tmp_path)
    right, wrong = (path.read_text().splitlines() for path in (demo.KERNEL, file))
    assert [n for n, (a, b) in enumerate(zip(right, wrong, strict=True), 1) if a != b] == [line]


@needs_triton
def test_the_kernel_is_right_and_the_planted_one_is_not(tmp_path: Path) -> None:
    """Also with lengths of several tiles, and with blocks that are no tile."""
    file, _ = demo.plant(tmp_path)
    kernel = tmp_path / "right.py"
    kernel.write_text(demo.KERNEL.read_text())
    sizes = {"query_lens": (20, 1, 3), "ctx_lens": (0, 70, 31), "block_size": 8, "num_heads": 6}
    case = attnlab.Case(**{**demo._CASE, **sizes, "num_queries_per_kv": 3})
    outcomes = [
        attnlab.run(case, backend=f"{path}:paged_attention").status for path in (kernel, file)
    ]
    assert outcomes == ["match", "mismatch"]


@needs_triton
@pytest.mark.slow
def test_the_demo_finds_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ["demo", "--out", str(tmp_path)], 0)
    assert found["found"]
    assert f"line {found['line']}" in (tmp_path / "page.html").read_text()


# The command ``attnlab xray``.


FLAGS = (
    *("--op", "context_attention_fwd", "--num-heads", "2", "--head-size", "32"),
    *("--block-size", "16", "--distribution", "normal"),
    *("--query-lens", "3,9", "--ctx-lens", "40,67"),
)
FIELDS = {
    **{"op": "context_attention_fwd", "num_heads": 2, "head_size": 32, "block_size": 16},
    **{"query_lens": (3, 9), "ctx_lens": (40, 67), "distribution": "normal"},
}
HALVED = f"{faulty_attention.__file__}:halved"


def test_exit_code_and_document(capsys):
    assert document(capsys, ["xray", *FLAGS], 0)["status"] == "right"
    assert document(capsys, ["xray", *FLAGS, "--kernel", HALVED], 1)["status"] == "described"


def test_a_saved_call_is_measured_with_a_kernel_only(tmp_path, capsys):
    """A call holds no kernel; without one, the lab's model was measured and found right."""
    call = Lab().call(Case(**FIELDS))
    file = tmp_path / "call.safetensors"
    call.save(file)
    words = ["xray", "--call", str(file)]
    assert "backend must be given to X-ray a saved call" in error_line(capsys, words)
    assert document(capsys, [*words, "--kernel", HALVED], 1)["status"] == "described"
    assert "/no/such" in error_line(capsys, [*words, "--source", "/no/such"])


def test_the_page_is_one_file_with_both_themes(tmp_path, capsys):
    page = tmp_path / "xray.html"
    assert main(["xray", HALVED, *FLAGS, "--no-confirm", "--html", str(page)]) == 1
    text = page.read_text()
    assert '"weights": {"0,0"' in text
    assert "prefers-color-scheme: dark" in text
    assert "multiplied by a further 1/2" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
