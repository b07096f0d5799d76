"""The engine ray, on one local cluster: a task that breaks its worker loses nothing but itself."""

import json
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.commands import error_line
from helpers.jobs import ToyJob, toy_tasks
from helpers.plugins import RIGHT, planted
from helpers.processes import descendants, is_running, popen, survivors, wait_for
from helpers.shards import sharded, without_times

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.checker.plan import Plan
from attnlab.checker.report import check_library
from attnlab.tasks.local import LocalEngine
from attnlab.tasks.ray_driver import end_tree
from attnlab.tasks.run import find_engine
from attnlab.tasks.task import Task

pytestmark = pytest.mark.slow  # all, so that one cluster is started in a run of all tests

JOB = ToyJob()  # the same for most tests, so that the actors are kept
LOOP = """
import pathlib, time

def my_attention(call):
    pathlib.Path({started!r}).touch()
    while True:
        time.sleep(0.01)
"""
REFUSING = """

def refusing(call):
    for name in ("sliding_window", "alibi_slopes"):
        value = getattr(call, name)
        if value is not None and torch.as_tensor(value).any():
            raise ValueError(f"no {name} here")
    my_attention(call)
"""


@pytest.fixture(scope="module")
def engine():
    """Return an engine on a local cluster that all tests share, and check that it leaves nothing."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        with find_engine("ray") as found:
            folder = Path(found._folder)
            assert folder.is_dir()
            yield found
            processes = descendants(found._process.pid) | {found._process.pid}
    assert len(processes) > 3
    assert survivors(processes) == []
    assert not folder.exists()


@pytest.fixture
def remote(engine, monkeypatch):
    """Let `--engine ray` use the shared cluster."""
    monkeypatch.setenv("RAY_ADDRESS", engine.address)


def outcomes(engine, tasks, job=None, **options):
    """Return the outcomes by key, and check that each task has at most one."""
    found = {}

    def note(outcome):
        assert outcome.key not in found
        found[outcome.key] = outcome

    engine.run(job or JOB, tasks, note, **options)
    return found


def test_an_interrupt_ends_the_actors_and_nothing_else(engine, remote, tmp_path):
    """The cluster, which somebody else started, goes on. The first test: no other actors use its cores."""
    started = tmp_path / "started"
    (tmp_path / "loop.py").write_text(LOOP.format(started=str(started)))
    before = descendants(engine._process.pid)
    command = ("check", f"{tmp_path}/loop.py:my_attention", "--cases", "1", "--json")
    argv = [sys.executable, "-m", "attnlab", *command, "--engine", "ray"]
    with popen(argv, stdout=-1, stderr=-1) as process:
        wait_for(started.exists)
        new = descendants(process.pid) | (descendants(engine._process.pid) - before)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert survivors(new) == []
    assert len(new) >= 3
    assert process.returncode == 130
    assert [entry["reason"] for entry in json.loads(stdout)["not_run"]] == [
        "the check was interrupted"
    ]
    assert stderr.count(b"\n") == 1
    assert outcomes(engine, toy_tasks(""))["task-0"].status == "done"


def test_a_fault_costs_only_its_task(engine):
    """The outcomes are those of local; only that an actor is lost cannot happen there."""
    faults = ("", "segfault", "", "hang", "lost", "exhaust", "bug", "", "")
    tasks = toy_tasks(*faults, limit_s=2.0)
    found = outcomes(engine, tasks)
    with LocalEngine(2) as local:
        expected = outcomes(local, tasks)
    fields = ("status", "text")
    for task in tasks:
        for field in fields:
            assert getattr(found[task.key], field) == getattr(expected[task.key], field)
    statuses = [found[task.key].status for task in tasks]
    assert statuses[1] == "crash"
    assert statuses[3:7] == ["timeout", "device_lost", "out_of_memory", "error"]
    assert {*statuses[:1], *statuses[2:3], *statuses[7:]} == {"done"}
    assert "SIGSEGV" in found["task-1"].text


def test_a_lost_actor_costs_only_its_task(engine):
    """Its case ran in another process, so the loss is no fault of the case."""
    found = outcomes(engine, toy_tasks("", "kill_parent", "", ""))
    assert [found[f"task-{i}"].status for i in range(4)] == ["done", "not_run", "done", "done"]
    assert "a Ray worker was lost: " in found["task-1"].text
    assert "\n" not in found["task-1"].text


def test_workers_are_kept_between_tasks_and_runs(engine):
    found = []
    for _ in range(2):
        engine.run(JOB, toy_tasks("", "", "", "", "", ""), found.append)
    counts = {}
    for outcome in found:
        counts.setdefault(outcome.verdict["pid"], []).append(outcome.verdict["count"])
    assert 1 <= len(counts) <= engine._count
    assert all(b == a + 1 for numbers in counts.values() for a, b in pairwise(numbers))


def test_stop_drops_what_runs_and_late_tasks_do_not_start(engine):
    done = outcomes(engine, toy_tasks("", ""), is_late=iter([False, True]).__next__)
    assert set(done) == {"task-0"}
    assert {outcome.status for outcome in done.values()} == {"done"}
    found, began = {}, 0.0

    def stop():
        nonlocal began
        began = began or (time.monotonic() if "task-1" in found else 0.0)
        return bool(began)

    engine.run(JOB, toy_tasks("hang", ""), lambda one: found.update({one.key: one}), stop)
    assert set(found) == {"task-1"}
    assert time.monotonic() - began < 60


def test_memory_is_admitted_before_it_is_allocated(engine):
    """Two tasks that fit only alone do not overlap; one that never fits does not start."""
    outcomes(engine, toy_tasks("", ""))
    (free,) = engine._free_bytes.values()
    sizes = (0.6, 0.6, 100.0)
    tasks = [
        Task(key=str(i), payload={"n": i, "sleep": 0.6}, memory_bytes=int(size * free))
        for i, size in enumerate(sizes)
    ]
    began = time.monotonic()
    found = outcomes(engine, tasks)
    assert time.monotonic() - began > 1.2
    assert [found[task.key].status for task in tasks] == ["done", "done", "not_run"]


def test_a_job_that_cannot_open_raises(engine):
    with pytest.raises(AttnLabError, match="no kernels here"):
        outcomes(engine, toy_tasks(""), ToyJob(fails_to_open=True))


def test_a_node_with_other_versions_is_rejected(engine, monkeypatch):
    """The variable is set in this process, but not on the cluster, which runs already."""
    monkeypatch.setenv("VERSION_OF_TEST", "1")
    with pytest.raises(Unavailable, match="the same version, 1, got"):
        outcomes(engine, toy_tasks(""), ToyJob(version_from="VERSION_OF_TEST"))


def test_the_same_findings_on_every_engine(engine, tmp_path):
    """Worker processes, three merged shards, and a cluster."""
    backend = planted(tmp_path, RIGHT + REFUSING, "refusing")
    plan = Plan(backend=backend, ops=backend.ops, cases=5)
    with LocalEngine(2) as local:
        whole = check_library(plan, local)
    assert len({finding.group for finding in whole.findings}) == 2
    merged, _ = sharded(plan, tmp_path, 3)
    assert without_times(merged) == without_times(whole)
    assert without_times(check_library(plan, engine)) == without_times(whole)


def test_a_cluster_that_is_not_reachable(capsys, tmp_path):
    """One line, soon, and no store is begun."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for server, problem in ((closed, "Connection refused"), (silent, "timed out")):
            began, out = time.monotonic(), tmp_path / "s"
            address = f"ray://127.0.0.1:{server.getsockname()[1]}"
            flags = ("check", "--cases", "1", "--engine", address, "--out", str(out))
            assert f"{address} is not reachable: {problem}" in error_line(capsys, flags)
            assert time.monotonic() - began < 60
            assert not out.exists()


def test_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'attnlab[ray]'" in error_line(capsys, ["check", "--engine", "ray"])


def test_a_tree_of_processes_ends():
    """Also a process that left its group and whose parent has ended."""
    orphan = "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)"
    code = (
        "import ctypes, subprocess, sys, time; ctypes.CDLL(None).prctl(36, 1);"
        f"subprocess.run([sys.executable, '-c', {orphan!r}]); time.sleep(100)"
    )
    with popen([sys.executable, "-c", code]) as process:
        wait_for(lambda: any(_name(one) == "sleep" for one in descendants(process.pid)))
        processes = descendants(process.pid)
        end_tree(process.pid)
    assert [one for one in processes if is_running(one)] == []


def _name(process):
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""
