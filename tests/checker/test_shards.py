"""One check in one process, by workers, in three shards, and interrupted and continued: the same findings."""

import dataclasses
import json

import pytest
from helpers.commands import error_line
from helpers.plugins import RIGHT, faulty_plan, planted
from helpers.shards import sharded, without_times
from helpers.sources import needs_triton, of_release

from attnlab.checker.finding import Finding
from attnlab.checker.library import check_library
from attnlab.checker.plan import Plan
from attnlab.cli.main import main
from attnlab.kernels import find_backend
from attnlab.tasks.local import LocalEngine


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the plan of a kernel with three faults."""
    return faulty_plan(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(plan):
    """Return the report of the whole check, run in this process."""
    return check_library(plan)


def test_the_same_findings_everywhere(plan, whole, tmp_path):
    """In this process, and in three shards that two workers run."""
    assert len({finding.group for finding in whole.findings}) >= 3
    assert whole.cases == whole.cases_run == 14
    assert any(finding.seen > 1 for finding in whole.findings)
    with LocalEngine(2) as engine:
        merged, parts = sharded(plan, tmp_path, 3, engine)
    assert without_times(merged) == without_times(whole)
    assert sum(part.cases_run for part in parts) == 14
    assert all(part.cases_run for part in parts)


def test_an_interrupted_check_continues(plan, whole, tmp_path):
    """It is stopped twice, once among the cases and once while findings are shrunk."""
    out, done = tmp_path / "s", 0

    def count(progress):
        nonlocal done
        done += 1

    for limit in (5, 12):
        done = 0
        part = check_library(plan, out=out, on_progress=count, stop=lambda: done >= limit)  # noqa: B023
        assert part.cases_run < 14 or done >= limit
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
