"""Interrupts: Ctrl-C, SIGTERM and SIGHUP stop a run in an orderly way instead of ending the process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupt:
    """Whether the run shall stop: call it, or read ``signal``, the number of the signal, 0 for none."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that the signal ended, 128 + its number; 0 without a signal."""
        return 128 + self.signal if self.signal else 0


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Yield an Interrupt that the first signal sets; a second Ctrl-C raises KeyboardInterrupt.

    A signal that this process ignores, as under nohup, stays ignored. Outside the main thread, where
    signals cannot be handled, nothing changes.
    """
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupt.signal = interrupt.signal or number

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
