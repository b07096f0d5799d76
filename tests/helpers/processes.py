"""Processes: start a command, find the processes that descend from it, and wait for their end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def is_running(process: int) -> bool:
    """Return whether a process runs; one that ended and was not yet collected does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def descendants(process: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, new = set[int](), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def wait_for(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Wait until a condition is true; fail after ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def survivors(processes: Iterable[int], limit_s: float = 2.0) -> list[int]:
    """Return which processes still run after ``limit_s``, and kill them."""
    processes = list(processes)
    end = time.monotonic() + limit_s
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    found = [process for process in processes if is_running(process)]
    for process in found:
        os.kill(process, 9)
    return found


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command with the default actions of SIGINT and SIGHUP.

    A test runner in the background of a shell, or under nohup, ignores them, and its children inherit that.
    """
    return subprocess.Popen(command, preexec_fn=_default_signals, **options)


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
