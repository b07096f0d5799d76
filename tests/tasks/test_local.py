"""The engines: a task that breaks its worker loses nothing but itself."""

import os
import time

import pytest
from helpers.jobs import ToyJob, toy_tasks
from helpers.processes import is_running

from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.tasks import local
from attnlab.tasks.local import LocalEngine
from attnlab.tasks.run import find_engine
from attnlab.tasks.task import InProcess, Outcome, Task


def outcomes(tasks, processes=2, job=None, **options):
    """Return the outcomes by key, and check that each task has one."""
    found: dict[str, Outcome] = {}

    def note(outcome):
        assert outcome.key not in found
        found[outcome.key] = outcome

    with LocalEngine(processes) as engine:
        engine.run(job or ToyJob(), tasks, note, **options)
    return found


@pytest.fixture
def idle_time_counts(monkeypatch):
    """Count time in which a task does nothing as its processor time, so that a hang ends soon."""
    monkeypatch.setattr(local, "_IDLE_SHARE", 1.0)


@pytest.mark.usefixtures("idle_time_counts")
def test_a_fault_costs_only_its_task():
    faults = ("", "exit", "", "hang", "lost", "memory", "bug", "", "")
    tasks = toy_tasks(*faults, limit_s=2.0)
    found = outcomes(tasks)
    statuses = [found[task.key].status for task in tasks]
    expected = {
        "": "done",
        "exit": "crash",
        "hang": "timeout",
        "lost": "device_lost",
        "memory": "out_of_memory",
        "bug": "error",
    }
    assert statuses == [expected[fault] for fault in faults]
    assert found["task-2"].verdict["double"] == 4
    assert "exit code 3" in found["task-1"].text
    assert "2 s" in found["task-3"].text
    assert found["task-6"].text == "ValueError: two lines"
    assert "ValueError" in found["task-6"].traceback


def test_a_signal_to_a_whole_group_is_no_crash_of_a_kernel():
    """SIGTERM ends the parent, which stops its workers; a worker that gets it too goes on until then."""
    found = outcomes(toy_tasks("terminated", "", limit_s=20.0), processes=1)
    assert [one.status for one in found.values()] == ["done", "done"]


