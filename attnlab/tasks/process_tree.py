"""End a process and all processes that descend from it."""

import contextlib
import os
import signal
import time
from pathlib import Path

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
