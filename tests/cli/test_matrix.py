"""The command ``attnlab matrix``: ids, order, outcomes, shards and what it writes."""

import io
import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.commands import document

import attnlab
from attnlab.case.case import Case
from attnlab.case.pytest_id import vllm_test_ids
from attnlab.checker.matrix import NOT_RUN, in_order, matrix_tasks, run_many
from attnlab.cli.main import main
from attnlab.cli.sharded import read_ids
from attnlab.lab.products import batch_key

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--draw-max-query-len", "8", "--draw-max-ctx-len", "8", "--num-seqs", "2"),
    *("--num-blocks", "16", "--max-blocks-per-seq", "4", "--num-heads", "8"),
]
ON = ("--platform", "gfx942", "--engine", "local:1")
FP8_DECODE = (
    "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-fp8_e5m2-dtype0-128-1-8]"
)
PREFILL = "test_contexted_kv_attention[context_attention_fwd-0-cuda:0-auto-dtype0-24-1-8]"
DECODES = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-8]"


def test_the_ids_are_those_that_ran_on_a_gpu():
    recorded = json.loads((ROOT / "docs" / "h200-matrix.json").read_text())["cases"]
    assert set(vllm_test_ids()) == set(recorded)
    assert len(vllm_test_ids()) == len(recorded)


def test_ids_are_read_from_words_files_and_standard_input(tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text(f"tests/a.py::{PREFILL}\n\n{DECODES}\n")
    lines = io.StringIO(f"tests/a.py::{FP8_DECODE} FAILED\n")
    assert read_ids([str(file), "-", PREFILL], lines) == [PREFILL, DECODES, FP8_DECODE]


def test_the_ids_of_a_test_file_are_collected(tmp_path):
    file = tmp_path / "test_small.py"
    file.write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_small(n):\n    pass\n"
    )
    assert read_ids([str(file)], []) == ["test_small[1]", "test_small[2]"]
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(attnlab.Unavailable, match="pytest collects no test"):
        read_ids([str(file)], [])


def test_cases_that_share_a_batch_are_neighbours():
    ordered = in_order([Case.from_test_id(one, platform="gfx942") for one in vllm_test_ids()])
    keys = [batch_key(case) for case in ordered]
    assert sum(one != following for one, following in pairwise(keys)) == len(set(keys)) - 1
    tasks = matrix_tasks(vllm_test_ids(), {"platform": "gfx942"})
    assert sorted(one for task in tasks for one in task.payload["ids"]) == sorted(vllm_test_ids())


def test_many_cases_have_the_results_of_single_runs():
    case = Case(query_lens=(5, 1), ctx_lens=(20, 9), num_heads=4, head_size=32, stage="sound")
    cases = [case.replace(seed=seed, sliding_window=w) for w in (0, 4) for seed in (1, 2)]
    results = {result.case: result for result in run_many(cases)}
    assert results.keys() == set(cases)
    for one in cases:
        assert results[one].output.equal(attnlab.run(one).output)


def test_a_table_names_what_does_not_match(tmp_path, capsys):
    """gfx942 reads an int64 query_start_loc, rejects E5M2, and an unknown test does not run."""
    unknown = "test_nothing[1-2]"
    page, junit = tmp_path / "page.html", tmp_path / "junit.xml"
    argv = ["matrix", PREFILL, DECODES, FP8_DECODE, unknown, *SMALL, *ON]
    argv += ["--stage", "int32_before_cumsum", "--html", str(page), "--junit", str(junit)]
    rows = document(capsys, argv, 1)["ids"]
    found = {row["id"]: row for row in rows}
    assert [row["status"] for row in rows] == ["match", "mismatch", "rejected", NOT_RUN]
    assert found[DECODES]["mismatched"] == 8 * 128
    assert "Unsupported KV cache dtype: fp8_e5m2" in found[FP8_DECODE]["error"]
    assert "test_nothing" in found[unknown]["error"]
    assert DECODES in page.read_text()
    suites = ElementTree.parse(junit).getroot()
    assert [(s.get("tests"), s.get("failures"), s.get("skipped")) for s in suites] == [
        ("3", "2", "0"),
        ("1", "0", "1"),
    ]


def test_shards_are_merged_and_a_stopped_run_continues(tmp_path, capsys):
    argv = ["matrix", PREFILL, DECODES, *SMALL, *ON, "--stage", "sound"]
    whole = document(capsys, argv, 0)
    folders = [tmp_path / "1", tmp_path / "2"]
    for at, folder in enumerate(folders, 1):
        assert main([*argv, "--shard", f"{at}/2", "--out", str(folder)]) == 0
    capsys.readouterr()
    merged = document(capsys, ["merge", *map(str, folders)], 0)
    assert [{**row, "seconds": 0} for row in merged["ids"]] == [
        {**row, "seconds": 0} for row in whole["ids"]
    ]
    assert merged["counts"] == {"match": 2}


def test_ids_that_did_not_run_are_no_match(capsys):
    assert main(["matrix", PREFILL, "test_nothing[1]", *SMALL, *ON]) == 3
    assert "1 match, 1 not run, of 2 ids" in capsys.readouterr().out
