"""A job without tensors, whose payload says what to do."""

import ctypes
import os
import time
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import AttnLabError, DeviceLost
from attnlab.tasks.task import Job, Task


@dataclass(frozen=True)
class ToyJob(Job):
    """Doubles a number, unless the payload asks for a fault. The state counts the tasks of a worker."""

    fails_to_open: bool = False

    def open(self) -> dict[str, int]:
        if self.fails_to_open:
            raise AttnLabError("no kernels here")
        return {"count": 0}

    def run(self, state: dict[str, int], payload: dict[str, Any]) -> dict[str, Any]:
        state["count"] += 1
        fault = payload.get("fault", "")
        if fault == "exit":
            ctypes.CDLL(None)._exit(3)
        if fault == "hang":
            time.sleep(1000)
        if fault == "lost":
            raise DeviceLost("CUDA error: an illegal memory access")
        if fault == "memory":
            raise MemoryError("no memory")
        if fault == "bug":
            raise ValueError("two\nlines")
        time.sleep(payload.get("sleep", 0.0))
        return {"double": 2 * payload["n"], "count": state["count"], "pid": os.getpid()}


def toy_tasks(*faults: str, limit_s: float | None = 30.0, **fields: Any) -> list[Task]:
    """Return a task for each fault; "" is a task that succeeds."""
    return [
        Task(key=f"task-{i}", payload={"n": i, "fault": fault}, limit_s=limit_s, **fields)
        for i, fault in enumerate(faults)
    ]
