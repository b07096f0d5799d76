"""Engine: what runs tasks. The engines of a machine are here; others have the same interface.

- ``local[:N]``: N worker processes on this machine (:mod:`attnlab.tasks.local`).
- :class:`InProcess`: this process, for short work that cannot break it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.case.fields import refuse
from attnlab.tasks.task import Job, OpenJob, Outcome, Task

OnOutcome = Callable[[Outcome], None]
Stop = Callable[[], bool]
ENGINES = "local or local:N"


def never() -> bool:
    """Return False: the ``stop`` of work that is not interrupted."""
    return False


class Engine(ABC):
    """Runs tasks. Use it as a context manager: leaving the block stops its workers.

    A job that is passed again, as the same object, meets the same workers with the state that they keep.
    """

    @abstractmethod
    def run(
        self,
        job: Job,
        tasks: Sequence[Task],
        on_outcome: OnOutcome,
        stop: Stop = never,
        is_late: Stop = never,
    ) -> None:
        """Run the tasks, as far as possible in their order, and call ``on_outcome`` for each in this thread.

        A task that ends its worker, exceeds its time limit or raises an exception has an outcome that says
        so; the others run. When ``stop`` returns True, the tasks that run are dropped without an outcome,
        within a second. ``is_late`` is called before a task starts; when it returns True, those that run
        are finished, and no other starts. Raises what the job raises when it is opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class InProcess(Engine):
    """Runs tasks in this process, one after the other. It ends no task at its time limit."""

    def __init__(self) -> None:
        self._open: OpenJob | None = None

    def run(
        self,
        job: Job,
        tasks: Sequence[Task],
        on_outcome: OnOutcome,
        stop: Stop = never,
        is_late: Stop = never,
    ) -> None:
        if self._open is None or self._open.job is not job:
            self._open = OpenJob(job)
        for task in tasks:
            if stop() or is_late():
                return
            on_outcome(self._open.run(task))

    def close(self) -> None:
        self._open = None


def find_engine(name: str, device: str = "cpu") -> Engine:
    """Return the engine of a name; its workers use ``device``. Raises InvalidCase for an unknown name."""
    kind, _, count = name.partition(":")
    if kind != "local" or (":" in name and not (count.isdigit() and int(count))):
        refuse("engine", ENGINES, name)
    from attnlab.tasks.local import LocalEngine

    return LocalEngine(int(count) if count else default_processes(device), device)


def default_processes(device: str) -> int:
    """Return how many workers a machine has: one per GPU, or one per core."""
    if device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
