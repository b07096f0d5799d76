"""A check of many releases: what runs, what they share, and the state of each release for a fault."""

from pathlib import Path

import pytest
from helpers.commands import error_line

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import Finding
from attnlab.checker.plan import shrink_key
from attnlab.checker.release_plan import Release, ReleasePlan, op_digest
from attnlab.checker.release_results import build_table, merged_releases
from attnlab.cli.main import main
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.tasks.shard import Shard
from attnlab.tasks.task import CRASH, DONE, NOT_RUN, Outcome, Task

OPS = ("unified_attention", "merge_attn_states")
UNIFIED = "from vllm.v1.attention.ops.helper import f\n\n\ndef unified_attention():\n    pass\n"


def _release(folder: Path, version: str, **files: str) -> Release:
    ops = folder / version / "vllm" / "v1" / "attention" / "ops"
    ops.mkdir(parents=True)
    (folder / version / "PKG-INFO").write_text(f"Version: {version}\n")
    for name, text in files.items():
        (ops / f"{name}.py").write_text(text)
    return Release(
        version=version, backend=VllmBackend(path=folder / version, requested_device="cpu")
    )


@pytest.fixture
def plan(tmp_path: Path) -> ReleasePlan:
    """Return the plan of five releases.

    0.12.0 and 0.13.0 have the same unified_attention; 0.14.0 changes only a file that it imports; 0.15.0
    changes a file that it does not import and adds merge_attn_states; 0.16.0 removes unified_attention.
    """
    unified = {"triton_unified_attention": UNIFIED}
    merge = {"triton_merge_attn_states": "def merge_attn_states():\n    pass\n"}
    releases = (
        _release(tmp_path, "0.12.0", **unified, helper="f = 1\n"),
        _release(tmp_path, "0.13.0", **unified, helper="f = 1\n"),
        _release(tmp_path, "0.14.0", **unified, helper="f = 2\n"),
        _release(tmp_path, "0.15.0", **unified, helper="f = 2\n", other="g = 1\n", **merge),
        _release(tmp_path, "0.16.0", **merge),
    )
    return ReleasePlan(releases=releases, ops=OPS, cases=3)


def test_an_op_runs_once_for_releases_that_share_it(plan: ReleasePlan) -> None:
    """The digest covers the files that the op imports, and no others."""
    unified, merge = OPS
    assert plan.runs == {
        "0.12.0": {unified: "0.12.0"},
        "0.13.0": {unified: "0.12.0"},
        "0.14.0": {unified: "0.14.0"},
        "0.15.0": {unified: "0.14.0", merge: "0.15.0"},
        "0.16.0": {merge: "0.15.0"},
    }
    assert len(plan.tasks()) == 3 * 3  # of nine ops, three run


def test_the_rules_of_a_release_are_part_of_the_digest(tmp_path: Path) -> None:
    """The same file is judged by other rules up to 0.11."""
    old, new = (
        _release(tmp_path, version, triton_unified_attention=UNIFIED)
        for version in ("0.11.2", "0.12.0")
    )
    digests = [op_digest(release.backend.source, OPS[0]) for release in (old, new)]
    assert None not in digests
    assert digests[0] != digests[1]


def _verdict(task: Task, *diagnoses: str, **changed: object) -> Outcome:
    case = task.payload["case"]
    findings = [
        {"op": case["op"], "kind": "wrong_output", "evidence": "", "diagnosis": d, "case": case}
        for d in diagnoses
    ]
    verdict = {"ran": True, "findings": findings, "unsupported": "", "not_run": "", "reads": None}
    return Outcome(key=task.key, status=DONE, verdict={**verdict, **changed}, seconds=1.0)


def test_the_state_of_each_release(plan: ReleasePlan) -> None:
    """finding, sound, absent and not run, from the outcomes of the cases that can show the fault."""
    tasks = plan.tasks()
    first, second, merge = tasks[:3], tasks[3:6], tasks[6:]
    outcomes = [
        _verdict(first[0], "a", "b"),
        _verdict(first[1]),
        Outcome(key=first[2].key, status=CRASH, text="ended"),
        _verdict(second[0], "a"),
        _verdict(second[1], ran=False, unsupported="no sinks"),
        Outcome(key=second[2].key, status=NOT_RUN, text="no memory"),
        *map(_verdict, merge[1:]),
    ]
    header, by_key = plan.header(tasks), {outcome.key: outcome for outcome in outcomes}
    table = build_table(header, tasks, by_key, seconds=0.0, stopped="the time was up")
    states = {fault.finding.diagnosis: [*fault.cells.values()] for fault in table.faults}
    f, s, a, n = "finding", "sound", "absent", "not run"
    assert states == {"a": [f, f, f, f, a], "b": [f, f, s, s, a], "crash": [f, f, n, n, a]}
    assert {(entry.op, entry.reason) for entry in table.not_run} == {
        ("0.14.0 unified_attention", "no memory"),
        ("0.15.0 merge_attn_states", "the time was up"),
    }
    assert (table.cases, table.cases_run, table.exit_code) == (9, 6, 1)


