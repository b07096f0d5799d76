"""Limits of an interpreted run: operations of the interpreter, and seconds of processor time.

A trial edit can loop for ever, with or without an access to memory. Operations are counted, so that the same
edits are stopped on every machine. A loop without an operation is stopped by a timer, where there is one.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

_OFTEN = 64  # operations between two looks at the clock
_AGAIN_S = 0.05  # until the timer interrupts again what it could not interrupt
# Functions of Triton and of the lab that change Triton's language, and must not be interrupted.
_PATCHING = {"_patch_lang", "_patched", "restore"}


class TooLong(BaseException):
    """A run exceeds its Budget. It is not an Exception, so that a kernel does not catch it."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """What a run may use: operations of the interpreter, and seconds of processor time from now on."""

    operations: int
    seconds: float = math.inf
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._end = time.process_time() + self.seconds

    @property
    def left_s(self) -> float:
        """Return the processor time that is left, in seconds."""
        return self._end - time.process_time()

    def spend(self) -> None:
        """Count an operation; raise TooLong if there was one too many, or if the time is over."""
        self.operations -= 1
        if self.operations < 0 or (not self.operations % _OFTEN and self.left_s < 0):
            raise TooLong


@contextmanager
def limited(budget: Budget | None) -> Iterator[None]:
    """Raise TooLong in the block when the time of a budget is over, also in a loop without an operation.

    The timer is that of the process, so it needs the main thread, and no profiler that uses it. Without it,
    only operations are stopped.
    """
    if budget is None or budget.seconds == math.inf or not _has_timer():
        yield
        return
    is_active = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_active and not _is_patching(frame):
            raise TooLong

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, max(budget.left_s, 1e-6), _AGAIN_S)
    try:
        yield
    finally:
        is_active = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _has_timer() -> bool:
    return (
        hasattr(signal, "SIGPROF")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    )


def _is_patching(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _PATCHING:
            return True
        frame = frame.f_back
    return False
