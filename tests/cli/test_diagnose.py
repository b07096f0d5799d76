"""attnlab diagnose: of a Case, an output file and a saved call."""

import torch
from helpers.cases import hostile
from helpers.commands import FAILING, SMALL, document, error_line, printed
from safetensors.torch import save_file

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


def test_a_sound_run_has_nothing_wrong(capsys):
    assert document(capsys, ["diagnose", *SMALL], 0)["status"] == "nothing wrong"


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
