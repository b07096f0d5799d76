"""attnlab run: the exit code, the document, the table of stages and the saved call."""

import io
import shlex

import pytest
from helpers.commands import SEED_ID, SMALL, document, error_line, printed

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.show.sheets.results import place_lines
from attnlab.tensors.call import KernelCall

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


def test_a_match(capsys):
    found = document(capsys, ["run", *SMALL], 0)
    assert found.keys() >= RUN_KEYS
    assert found["status"] == "match"
    assert (found["mismatched"], found["total"]) == (0, 6 * 4 * 64)


def test_a_mismatch_has_its_places(capsys):
    """The promoted query_start_loc leaves the decode row unwritten."""
    found = document(capsys, ["run", *SMALL, "--stage", "int32_before_cumsum"], 1)
    assert found["status"] == "mismatch"
    (place,) = found["places"]
    assert (place["seq"], place["token"], place["row"], place["query_len"]) == (1, 0, 5, 1)
    assert place["heads"] == [0, 1, 2, 3]
    assert place["elements"] == found["mismatched"] == 4 * 64
    assert place["newest_slot"]["position"] == 33
    assert place["newest_slot"]["written"] is False
    assert {one["kind"] for one in found["violations"]} == {"index_dtype", "unwritten_rows"}


def test_a_rejection_has_the_kernels_text_and_no_numbers(capsys):
    found = document(capsys, ["run", *SMALL, "--stage", "int64"], 1)
    assert found["status"] == "rejected"
    assert found["error"] == "expected scalar type Int but found Long"
    assert found["mismatched"] is None


def test_nan_elements_are_counted(capsys):
    argv = ["run", *SMALL, "--stage", "cast_after_cumsum", "--empty-slots", "nan"]
    found = document(capsys, argv, 1)
    assert found["nan_elements"] == found["mismatched"] == 4 * 64
    assert not isinstance(found["max_abs_error"], float)


def test_the_text_has_the_outcome_the_violations_and_the_places(capsys):
    text = printed(capsys, ["run", *SMALL, "--stage", "int32_before_cumsum"], 1)
    sizes = {"num_heads": 4, "num_queries_per_kv": 2, "head_size": 64}
    lens = {"query_lens": (5, 1), "ctx_lens": (40, 33)}
    result = Lab().run(Case(**sizes, **lens, stage="int32_before_cumsum"))
    for words in (*result.decision.kernels, result.verdict, *place_lines(result.places())):
        assert words in text
    assert result.places()
    assert [one.effect for one in result.violations] == ["silent"] * 2
    assert all(one.effect in text for one in result.violations)


def test_flags_change_a_file_and_a_test_id(capsys, tmp_path, monkeypatch):
    case = Case(num_heads=4, query_lens=(3, 1), ctx_lens=(9, 8), head_size=64)
    file = tmp_path / "case.json"
    file.write_text(case.to_json())
    found = document(capsys, ["run", "--case", str(file), "--sliding-window", "4"], 0)
    assert Case.from_dict(found["case"]) == case.replace(sliding_window=4)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"num_heads": 2, "head_size": 24}'))
    assert document(capsys, ["explain", "--case", "-"], 0)["decode"] == "kernel_paged_attention_2d"
    found = document(capsys, ["explain", "--test-id", SEED_ID], 0)
    assert found["decode"] == "paged_attention_rocm"


def test_the_command_line_of_a_case_gives_the_case(capsys):
    case = Case(
        num_heads=4, head_size=64, query_lens=(3, 1), ctx_lens=(9, 8), alibi=True, atol=0.5
    ).replace(block_table=((3,), (1,)), k_scale=0.5)
    found = document(capsys, shlex.split(case.to_cli())[1:], 0)
    assert Case.from_dict(found["case"]) == case


def test_stages_has_a_cell_for_each_stage_and_platform(capsys):
    argv = ["run", *SMALL, "--stages", "--platforms", "gfx942,cpu"]
    cells = {(c["stage"], c["platform"]): c for c in document(capsys, argv, 1)["cells"]}
    assert len(cells) == 14
    assert cells["int64", "gfx942"]["status"] == "rejected"
    assert cells["fill_decode", "gfx942"]["first_index"] == [5, 0, 0]
    assert cells["fill_decode", "cpu"]["mismatched"] == 0
    text = printed(capsys, argv, 1)
    assert all(f"{stage} " in text for stage, _ in cells)
    assert "decode " in text


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_saved_call_can_be_loaded(capsys, tmp_path, option):
    file = tmp_path / "call.safetensors"
    printed(capsys, ["run", *SMALL, "--save-call", str(file), *option], 0)
    assert KernelCall.load(file).seq_lens.tolist() == [45, 34]


def test_a_second_run_is_compared_by_its_bits(capsys):
    """Without the newest token in the cache, the output is what an empty slot holds."""
    flags = ["run", *SMALL, "--atol", "10", "--empty-slots", "zeros", "--stage"]
    same = document(capsys, [*flags, "fill_decode", "--against", "seq_lens_dtype=int32"], 0)
    assert (same["against"]["rows"], same["against"]["changes"]) == (
        [],
        {"seq_lens_dtype": "int32"},
    )
    changed = [*flags, "cast_after_cumsum", "--against", "empty_slots=garbage"]
    other = document(capsys, changed, 1)
    assert other["status"] == "match"
    assert other["against"]["rows"] == [5]
    assert other["against"]["largest"] > 0
    assert "empty_slots garbage" in printed(capsys, changed, 1)
    rejected = document(capsys, [*flags, "sound", "--against", "stage=int64"], 1)
    assert rejected["against"]["error"] == "expected scalar type Int but found Long"


@pytest.mark.parametrize("word", ["empty_slots", "empty_slot=nan", "head_size=32", "seed=x"])
def test_a_second_run_that_cannot_be_compared(capsys, word):
    line = error_line(capsys, ["run", *SMALL, "--against", word])
    assert line.startswith("attnlab: ")
    assert word.partition("=")[0] in line
