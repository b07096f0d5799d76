"""Progress: steps, the share that is done, and the Cancel button."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.panels import SMALL

from attnlab.case.case import Case
from attnlab.kernels.backend import STEPS, CellSteps, time_left
from attnlab.lab.lab import Lab
from attnlab.mutation.power import MUTANTS, measure_power
from attnlab.show.panels import panel
from attnlab.show.panels.boxes import (
    PICTURES,
    Job,
    LatestOnly,
    Outdated,
    Progress,
    share_done,
)


def test_cancel_keeps_the_old_results() -> None:
    stopped = threading.Event()
    reached = threading.Event()

    class Slow(Lab):
        def run(self, case: Case):  # type: ignore[no-untyped-def]
            if case.stage == "sound":
                while not stopped.wait(0.01):
                    assert self.on_step is not None
                    reached.set()
                    self.on_step("kernels", 3, 9)
            return super().run(case)

    view = panel(SMALL, knobs=("stage",), lab=Slow())
    assert view.wait(30)
    before, verdict = view.pictures["error"].png, view.texts["verdict"].value
    view.controls["stage"].input.value = "sound"
    assert reached.wait(30)
    deadline = time.monotonic() + 30
    while "kernels: 3 of 9" not in view.progress._text.value:
        assert time.monotonic() < deadline, "progress never showed"
        time.sleep(0.01)
    assert view.progress._bar.layout.display != "none"
    view.progress._button.click()
    assert view.wait(30)
    assert view.is_stale
    assert view.pictures["error"].png == before
    assert view.texts["verdict"].value == verdict
    assert "cancelled" in view.progress._text.value
    assert view.progress._bar.layout.display == "none"
    stopped.set()
    assert view.show(stage="cast_after_cumsum").case == SMALL


def test_the_time_left_is_that_of_the_step() -> None:
    assert time_left(30.0, 3, 9) == ", about 60 s left"
    assert [time_left(*of) for of in ((0.5, 3, 9), (30.0, 0, 9), (30.0, None, None))] == [""] * 3


def test_a_long_cell_has_a_line_that_is_empty_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now, events = list[str](), [0.0], {}

    class Handle:
        def update(self, data: dict[str, object], raw: bool) -> None:
            shown.append(str(data["text/plain"]))

    def display(data: dict[str, object], **_: object) -> Handle:
        Handle().update(data, raw=True)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("attnlab.kernels.backend.time.perf_counter", lambda: now[0])
    steps = CellSteps(SimpleNamespace(events=SimpleNamespace(register=events.__setitem__)))
    events["pre_run_cell"]()
    for now[0], done in ((1.0, 1), (3.0, 2), (3.1, 3), (5.0, 4)):
        steps("kernels", done, 8)
    threading.Thread(target=steps, args=("of a panel", 1, 2)).start()
    events["post_run_cell"]()
    events["post_run_cell"]()
    assert shown == ["kernels: 2 of 8, about 6 s left", "kernels: 4 of 8, about 4 s left", ""]
    events["pre_run_cell"]()
    steps("batch")
    assert len(shown) == 3
    for part in steps.parts(["a", "b"]):
        now[0] += 3.0
        steps(f"kernels of {part}")
    assert shown[3:] == ["0 of 2; kernels of a", "1 of 2, about 6 s left; kernels of b"]


def test_the_steps_of_power_are_counted() -> None:
    """So that the time left is known."""
    steps = list[tuple[object, ...]]()
    mutants = [one for one in MUTANTS if one.name in ("scale_doubled", "rows_zero")]
    report = measure_power(SMALL, mutants=mutants, on_step=lambda *step: steps.append(step))
    count = len(report.mutants)
    assert [step for step in steps if step[0] == "mutants"] == [
        ("mutants", i, count) for i in range(count)
    ]
    assert any(step[0] == "changes of the test" and step[2] > 1 for step in steps)


def test_a_long_step_is_shown() -> None:
    """A step that reports nothing appears after the delay and disappears at its end."""
    go_on = threading.Event()

    class Stuck(Lab):
        def run(self, case: Case):  # type: ignore[no-untyped-def]
            if case.stage == "sound":
                assert self.on_step is not None
                self.on_step("batch")
                assert go_on.wait(30)
            return super().run(case)

    view = panel(SMALL, knobs=("stage",), lab=Stuck())
    assert view.wait(30)
    view.set(stage="sound")
    deadline = time.monotonic() + 30
    while view.progress._button.layout.display == "none":
        assert time.monotonic() < deadline, "the button never showed"
        time.sleep(0.01)
    assert ">batch<" in view.progress._text.value
    go_on.set()
    assert view.wait(30)
    time.sleep(0.5)  # longer than the delay
    assert view.progress._button.layout.display == "none"
    assert not view.is_stale


def test_a_step_of_an_outdated_job_ends_it() -> None:
    worker: LatestOnly[int] = LatestOnly(lambda request, job: None, lambda request, error: None)
    step = Progress(worker.cancel).on_step_of(Job(generation=worker.generation, worker=worker))
    step("batch")
    worker.cancel()
    with pytest.raises(Outdated):
        step("cache")


def test_a_lab_reports_its_steps_in_order() -> None:
    """With how many sequences of a step are done."""
    steps: list[tuple[str, int | None, int | None]] = []
    Lab(on_step=lambda step, done=None, total=None: steps.append((step, done, total))).run(SMALL)
    assert tuple(dict.fromkeys(step for step, *_ in steps)) == STEPS
    seqs = len(SMALL.lengths.query_lens)
    assert [done for step, done, _ in steps if step == "reference"] == [None, *range(1, seqs)]
    assert ("kernels", 1, 2) in steps  # those that the kernel serves


def test_the_share_done_never_decreases() -> None:
    steps = [
        *(("batch", None, None), ("cache", None, None), ("kernels", None, None)),
        *(("kernels", 3, 6), ("kernels", 6, 6), ("reference", None, None)),
        *(("a notice", None, None), ("compare", None, None), (PICTURES, 1, 2)),
    ]
    shares, before = [], 0.0
    for step in steps:
        before = share_done(*step, before)
        shares.append(before)
    assert shares == sorted(shares)
    assert shares[3] == pytest.approx(2.5 / 6)
    assert shares[6] == shares[5]
    assert share_done("batch", None, None, 0.9) == 0.9
    assert share_done("kernels", 0, 0, 0.0) == pytest.approx(2 / 6)


# LatestOnly: only the newest request is worked on and published.


def recording_worker(
    computed: list[int], quiet_s: float = 0.02
) -> tuple[LatestOnly[int], list[int]]:
    """Return a worker that records each request, and the list of published requests."""
    published: list[int] = []

    def work(request: int, job: Job) -> None:
        computed.append(request)
        job.publish(lambda: published.append(request))

    return LatestOnly(work, lambda request, error: None, quiet_s), published


def test_the_first_and_the_last_of_a_series_are_computed() -> None:
    """The first starts at once: a single change need not wait."""
    computed: list[int] = []
    worker, published = recording_worker(computed, quiet_s=0.5)
    for request in range(10):
        worker.submit(request)
        time.sleep(0.02)
    assert worker.wait(10)
    assert (computed, published) == ([0, 9], [0, 9])


def test_no_garbage_is_collected_during_a_job() -> None:
    enabled: list[bool] = []
    worker: LatestOnly[int] = LatestOnly(
        lambda request, job: enabled.append(gc.isenabled()), lambda request, error: None
    )
    worker.submit(1)
    assert worker.wait(10)
    assert (enabled, gc.isenabled()) == ([False], True)


def test_a_new_request_ends_the_running_job() -> None:
    begun, go_on, ended, published = threading.Event(), threading.Event(), [], []

    def work(request: int, job: Job) -> None:
        begun.set()
        assert go_on.wait(10)
        try:
            job.check()
        except BaseException:
            ended.append(request)
            raise
        job.publish(lambda: published.append(request))

    worker: LatestOnly[int] = LatestOnly(work, lambda request, error: None, 0.0)
    worker.submit(1)
    assert begun.wait(10)
    worker.submit(2)
    go_on.set()
    assert worker.wait(10)
    assert (ended, published) == ([1], [2])


def test_a_cancelled_job_publishes_nothing() -> None:
    """Neither a result nor an error, even if the job never checks."""
    begun, go_on, published = threading.Event(), threading.Event(), []

    def work(request: int, job: Job) -> None:
        begun.set()
        assert go_on.wait(10)
        if request == 2:
            raise KeyError("broken")
        job.publish(lambda: published.append(request))

    worker: LatestOnly[int] = LatestOnly(work, lambda request, error: published.append(error), 0.0)
    for request in (1, 2):
        begun.clear()
        go_on.clear()
        worker.submit(request)
        assert begun.wait(10)
        worker.cancel()
        assert worker.is_busy  # until its work has ended
        go_on.set()
        assert worker.wait(10)
    assert published == []
    worker.submit(3)
    assert worker.wait(10)
    assert published == [3]


def test_an_error_is_reported_and_the_worker_continues() -> None:
    events: list[object] = []

    def work(request: int, job: Job) -> None:
        if request == 1:
            raise KeyError("broken")
        job.publish(lambda: events.append(request))

    worker: LatestOnly[int] = LatestOnly(
        work, lambda request, error: events.append((request, error)), 0
    )
    worker.submit(1)
    assert worker.wait(10)
    worker.submit(2)
    assert worker.wait(10)
    assert events[0][0] == 1
    assert isinstance(events[0][1], KeyError)
    assert events[1:] == [2]
