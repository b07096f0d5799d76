"""Progress: the line of a panel that shows the current step, with a button to cancel."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape

import ipywidgets as ipw

from attnlab.kernels.steps import STEPS, OnStep
from attnlab.show.panels.latest_only import Job, Outdated

_DELAY_S, _INTERVAL_S = 0.4, 0.1  # until progress is first shown, and between two updates
PICTURES = "pictures"
_ALL_STEPS = (*STEPS, PICTURES)


class Progress:
    """A bar, the name of the current step and a Cancel button; visible only during long work.

    In the HTML, ``data-state`` is "working" or "idle".
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._bar = ipw.FloatProgress(
            max=1.0, tooltip="The part of the steps that is done.", layout={"width": "160px"}
        )
        self._button = ipw.Button(
            description="Cancel",
            tooltip="Stop the run and keep the results shown.",
            layout={"width": "80px"},
        )
        self._button.on_click(lambda button: on_cancel())
        self._text = ipw.HTML(tooltip="")
        self._working = [self._bar, self._button]
        self._job: Job | None = None  # the job whose progress is shown
        self.widget = ipw.HBox([*self._working, self._text]).add_class("attnlab-progress")
        self.end("")

    def begin(self) -> None:
        """Set the state to working; the bar appears only if the work takes long."""
        self._bar.value = 0.0
        self._show_text("", "working")

    def end(self, text: str) -> None:
        """Set the state to idle and show ``text``."""
        self._job = None
        for part in self._working:
            part.layout.display = "none"
        self._show_text(text, "idle")

    def on_step_of(self, job: Job) -> OnStep:
        """Return the function to call before each step of a job; it raises Outdated if the job is."""
        last_shown, current = job.start + _DELAY_S - _INTERVAL_S, ("", None, None)

        def on_step(step: str, done: int | None = None, total: int | None = None) -> None:
            nonlocal last_shown, current
            job.check()
            current = (step, done, total)  # type: ignore[assignment]
            if time.perf_counter() - last_shown >= _INTERVAL_S:
                last_shown = time.perf_counter()
                job.publish(lambda: self._show(step, done, total))

        def show_long_step() -> None:
            """Show a step that takes longer than the delay and does not report in the meantime."""
            with suppress(Outdated):
                job.publish(lambda: self._show(*current) if self._job is job else None)

        self._job = job
        timer = threading.Timer(_DELAY_S, show_long_step)
        timer.daemon = True
        timer.start()
        return on_step

    def _show(self, step: str, done: int | None, total: int | None) -> None:
        for part in self._working:
            part.layout.display = ""
        self._bar.value = share_done(step, done, total, self._bar.value)
        count = "" if done is None or total is None else f": {done} of {total}"
        self._show_text(f"{step}{count}", "working")

    def _show_text(self, text: str, state: str) -> None:
        self._text.value = f'<span data-state="{state}">{escape(text)}</span>'


def share_done(step: str, done: int | None, total: int | None, before: float) -> float:
    """Return the share of the work that is done, from 0 to 1, and never less than ``before``.

    An unknown step leaves the share as it is.
    """
    if step not in _ALL_STEPS:
        return before
    within = done / total if done is not None and total else 0.0
    return max(before, (_ALL_STEPS.index(step) + within) / len(_ALL_STEPS))
