"""One check in one process, by workers, in three shards, and interrupted and continued: the same findings."""

import dataclasses
import json

import pytest
from helpers.commands import error_line
from helpers.plugins import RIGHT, faulty_plan, planted
from helpers.shards import sharded, without_times
from helpers.sources import needs_triton, of_release

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import Finding, KnownFinding, read_known
from attnlab.checker.plan import Plan
from attnlab.checker.report import check_library
from attnlab.cli.main import main
from attnlab.kernels import find_backend
from attnlab.tasks.local import LocalEngine
from attnlab.tasks.store import Shard


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the plan of a kernel with three faults."""
    return faulty_plan(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(plan):
    """Return the report of the whole check, run in this process."""
    return check_library(plan)


@pytest.mark.slow
def test_the_same_findings_everywhere(plan, whole, tmp_path):
    """In this process, and in three shards that two workers run."""
    assert len({finding.group for finding in whole.findings}) >= 3
    assert whole.cases == whole.cases_run == 8
    assert any(finding.seen > 1 for finding in whole.findings)
    with LocalEngine(2) as engine:
        merged, parts = sharded(plan, tmp_path, 3, engine)
    assert without_times(merged) == without_times(whole)
    assert sum(part.cases_run for part in parts) == 8
    assert all(part.cases_run for part in parts)


def test_an_interrupted_check_continues(plan, whole, tmp_path):
    """It is stopped twice, once among the cases and once while findings are shrunk."""
    out, done = tmp_path / "s", 0

    def count(progress):
        nonlocal done
        done += 1

    for limit in (3, 9):
        done = 0
        part = check_library(plan, out=out, on_progress=count, stop=lambda: done >= limit)  # noqa: B023
        assert part.cases_run < 8 or done >= limit
    lines = (out / "outcomes.jsonl").read_text().splitlines()
    again = check_library(plan, out=out)
    assert without_times(again) == without_times(whole)
    assert (out / "outcomes.jsonl").read_text().splitlines()[: len(lines)] == lines


def test_a_change_of_the_kernel_needs_another_store(tmp_path, capsys):
    out, backend = tmp_path / "s", planted(tmp_path, RIGHT)
    flags = ("check", backend.spec, "--cases", "1", "--engine", "local:1", "--out", str(out))
    assert main([*flags, "--json"]) == 0
    capsys.readouterr()
    before = (out / "header.json").read_bytes(), (out / "outcomes.jsonl").read_bytes()
    file = tmp_path / "kernel.py"
    file.write_text(file.read_text() + "\n# changed\n")
    assert "digest is" in error_line(capsys, flags)
    assert ((out / "header.json").read_bytes(), (out / "outcomes.jsonl").read_bytes()) == before


def test_without_all_shards_nothing_is_merged(plan, tmp_path, capsys):
    sharded(dataclasses.replace(plan, cases=2), tmp_path, 2)
    assert "missing 2/2" in error_line(capsys, ["merge", str(tmp_path / "1")])
    assert main(["merge", str(tmp_path / "1"), str(tmp_path / "2"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cases"], document["cases_run"], document["findings"]) == (2, 2, [])
    assert "must be a store" in error_line(capsys, ["merge", str(tmp_path)])


def test_time_that_is_up_is_no_success(plan, capsys):
    """Cases that did not run are named at the start and the end, and make exit code 3."""
    flags = ["check", plan.backend.spec, "--cases", "6", "--seconds", "0.001"]
    assert main([*flags, "--engine", "local:1"]) == 3
    shown = capsys.readouterr().out
    assert "cases did not run" in shown.partition("findings")[2][:300]
    assert shown.splitlines()[-1].startswith("not run: unified_attention: ")
    assert main([*flags, "--json"]) == 3
    (entry,) = json.loads(capsys.readouterr().out)["not_run"]
    assert (entry["op"], entry["reason"]) == ("unified_attention", "the time was up")


def test_verdicts_keep_a_finding(plan):
    (case,) = [task.payload["case"] for task in plan.tasks()[:1]]
    fields = {"op": "unified_attention", "kind": "fails", "evidence": "e", "diagnosis": "d"}
    finding = Finding.from_verdict(json.loads(json.dumps({**fields, "case": case})))
    assert Finding.from_verdict(json.loads(json.dumps(finding.to_verdict()))) == finding


@pytest.mark.releases
@needs_triton
def test_a_release_in_shards(tmp_path):
    """Findings of kernels that fail to compile, leak and write nothing wrong."""
    backend = find_backend("vllm", of_release("0.11.2").path, "cpu")
    plan = Plan(backend=backend, ops=("merge_attn_states", "reshape_and_cache_flash"), cases=8)
    with LocalEngine(2) as engine:
        whole = check_library(plan, engine)
    merged, _ = sharded(plan, tmp_path, 3)
    assert without_times(merged) == without_times(whole)
    assert whole.cases_run == whole.cases


# Known findings: they do not count, and one that no longer appears does.


LINK = "https://example.org/issues/7#note"
FIELDS = {"op": "unified_attention", "kind": "wrong_output", "link": LINK}
DOUBLED = KnownFinding(**FIELDS, diagnosis="scale_doubled")
OTHER = KnownFinding(**FIELDS, diagnosis="sink_ignored")


@pytest.fixture(scope="module")
def plan_with_known(tmp_path_factory):
    """Return the plan of a kernel with a doubled scale."""
    backend = planted(tmp_path_factory.mktemp("k"), RIGHT.replace("* scale", "* 2 * scale"))
    return Plan(backend=backend, ops=backend.ops, cases=1)


@pytest.fixture(scope="module")
def store(plan_with_known, tmp_path_factory):
    """Return a store in which the check has run, so that each report is made of its outcomes."""
    out = tmp_path_factory.mktemp("known") / "store"
    check_library(plan_with_known, out=out)
    return out


@pytest.mark.parametrize(
    ("known", "code", "shown", "missing"),
    [
        ([], 1, 0, 0),
        ([DOUBLED], 0, 1, 0),
        ([KnownFinding(**FIELDS)], 0, 1, 0),
        ([OTHER], 1, 0, 1),
        ([DOUBLED, OTHER], 1, 1, 1),
        ([KnownFinding(**{**FIELDS, "op": "merge_attn_states"}), DOUBLED], 0, 1, 0),
    ],
)
def test_exit_codes(plan_with_known, store, known, code, shown, missing):
    report = check_library(plan_with_known, out=store, known=known)
    assert report.exit_code == code
    assert (len(report.known), len(report.missing)) == (shown, missing)
    assert len(report.findings) == 1
    assert len(report.unexpected) == 1 - shown


def test_a_shard_misses_nothing(plan_with_known):
    """What does not appear in a part of the cases may appear in another."""
    report = check_library(plan_with_known, shard=Shard(index=1, count=2), known=[OTHER])
    assert report.missing == []


def test_text_and_json(tmp_path):
    text, document = tmp_path / "known.txt", tmp_path / "known.json"
    text.write_text(
        f"# faults that are reported\n\nunified_attention wrong_output scale_doubled {LINK}  # a word\n"
        f"unified_attention fails {LINK}\n"
        f"decode_attention_fwd wrong_output block offset beyond 2^31 elements {LINK}\n"
    )
    entries = read_known(text)
    assert entries[0] == DOUBLED
    assert [entry.diagnosis for entry in entries[1:]] == ["*", "block offset beyond 2^31 elements"]
    document.write_text(json.dumps([DOUBLED.to_dict(), FIELDS]))
    assert read_known(document) == [DOUBLED, KnownFinding(**FIELDS)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "unified_attention", "line 1"),
        ("a.txt", "softmax fails http://x", "op in line 1"),
        ("a.txt", "unified_attention slow http://x", "kind in line 1"),
        ("a.json", "{}", "a list"),
        ("a.json", "[{}]", "entry 0"),
        ("a.json", "[", "JSON"),
    ],
)
def test_wrong_entries_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidCase, match=words):
        read_known(tmp_path / name)
