"""Engine: what runs tasks; and the simplest one, this process.

:mod:`attnlab.tasks.engines` has the engines by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.tasks.task import Job, OpenJob, Outcome, Task

OnOutcome = Callable[[Outcome], None]
Stop = Callable[[], bool]


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
