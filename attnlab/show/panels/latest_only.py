"""LatestOnly: a background worker that keeps only the newest request."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

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
