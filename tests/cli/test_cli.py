"""The command line: exit codes, JSON, and one clear line for bad input."""

import io
import json
from pathlib import Path

import pytest

from attnlab.case.case import Case
from attnlab.cli.main import main
from attnlab.tensors.call import KernelCall

SMALL = (
    *("--num-heads", "4", "--num-queries-per-kv", "2", "--head-size", "64"),
    *("--query-lens", "5,1", "--ctx-lens", "40,33"),
)
SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
RUN_KEYS = {
    "case",
    "kernel",
    "backend",
    "reasons",
    "status",
    "error",
    "mismatched",
    "total",
    "max_abs_error",
    "max_index",
    "places",
    "violations",
    "seconds",
}


def _json(capsys: pytest.CaptureFixture[str], argv: list[str], code: int) -> dict:
    """Run a command with --json, assert its exit code and that standard output is one document."""
    assert main([*argv, "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_run_matches(capsys: pytest.CaptureFixture[str]) -> None:
    """A sound case exits 0 and its document has every key that is promised."""
    document = _json(capsys, ["run", *SMALL], 0)
    assert document.keys() >= RUN_KEYS
    assert document["status"] == "match"
    assert (document["mismatched"], document["total"]) == (0, 6 * 4 * 64)


def test_run_mismatches_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    """The promoted query_start_loc leaves the decode row unwritten: exit 1, its place, its slot."""
    document = _json(capsys, ["run", *SMALL, "--stage", "int32_before_cumsum"], 1)
    assert document["status"] == "mismatch"
    (place,) = document["places"]
    assert (place["seq"], place["token"], place["row"], place["query_len"]) == (1, 0, 5, 1)
    assert place["heads"] == [0, 1, 2, 3]
    assert place["elements"] == document["mismatched"] == 4 * 64
    assert place["newest_slot"]["position"] == 33
    assert place["newest_slot"]["written"] is False
    assert {b["kind"] for b in document["violations"]} == {"index_dtype", "unwritten_rows"}


def test_run_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that raises gives exit 1, its text, and no numbers."""
    document = _json(capsys, ["run", *SMALL, "--stage", "int64"], 1)
    assert document["status"] == "rejected"
    assert document["error"] == "expected scalar type Int but found Long"
    assert document["mismatched"] is None


def test_nan_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN: the greatest error is null and the NaN elements are counted."""
    argv = ["run", *SMALL, "--stage", "cast_after_cumsum", "--empty-slots", "nan"]
    document = _json(capsys, argv, 1)
    assert document["max_abs_error"] is None
    assert document["nan_elements"] == document["mismatched"] == 4 * 64


def test_run_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """The text names the case, the kernels, the violations, the verdict and the place."""
    assert main(["run", *SMALL, "--stage", "int32_before_cumsum"]) == 1
    printed = capsys.readouterr().out
    for word in ("paged_attention_rocm", "silent", "mismatch: 256 of 1536", "sequence 1, token 0"):
        assert word in printed


def test_flags_change_a_file_and_a_test_id(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Case comes from a file, standard input or a test id; flags change it."""
    case = Case(num_heads=4, query_lens=(3, 1), ctx_lens=(9, 8), head_size=64)
    file = tmp_path / "case.json"
    file.write_text(case.to_json())
    document = _json(capsys, ["run", "--case", str(file), "--sliding-window", "4"], 0)
    assert Case.from_dict(document["case"]) == case.replace(sliding_window=4)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"num_heads": 2, "head_size": 24}'))
    explained = _json(capsys, ["explain", "--case", "-"], 0)
    assert explained["decode"] == "kernel_paged_attention_2d"
    explained = _json(capsys, ["explain", "--test-id", SEED_ID], 0)
    assert explained["decode"] == "paged_attention_rocm"


def test_cli_line_of_a_case_gives_the_case_again(capsys: pytest.CaptureFixture[str]) -> None:
    """to_cli is a command line that this parser reads back."""
    import shlex

    case = Case(
        num_heads=4, head_size=64, query_lens=(3, 1), ctx_lens=(9, 8), alibi=True, atol=0.5
    ).replace(block_table=((3,), (1,)), k_scale=0.5)
    words = shlex.split(case.to_cli())[1:]
    document = _json(capsys, words, 0)
    assert Case.from_dict(document["case"]) == case


def test_stages_prints_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """--stages covers seven stages on the platforms asked for."""
    document = _json(capsys, ["run", *SMALL, "--stages", "--platforms", "gfx942,cpu"], 1)
    cells = {(c["stage"], c["platform"]): c for c in document["cells"]}
    assert len(cells) == 14
    assert cells["int64", "gfx942"]["status"] == "rejected"
    assert cells["fill_decode", "gfx942"]["first_index"] == [5, 0, 0]
    assert cells["fill_decode", "cpu"]["mismatched"] == 0
    assert main(["run", *SMALL, "--stages"]) == 1
    assert "wrapper_cast" in capsys.readouterr().out


def test_explain_names_the_term_that_said_no(capsys: pytest.CaptureFixture[str]) -> None:
    """gfx1100 with blocks of 32 goes to Triton, and the text says which terms refused."""
    assert main(["explain", "--platform", "gfx1100", "--num-queries-per-kv", "4"]) == 0
    printed = capsys.readouterr().out
    assert "not paged_attention_rocm: block_size is 32, allowed: 16" in printed


def test_decode_error_reads_the_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The recorded failure is sequence 9, its only token, all heads, too large to be a wrong average."""
    text = (
        "Mismatched elements: 8192 / 43720704 (0.0%)\n"
        "Greatest absolute difference: 1.685546875 at index (5336, 0, 0) (up to 0.0001 allowed)"
    )
    file = tmp_path / "assertion.txt"
    file.write_text(text)
    decoded = _json(capsys, ["decode-error", str(file), "--test-id", SEED_ID], 0)
    assert (decoded["seq"], decoded["token"], decoded["query_len"]) == (9, 0, 1)
    assert decoded["rows_worth"] == 1.0
    assert decoded["newest"] == [929, 29, 1]
    assert decoded["max_abs_error"] > decoded["largest_possible"]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["decode-error", "--test-id", SEED_ID]) == 0
    assert "its only token" in capsys.readouterr().out


def test_saved_call_can_be_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--save-call writes a KernelCall that load reads."""
    file = tmp_path / "call.safetensors"
    _json(capsys, ["run", *SMALL, "--save-call", str(file)], 0)
    assert KernelCall.load(file).seq_lens.tolist() == [45, 34]


BAD = [
    (["run", "--num-heads", "x"], "num_heads must be an integer"),
    (["run", "--num-heads", "-1"], "num_heads must be an integer"),
    (["run", "--num-queries-per-kv", "3"], "num_queries_per_kv must be a divisor"),
    (["run", "--query-lens", "1,0", "--ctx-lens", "1,1"], "query_lens[1] must be"),
    (["run", "--query-lens", "1,1"], "ctx_lens must be given"),
    (["run", "--query-lens", "a", "--ctx-lens", "1"], "query_lens must be"),
    (["run", "--max-blocks-per-seq", "1"], "seq_lens[0] must be at most 32"),
    (["run", "--dtype", "int8"], "dtype must be one of"),
    (["run", "--platform", "tpu"], "platform must be one of"),
    (["run", "--stage", "last"], "stage must be one of"),
    (["run", "--backend", "cuda"], "backend must be one of"),
    (["run", "--alibi", "maybe"], "alibi must be true or false"),
    (["run", "--block-table", "[[1"], "block_table must be"),
    (["run", "--k-scale", "nan"], "k_scale must be a finite number"),
    (["run", "--test-id", "hello"], "test_id must be like"),
    (["run", "--case", "/no/such/file"], "/no/such/file must be a readable text file"),
    (["run", "--case", "-", "--test-id", SEED_ID], "test-id and case must not both be given"),
    (["run", "--stages", "--platforms", "gfx942,tpu"], "platforms must be one of"),
    (["run", *SMALL, "--save-call", "/no/such/folder/x"], "save-call must be in a folder"),
    (["run", "--num-blocks", "99999999"], "the case needs about"),
    (["explain", "--head-size", "0"], "head_size must be an integer"),
    (["decode-error", "/no/such/file"], "/no/such/file must be a readable text file"),
]


@pytest.mark.parametrize(("argv", "message"), BAD, ids=lambda value: " ".join(value)[:60])
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    """Bad input exits 2 with one line that names the field, and prints nothing else."""
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"attnlab: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all fine", "text must hold the lines"),
        (
            "Mismatched elements: 1 / 10 (10%)\nGreatest absolute difference: 1 at index (0, 0, 0)",
            "text must be of an output of 5337 × 64 × 128",
        ),
        (
            "Mismatched elements: 1 / 43720704 (0%)\n"
            "Greatest absolute difference: 1 at index (9999, 0, 0)",
            "text must give an index inside",
        ),
    ],
)
def test_decode_error_refuses_other_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    """A text without counts, of another size or with an index outside is one line and exit 2."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["decode-error"]) == 2
    assert capsys.readouterr().err.startswith(f"attnlab: {message}")


@pytest.mark.parametrize("document", ["{", "[1]", '{"kv_head_range": 3}', '{"num_heads": true}'])
def test_bad_case_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    """JSON that is no Case is one line and exit 2."""
    monkeypatch.setattr("sys.stdin", io.StringIO(document))
    assert main(["run", "--case", "-"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("argv", [["run", "--nonsense"], ["dance"], [], ["run", "--stage"]])
def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """What argparse refuses is one line too."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [[], ["run"], ["explain"], ["decode-error"], ["investigate"], ["bench"]]
)
def test_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """Every command has a help text."""
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert len(capsys.readouterr().out) > 150
