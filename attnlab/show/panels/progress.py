"""Progress: the line of a panel that shows the current step, with a button to cancel."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Generic, TypeVar

import ipywidgets as ipw

from attnlab.kernels.backend import STEPS, OnStep, time_left

# LatestOnly: a background worker that keeps only the newest request.

R = TypeVar("R")


class Outdated(BaseException):
    """Raised in a job whose request is no longer the newest.

    It is not an Exception, so that no ``except Exception`` of a kernel catches it.
    """


@dataclass(slots=True)
class Job:
    """The work on one request; its results are published only while the request is the newest."""

    generation: int
    worker: "LatestOnly[object]"
    start: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Raise Outdated if a newer request exists or the job was cancelled."""
        if self.generation != self.worker.generation:
            raise Outdated

    def publish(self, show: Callable[[], None]) -> None:
        """Call ``show`` under the worker's lock, or raise Outdated."""
        with self.worker.lock:
            self.check()
            show()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Run a job without collections of cyclic garbage: each walks through all objects of torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LatestOnly(Generic[R]):
    """Background worker that keeps only the newest request.

    ``work(request, job)`` runs in one thread: at once, or, if the request follows another within
    ``quiet_s``, as those of a slider do, once it has been the newest for that time. It must call
    ``job.check()`` often and publish its results with ``job.publish``. An Exception that it raises goes to
    ``on_error(request, error)``, unless the request is outdated.
    """

    def __init__(
        self,
        work: Callable[[R, Job], None],
        on_error: Callable[[R, Exception], None],
        quiet_s: float = 0.03,
    ) -> None:
        self._work, self._on_error, self._quiet_s = work, on_error, quiet_s
        self._waiting: list[R] = []  # the newest request, if the thread has not taken it
        self._changed_at = self._start_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_working = False
        self.generation = 0
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    def submit(self, request: R) -> None:
        """Replace the current request, if any, with this one."""
        with self._changed:
            self._drop()
            self._waiting = [request]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._loop, daemon=True, name="attnlab-panel"
                )
                self._thread.start()

    def cancel(self) -> None:
        """Drop the current request; its job ends at its next check and publishes nothing."""
        with self._changed:
            self._drop()

    def _drop(self) -> None:
        self.generation += 1
        now = time.perf_counter()
        is_burst = now - self._changed_at < self._quiet_s
        self._changed_at = now
        self._start_at = now + self._quiet_s if is_burst else now
        self._waiting = []
        self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Return whether a request waits or a job runs."""
        return bool(self._waiting) or self._is_working

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker is idle; return whether it was within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy, timeout_s)

    def _loop(self) -> None:
        while True:
            request, job = self._take()
            with suppress(Outdated):
                try:
                    with _no_collection():
                        self._work(request, job)
                except Exception as error:
                    job.publish(partial(self._on_error, request, error))
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _take(self) -> tuple[R, Job]:
        """Wait until a request may start, and take it."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting)
                left_s = self._start_at - time.perf_counter()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._is_working = True
            job = Job(generation=self.generation, worker=self)  # type: ignore[arg-type]
            return self._waiting.pop(), job


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
        begun = job.start  # the current step

        def on_step(step: str, done: int | None = None, total: int | None = None) -> None:
            nonlocal last_shown, current, begun
            job.check()
            if step != current[0]:
                begun = time.perf_counter()
            current = (step, done, total)  # type: ignore[assignment]
            if time.perf_counter() - last_shown >= _INTERVAL_S:
                last_shown = time.perf_counter()
                left = time_left(time.perf_counter() - begun, done, total)
                job.publish(lambda: self._show(step, done, total, left))

        def show_long_step() -> None:
            """Show a step that takes longer than the delay and does not report in the meantime."""
            with suppress(Outdated):
                job.publish(lambda: self._show(*current) if self._job is job else None)

        self._job = job
        timer = threading.Timer(_DELAY_S, show_long_step)
        timer.daemon = True
        timer.start()
        return on_step

    def _show(self, step: str, done: int | None, total: int | None, left: str = "") -> None:
        for part in self._working:
            part.layout.display = ""
        self._bar.value = share_done(step, done, total, self._bar.value)
        count = "" if done is None or total is None else f": {done} of {total}"
        self._show_text(f"{step}{count}{left}", "working")

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
