"""A job without tensors, whose payload says what to do."""

import contextlib
import ctypes
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.case.errors import AttnLabError, DeviceLost
from attnlab.tasks.task import Job, Task


@dataclass(frozen=True)
class ToyJob(Job):
    """Doubles a number, unless the payload asks for a fault. The state counts the tasks of a worker."""

    fails_to_open: bool = False
    lost_starts: tuple[str, ...] = ()  # files; a worker that finds one removes it and ends
    version_from: str = ""  # the environment variable that has the version, if there is one

    def open(self) -> dict[str, int]:
        if self.fails_to_open:
            raise AttnLabError("no kernels here")
        for name in self.lost_starts:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
                ctypes.CDLL(None)._exit(3)
        return {"count": 0}

    def identity(self) -> dict[str, str]:
        return {"version": os.environ.get(self.version_from, "")} if self.version_from else {}

    def run(self, state: dict[str, int], payload: dict[str, Any]) -> dict[str, Any]:
        state["count"] += 1
        fault = payload.get("fault", "")
        if fault == "exit":
            ctypes.CDLL(None)._exit(3)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "terminated":  # as a whole group of processes is
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == "hang":
            ctypes.PyDLL(None).sleep(1000)  # it keeps Python's global lock, as a kernel may
        _spin(fault, payload)
        if fault == "kill_parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if fault == "lost":
            raise DeviceLost("CUDA error: an illegal memory access")
        if fault == "memory":
            raise MemoryError("no memory")
        if fault == "exhaust":
            _exhaust_memory()
        if fault == "bug":
            raise ValueError("two\nlines")
        time.sleep(payload.get("sleep", 0.0))
        found = {"double": 2 * payload["n"], "count": state["count"], "pid": os.getpid()}
        names = payload.get("variables", ())
        return found | {name: os.environ.get(name) for name in names}


def _spin(fault: str, payload: dict[str, Any]) -> None:
    """Compute for ever: always, or the first time, which a file notes."""
    if fault == "spin_once" and not (file := Path(payload["file"])).exists():
        file.touch()
        fault = "spin"
    while fault == "spin":
        pass


def _exhaust_memory() -> None:
    """Allocate until there is no more memory, within a limit that this process gets."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
    chunks = []
    while True:
        chunks.append(bytearray(16 << 20))


def toy_tasks(*faults: str, limit_s: float | None = 30.0, **fields: Any) -> list[Task]:
    """Return a task for each fault; "" is a task that succeeds."""
    return [
        Task(key=f"task-{i}", payload={"n": i, "fault": fault}, limit_s=limit_s, **fields)
        for i, fault in enumerate(faults)
    ]