def test_linear_algebra_of_a_worker_has_one_thread(monkeypatch):
    """Unless the environment of the parent says otherwise, which stays as it is."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for name in names[:2]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(names[2], "3")
    task = Task(key="threads", payload={"n": 1, "variables": names}, limit_s=20.0)
    verdict = outcomes([task])["threads"].verdict
    assert [verdict[name] for name in names] == ["1", "1", "3"]
    assert [os.environ.get(name) for name in names] == [None, None, "3"]


def test_workers_are_kept_between_tasks_and_runs():
    job, found = ToyJob(), []
    with LocalEngine(1) as engine:
        for _ in range(2):
            engine.run(job, toy_tasks("", "", ""), found.append)
        process = found[0].verdict["pid"]
        assert is_running(process)
    assert [outcome.verdict["count"] for outcome in found] == [1, 2, 3, 4, 5, 6]
    assert {outcome.verdict["pid"] for outcome in found} == {process} != {os.getpid()}
    assert not is_running(process)


def test_stop_drops_what_runs():
    began = time.monotonic()
    found = outcomes(toy_tasks("hang", ""), stop=lambda: time.monotonic() - began > 3.0)
    assert set(found) == {"task-1"}
    assert time.monotonic() - began < 60


def test_late_tasks_do_not_start_and_the_others_end():
    found = []
    calls = iter([False, True, True, True])
    with LocalEngine(1) as engine:
        engine.run(ToyJob(), toy_tasks("", ""), found.append, is_late=lambda: next(calls))
    assert [outcome.key for outcome in found] == ["task-0"]


def test_a_job_that_cannot_open_raises():
    with pytest.raises(AttnLabError, match="no kernels here"):
        outcomes(toy_tasks(""), job=ToyJob(fails_to_open=True))


@pytest.mark.parametrize(("lost", "ends"), [(2, False), (3, True)])
def test_a_worker_that_is_lost_at_its_start_is_replaced(tmp_path, lost, ends):
    files = [tmp_path / str(i) for i in range(lost)]
    for file in files:
        file.touch()
    job = ToyJob(lost_starts=tuple(map(str, files)))
    if ends:
        with pytest.raises(AttnLabError, match="before its first case"):
            outcomes(toy_tasks(""), job=job)
    else:
        assert outcomes(toy_tasks(""), job=job)["task-0"].status == "done"
    assert not any(file.exists() for file in files)


def test_memory_is_admitted_before_it_is_allocated(monkeypatch):
    """Two tasks that fit only alone do not overlap; one that never fits does not start."""
    monkeypatch.setattr(local, "available_bytes", lambda: 10 << 30)
    sizes = (6, 6, 20, 6)
    tasks = [
        Task(key=str(i), payload={"n": i, "sleep": 0.3}, memory_bytes=size << 30)
        for i, size in enumerate(sizes)
    ]
    began = time.monotonic()
    found = outcomes(tasks)
    assert time.monotonic() - began > 3 * 0.3
    assert [found[task.key].status for task in tasks] == ["done", "done", "not_run", "done"]
    assert "20.0 GiB" in found["2"].text
    assert "10.0 GiB" in found["2"].text


@pytest.mark.usefixtures("idle_time_counts")
def test_the_largest_worker_is_ended_before_memory_runs_out(monkeypatch):
    """A task that ran next to others runs again alone, and then has its outcome."""
    real, began = local.available_bytes, time.monotonic()
    low = lambda: 0 if time.monotonic() - began > 2.0 else real()  # noqa: E731
    monkeypatch.setattr(local, "available_bytes", low)
    (outcome,) = outcomes(toy_tasks("hang", limit_s=3.0), processes=1).values()
    assert outcome.status == "timeout"  # it is small: others use the memory
    monkeypatch.setattr(local, "_MODEST_BYTES", 0)
    (outcome,) = outcomes(toy_tasks("hang"), processes=1).values()
    assert outcome.status == "out_of_memory"
    assert "no memory was left" in outcome.text


def test_time_without_a_core_does_not_count():
    """Elapsed time is wall time less that in the run queue; a quarter counts if nothing computes."""
    with LocalEngine(1) as engine:
        engine.run(ToyJob(), toy_tasks(""), lambda outcome: None)
        worker = engine._slots[0]
        worker._began -= 100.0  # as if it had done nothing for 100 s
        assert 20 < worker.spent_s < 50
        worker._began += 100.0
        worker._waited -= 100.0  # as if it had waited for a core for 100 s
        assert worker.elapsed_s < -50


def test_a_limit_is_processor_time():
    """A task that does nothing for longer than its limit is not stopped; one that computes is."""
    waiting = Task(key="waits", payload={"n": 1, "sleep": 2.5}, limit_s=1.0)
    assert outcomes([waiting])["waits"].status == "done"
    (outcome,) = outcomes(toy_tasks("spin", limit_s=1.0)).values()
    assert outcome.status == "timeout"
    assert "1 s of processor time" in outcome.text


def test_a_task_that_was_too_slow_next_to_others_runs_again_alone(tmp_path):
    """The first run is slow; the second, alone, is not, so nothing is stated about it."""
    once = {"n": 1, "fault": "spin_once", "file": str(tmp_path / "ran")}
    tasks = [
        Task(key="slow", payload=once, limit_s=1.0),
        Task(key="x", payload={"n": 2, "sleep": 3.0}),
    ]
    found = outcomes(tasks)
    assert [found[key].status for key in ("slow", "x")] == ["done", "done"]


def test_in_process_has_the_same_outcomes():
    tasks, found = toy_tasks("", "bug", "lost", "memory"), []
    with InProcess() as engine:
        engine.run(ToyJob(), tasks, found.append)
    statuses = ["done", "error", "device_lost", "out_of_memory"]
    assert [outcome.status for outcome in found] == statuses


@pytest.mark.parametrize(
    "name",
    [
        *("", "locals", "local:", "local:0", "local:x", "local:-1"),
        *("rays", "ray:", "ray:2", "ray://", "ray://host", "ray://host:x", "http://host:1"),
    ],
)
def test_unknown_engines(name):
    with pytest.raises(InvalidCase, match="engine must be local, local:N, ray or ray://HOST:PORT"):
        find_engine(name)
