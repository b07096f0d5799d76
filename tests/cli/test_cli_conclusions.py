"""The commands that conclude something: exit codes, JSON, tables, and one line for bad input."""

import json

import pytest
import torch
from helpers.cases import hostile
from safetensors.torch import save_file

from attnlab.cli.main import main
from attnlab.lab.lab import Lab

SMALL = (
    *("--num-heads", "4", "--num-queries-per-kv", "2", "--head-size", "64"),
    *("--query-lens", "5,1", "--ctx-lens", "40,33"),
)
FAILING = (*SMALL, "--stage", "int32_before_cumsum")


def document(capsys: pytest.CaptureFixture[str], argv: list[str], code: int):
    """Run a command with --json, assert its exit code and that standard output is one document."""
    assert main([*argv, "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_diagnose_finds_the_cause(capsys):
    """The failing stage: exit 1, the cause, its violation, and the candidates with their sizes."""
    told = document(capsys, ["diagnose", *FAILING], 1)
    assert (told["status"], told["cause"]["name"]) == ("explained", "query_start_loc_as_int32")
    assert told["unwritten"] == [5]
    assert {violation["kind"] for violation in told["violations"]} == {
        "index_dtype",
        "unwritten_rows",
    }
    assert len(told["candidates"]) > 20


def test_diagnose_of_a_sound_run(capsys):
    """Nothing wrong: exit 0."""
    assert document(capsys, ["diagnose", *SMALL], 0)["status"] == "nothing wrong"


def test_diagnose_of_a_rejected_call(capsys):
    """The kernel's text and the violation that explains it: exit 1."""
    told = document(capsys, ["diagnose", *SMALL, "--stage", "int64"], 1)
    assert told["status"] == "rejected"
    assert told["rejection"] == "expected scalar type Int but found Long"
    assert "index_dtype" in {violation["kind"] for violation in told["violations"]}
    assert main(["diagnose", *SMALL, "--stage", "int64"]) == 1
    assert "the kernel rejects the call" in capsys.readouterr().out


def test_diagnose_for_a_person(capsys):
    """The text names the cause, the violation, the unwritten row and the candidates."""
    assert main(["diagnose", *FAILING]) == 1
    printed = capsys.readouterr().out
    for word in (
        "explained",
        "query_start_loc_as_int32",
        "written by nobody",
        "violation:",
        "candidates",
    ):
        assert word in printed


def test_diagnose_reads_files(capsys, tmp_path):
    """An output beside its case, and a saved call: both tell the same unwritten rows."""
    case = hostile(stage="int32_before_cumsum", output_init="recycled", empty_slots="garbage")
    (tmp_path / "case.json").write_text(case.to_json())
    save_file({"output": Lab().output(case)}, tmp_path / "output")
    argv = ["diagnose", "--case", str(tmp_path / "case.json")]
    told = document(capsys, [*argv, "--output-file", str(tmp_path / "output")], 1)
    assert told["cause"]["name"] == "query_start_loc_as_int32"
    assert main(["run", *argv[1:], "--save-call", str(tmp_path / "call")]) == 1
    capsys.readouterr()
    told = document(capsys, ["diagnose", "--call", str(tmp_path / "call")], 1)
    assert told["unwritten"] == [31, 49, 90, 91, 95]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--output-file", "a", "--call", "b"], "output-file and call must not both be given"),
        (["--output-file", "nowhere"], "nowhere must be a safetensors file with an output"),
        (["--call", "nowhere"], "nowhere must be a saved KernelCall"),
        (["--source", "nowhere"], "source must not be given with backend model"),
        (["--num-heads", "0"], "num_heads must be"),
    ],
)
def test_bad_input_of_diagnose_is_one_line(capsys, argv, line):
    """Exit 2, one line, no traceback."""
    assert main(["diagnose", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert line in printed.err


def test_an_output_of_another_shape_is_one_line(capsys, tmp_path):
    """A file with the wrong tensor is told by shape."""
    save_file({"output": torch.zeros(2, 2, 2)}, tmp_path / "output")
    assert main(["diagnose", *SMALL, "--output-file", str(tmp_path / "output")]) == 2
    assert "output must have shape (6, 4, 64), got (2, 2, 2)" in capsys.readouterr().err


def test_power(capsys):
    """The counts, the margins, a remedy for each survivor; exit 1 where some survive."""
    told = document(capsys, ["power", *SMALL, "--stage", "cast_after_cumsum"], 1)
    assert told["counts"]["survived"] > 5
    by_name = {mutant["name"]: mutant for mutant in told["mutants"]}
    assert by_name["scale_doubled"]["remedy"]["distribution"] == "normal"
    assert told["models_pass"] is True
    assert main(["power", *SMALL]) == 1
    assert "killed" in capsys.readouterr().out


def test_claims(capsys, monkeypatch):
    """One row a claim, with its verdict."""
    from attnlab.study import claims

    monkeypatch.setattr(claims, "LEDGER", claims.LEDGER[8:10])
    told = document(capsys, ["claims"], 0)
    assert [(one["number"], one["verdict"]) for one in told] == [("C9", "holds"), ("C10", "holds")]
    assert main(["claims"]) == 0
    assert "8192" in capsys.readouterr().out


def test_bench_diagnose(capsys):
    """A few trials: the figures, and bad counts in one line."""
    told = document(capsys, ["bench", "diagnose", "--trials", "3", "--seed", "4"], 0)
    assert (told["trials"], told["sound"], told["seed"]) == (3, 3, 4)
    assert main(["bench", "diagnose", "--trials", "0"]) == 2
    assert "trials must be" in capsys.readouterr().err
    assert main(["bench", "diagnose", "--source", "x"]) == 2
    assert "source must not be given with diagnose" in capsys.readouterr().err
    assert main(["bench", "diagnose", "--trials", "2"]) == 0
    assert "false explanations" in capsys.readouterr().out
