"""Interrupts: Ctrl-C, SIGTERM and SIGHUP stop a run in an orderly way instead of ending the process."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


# End a process and all processes that descend from it.

_LIMIT_S = 1.0


def end_tree(root: int, proc: Path = Path("/proc")) -> None:
    """Kill a process and its descendants, the descendants first."""
    end_descendants(root, proc)
    _kill(root)


def end_descendants(root: int, proc: Path = Path("/proc")) -> None:
    """Kill the descendants of a process.

    None escapes if ``root`` adopts orphans (PR_SET_CHILD_SUBREAPER). Without ``/proc`` none is found.
    """
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        found = descendants(root, proc)
        if not found:
            break
        for process in found:
            _kill(process)
        time.sleep(0.01)


def descendants(root: int, proc: Path = Path("/proc")) -> set[int]:
    """Return the processes below ``root`` that have not ended."""
    parents = dict[int, int]()
    for entry in proc.iterdir() if proc.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found, new = set[int](), {root}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
