"""The actor of the engine ``ray``: it runs one case at a time, in a worker process of its own.

This module is imported on every node of a cluster, and does not import torch.
"""

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.machine import available_bytes
from attnlab.tasks.local import LocalEngine
from attnlab.tasks.task import Job, Outcome, Task

Answer = tuple[Outcome | Exception, int]


@dataclass(frozen=True, kw_only=True)
class PickledJob(Job):
    """A job that is restored only in the worker process, so that the actor does not import what it needs.

    ``expected``: :meth:`Job.identity` where the run was started; ``path``: its ``sys.path``.
    """

    data: bytes
    expected: Mapping[str, str]
    path: tuple[str, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, job: Job) -> "PickledJob":
        """Return the pickled form of a job."""
        return cls(
            data=pickle.dumps(job), expected=job.identity(), path=tuple(sys.path), device=job.device
        )

    def open(self) -> tuple[Job, Any]:
        """Open the job. Raises Unavailable if this node would give other verdicts."""
        sys.path.extend(folder for folder in self.path if folder not in sys.path)
        job: Job = pickle.loads(self.data)
        here = job.identity()
        for name, value in self.expected.items():
            if here.get(name) != value:
                text = f"a node of the Ray cluster must have the same {name}, {value}, got {here.get(name)}"
                raise Unavailable(text)
        return job, job.open()

    def run(self, state: tuple[Job, Any], payload: dict[str, Any]) -> dict[str, Any]:
        job, inner = state
        return job.run(inner, payload)

    def free_bytes(self, state: tuple[Job, Any]) -> int | None:
        job, inner = state
        return job.free_bytes(inner)


class Actor:
    """Runs tasks on a device, "cpu" or "cuda", one at a time.

    The worker process is that of the engine ``local``. So a case that ends its process, hangs or runs out of
    memory has the same outcome as there, and the actor lives on.
    """

    def __init__(self, device: str) -> None:
        # A worker process would import the main module again: that of Ray's process, and ray with it.
        sys.modules["__main__"].__file__ = None
        self._engine = LocalEngine(1, device)
        self._pickled, self._job = b"", PickledJob(data=b"", expected={}, path=())

    def place(self) -> tuple[str, int]:
        """Return the node's id and its free memory."""
        import ray

        return ray.get_runtime_context().get_node_id(), available_bytes()

    def run(self, job: bytes, task: Task) -> Answer:
        """Run a task of a pickled PickledJob.

        Returns the outcome, or the exception of opening the job, and the node's free memory.
        """
        if job != self._pickled:
            self._pickled, self._job = job, pickle.loads(job)
        found: list[Outcome | Exception] = []
        try:
            self._engine.run(self._job, [task], found.append)
        except Exception as error:
            found = [error if _is_restorable(error) else AttnLabError(str(error))]
        return found[0], available_bytes()


def _is_restorable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