def test_a_feature_that_a_release_lacks_is_absent(plan: ReleasePlan) -> None:
    """Not sound: the case that shows the fault is not supported there."""
    tasks = plan.tasks()
    outcomes = [_verdict(tasks[1], "a"), _verdict(tasks[4], ran=False, unsupported="no sinks")]
    outcomes += [_verdict(task) for task in tasks if task not in (tasks[1], tasks[4])]
    by_key = {outcome.key: outcome for outcome in outcomes}
    table = build_table(plan.header(tasks), tasks, by_key, seconds=0.0, stopped="")
    assert [*table.faults[0].cells.values()] == ["finding", "finding", "absent", "absent", "absent"]


def test_a_fault_is_shrunk_in_its_first_release(plan: ReleasePlan) -> None:
    """Once, and the table has the smallest case."""
    tasks = plan.tasks()
    outcomes = {task.key: _verdict(task, "a") for task in tasks if "unified" in task.key}
    shrinking = plan.shrink_tasks(tasks, outcomes)
    small = {**tasks[0].payload["case"], "query_lens": [1], "ctx_lens": [0], "num_blocks": None}
    finding = {**outcomes[tasks[0].key].verdict["findings"][0], "case": small}
    assert [task.key for task in shrinking] == [
        shrink_key(tasks[0], Finding.from_verdict(outcomes[tasks[0].key].verdict["findings"][0]))
    ]
    outcomes[shrinking[0].key] = Outcome(
        key=shrinking[0].key, status=DONE, verdict={"finding": finding}
    )
    table = build_table(plan.header(tasks), tasks, outcomes, seconds=0.0, stopped="")
    assert table.faults[0].finding.case.query_lens == (1,)


def test_merged_shards_give_the_table_of_the_whole(plan: ReleasePlan) -> None:
    """The header has the tasks, and no path of this machine."""
    tasks = plan.tasks()
    outcomes = {task.key: _verdict(task, "a") for task in tasks}
    whole = build_table(plan.header(tasks), tasks, outcomes, seconds=9.0, stopped="")
    header = {**plan.header(tasks, Shard(index=1, count=2)), "shard": "1/1"}
    assert merged_releases(header, outcomes).to_dict() == whole.to_dict()
    assert str(plan.releases[0].backend.path) not in str(header)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["0.12.0..0.17.0"], "releases must be one of 0.12.0, 0.13.0,"),
        (["--out", "full"], "out must be a new folder, an empty one or a store"),
        (["--op", "unified_attention", "--engine", "nothing"], "engine must be"),
        (["--times", "none"], "none must be a store"),
    ],
)
def test_wrong_arguments_are_one_line(
    plan: ReleasePlan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    words: str,
) -> None:
    """Exit code 2, and one line that names the field."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    sources = plan.releases[0].backend.path.parent
    (tmp_path / "other").mkdir()
    for path in sources.glob("0.*"):
        (tmp_path / "other" / path.name).symlink_to(path)
    line = error_line(capsys, ["releases", *argv, "--sources", "other"])
    assert line.startswith(f"attnlab: {words}")


def test_a_folder_that_has_a_release_twice_is_refused(
    tmp_path: Path, plan: ReleasePlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both paths are named."""
    assert plan.releases
    (tmp_path / "again").symlink_to(tmp_path / "0.12.0")
    line = error_line(capsys, ["releases", "--sources", str(tmp_path)])
    assert line.startswith("attnlab: sources must have each release once, got 0.12.0 in ")
    assert f"{tmp_path / '0.12.0'} and {tmp_path / 'again'}" in line
    with pytest.raises(InvalidCase):
        op_digest(
            _release(tmp_path, "0.17.0", triton_unified_attention="def (").backend.source, OPS[0]
        )


def test_a_file_that_is_not_a_vllm_is_left_out(
    tmp_path: Path, plan: ReleasePlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named; a damaged archive is refused, because it may be a release."""
    assert plan.releases
    (tmp_path / "notes.txt").write_text("the releases")
    (tmp_path / "store").mkdir()
    argv = ["releases", "0.16.0", "--sources", str(tmp_path), "--op", "merge_attn_states"]
    assert main([*argv, "--cases", "1", "--engine", "local:1"]) in (1, 3)
    notice = capsys.readouterr().err
    assert "because it is not a vLLM: notes.txt, store" in notice
    (tmp_path / "vllm-0.17.0.whl").write_text("no archive")
    line = error_line(capsys, argv)
    assert line.startswith(f"attnlab: {tmp_path / 'vllm-0.17.0.whl'}") or "source must" in line
