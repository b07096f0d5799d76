"""Task: one case to run. Job: how a worker runs it. Outcome: what came out of it."""

import dataclasses
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.errors import DeviceLost

DONE, ERROR, NOT_RUN = "done", "error", "not_run"
CRASH, TIMEOUT, OUT_OF_MEMORY, DEVICE_LOST = "crash", "timeout", "out_of_memory", "device_lost"
STATUSES = {
    DONE: "the job returned a verdict",
    ERROR: "the job raised an exception",
    CRASH: "the process of the task ended",
    TIMEOUT: "the task did not end within its time limit",
    OUT_OF_MEMORY: "the task needed more memory than there is",
    DEVICE_LOST: "the task broke the GPU's context",
    NOT_RUN: "the task has no verdict: it needs more than this machine has, or its machine was lost",
}
_NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|OutOfMemoryError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One case to run.

    - ``key``: identifies the task in a store; the same case always has the same key.
    - ``payload``: JSON-able, passed to :meth:`Job.run`.
    - ``cost_s``: recorded time of the task; only its ratio to that of other tasks matters.
    - ``memory_bytes``: estimate of what the task allocates on its device in addition to an idle worker.
    - ``limit_s``: how long the task may take before it is stopped, None for no limit.
    """

    key: str
    payload: dict[str, Any]
    cost_s: float = 1.0
    memory_bytes: int = 0
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of a task.

    - ``status``: a key of STATUSES.
    - ``verdict``: what the job returned if the status is "done", else None.
    - ``text``: one line that explains any other status; ``traceback``: that of an exception, else "".
    - ``seconds``: the time that it took; ``cpu_s``: the processor time, 0 if it is unknown.
    """

    key: str
    status: str
    verdict: dict[str, Any] | None = None
    text: str = ""
    traceback: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields without those that are empty."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


class Job(ABC):
    """How a worker runs tasks. Jobs can be pickled.

    ``device`` is where tasks allocate their memory, "cpu" or "cuda".
    """

    device: str = "cpu"

    @abstractmethod
    def open(self) -> Any:
        """Return the state that a worker keeps between tasks, such as loaded sources."""

    @abstractmethod
    def run(self, state: Any, payload: dict[str, Any]) -> dict[str, Any]:
        """Run a task and return its verdict as strict JSON.

        An exception becomes the outcome of the task. DeviceLost and exhausted memory end the worker, too.
        """

    def preparing(
        self, state: Any, payloads: Sequence[dict[str, Any]]
    ) -> AbstractContextManager[None]:
        """Return a block in which this process runs these payloads, all of them in this order.

        A job can do work ahead in it. Other engines divide the payloads and do not call it.
        """
        return nullcontext()

    def identity(self) -> dict[str, str]:
        """Return what verdicts depend on in addition to the tasks, such as versions and digests of sources.

        Another machine runs tasks of this job only if it has the same.
        """
        return {}

    def free_bytes(self, state: Any) -> int | None:
        """Return the free memory of the worker's own device; None if it uses that of the machine."""
        return None


@dataclass(slots=True)
class OpenJob:
    """A job and its state in the process that runs it; the state is made for the first task."""

    job: Job
    state: Any = field(default=None, repr=False)
    is_open: bool = False

    def open(self) -> None:
        """Make the state. Raises what the job raises."""
        if not self.is_open:
            self.state, self.is_open = self.job.open(), True

    def run(self, task: Task) -> Outcome:
        """Run a task and return its outcome; no exception but KeyboardInterrupt leaves this function."""
        self.open()
        free = self.job.free_bytes(self.state)
        if free is not None and task.memory_bytes > free:
            return does_not_fit(task, free)
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            verdict = self.job.run(self.state, task.payload)
            outcome = Outcome(key=task.key, status=DONE, verdict=verdict)
        except Exception as error:
            outcome = failed(task, error)
        return dataclasses.replace(
            outcome,
            seconds=round(time.perf_counter() - began, 4),
            cpu_s=round(time.process_time() - cpu_began, 4),
        )


def failed(task: Task, error: Exception) -> Outcome:
    """Return the outcome of a task that raised an exception."""
    text = " ".join(str(error).split())
    named = text if isinstance(error, DeviceLost) else f"{type(error).__name__}: {text}"
    status = ERROR
    if isinstance(error, DeviceLost):
        status = DEVICE_LOST
    elif isinstance(error, MemoryError) or _NO_MEMORY.search(named):
        status = OUT_OF_MEMORY
    return Outcome(
        key=task.key,
        status=status,
        text=named.removesuffix(": ")[:500],
        traceback="".join(traceback.format_exception(error)),
    )


def does_not_fit(task: Task, free: int) -> Outcome:
    """Return the outcome of a task that needs more memory than is free; it was not started."""
    needed, rest = (f"{size / 2**30:.1f} GiB" for size in (task.memory_bytes, free))
    text = f"it needs about {needed} of memory, and {rest} is available"
    return Outcome(key=task.key, status=NOT_RUN, text=text)


# Engine: what runs tasks; and the simplest one, this process.
#
# :mod:`attnlab.tasks.run` has the engines by name.

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
        self._open.open()
        with job.preparing(self._open.state, [task.payload for task in tasks]):
            for task in tasks:
                if stop() or is_late():
                    return
                on_outcome(self._open.run(task))

    def close(self) -> None:
        self._open = None
