"""Progress: steps, the share that is done, and the Cancel button."""

import threading
import time
from types import SimpleNamespace

import pytest
from helpers.panels import SMALL

from attnlab.case.case import Case
from attnlab.kernels.backend import STEPS, CellSteps, time_left
from attnlab.lab.lab import Lab
from attnlab.show.panels import panel
from attnlab.show.panels.progress import (
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
    while view.progress._bar.layout.display == "none":
        assert time.monotonic() < deadline, "progress never showed"
        time.sleep(0.01)
    assert "kernels: 3 of 9" in view.progress._text.value
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
    steps: list[str] = []
    Lab(on_step=lambda step, done=None, total=None: steps.append(step)).run(SMALL)
    assert tuple(steps) == STEPS


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
