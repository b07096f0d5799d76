"""Run tasks on an engine and keep their outcomes, in memory and in a store."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from attnlab.case.fields import refuse
from attnlab.case.machine import cores
from attnlab.tasks.local import LocalEngine
from attnlab.tasks.store import Header, Store
from attnlab.tasks.task import Engine, Job, Outcome, Stop, Task, never

# The engines by name.
#
# ``local[:N]``: N worker processes on this machine (:mod:`attnlab.tasks.local`).
# ``ray``: the Ray cluster at RAY_ADDRESS, or a local one; ``ray://HOST:PORT``: a cluster's client port
# (:mod:`attnlab.tasks.ray_engine`).

ENGINES = "local, local:N, ray or ray://HOST:PORT"
_LOCAL = re.compile(r"local(:0*[1-9]\d{0,5})?")
_GPU_WORKER_BYTES = 5 * 2**30  # of a GPU's memory, for a worker
_RAY = re.compile(r"ray(://[^/\s]+:\d{1,5})?")


def check_engine(name: str) -> None:
    """Raise InvalidCase if a name is not that of an engine."""
    if not (_LOCAL.fullmatch(name) or _RAY.fullmatch(name)):
        refuse("engine", ENGINES, name)


def find_engine(name: str, device: str = "cpu", stop: Stop = never) -> Engine:
    """Return the engine of a name; its workers use ``device``."""
    check_engine(name)
    if _LOCAL.fullmatch(name):
        count = name.partition(":")[2]
        return LocalEngine(int(count) if count else default_processes(device), device)
    from attnlab.tasks.ray_engine import RayEngine

    address = name if "://" in name else os.environ.get("RAY_ADDRESS")
    return RayEngine(None if address in (None, "", "local") else address, device, stop)


def default_processes(device: str) -> int:
    """Return how many workers a machine has: one per core, on GPUs as many as their memory allows."""
    if device == "cuda":
        import torch

        gpus = range(torch.cuda.device_count())
        memory = [torch.cuda.get_device_properties(i).total_memory for i in gpus]
        return max(
            1, min(default_processes("cpu"), sum(one // _GPU_WORKER_BYTES for one in memory))
        )
    return cores()


@dataclass(slots=True, kw_only=True)
class TaskRun:
    """The outcomes of a run, by key; those of the store are there from the start.

    ``stop`` and ``is_late`` are those of :meth:`Engine.run`.
    """

    engine: Engine
    job: Job
    store: Store | None = None
    stop: Stop = never
    is_late: Stop = never
    outcomes: dict[str, Outcome] = field(init=False)

    def __post_init__(self) -> None:
        """Take the outcomes of the store."""
        self.outcomes = {} if self.store is None else {**self.store.outcomes}

    def run(self, tasks: Sequence[Task], on_outcome: Callable[[Outcome], None]) -> None:
        """Run the tasks that have no outcome yet; call ``on_outcome`` for every task that has one.

        Raises Unavailable if the store cannot be written; its earlier outcomes are kept.
        """
        missing = []
        for task in tasks:
            if task.key in self.outcomes:
                on_outcome(self.outcomes[task.key])
            else:
                missing.append(task)

        def keep(outcome: Outcome) -> None:
            self.keep(outcome)
            on_outcome(outcome)

        if missing:
            self.engine.run(self.job, missing, keep, self.stop, self.is_late)

    def keep(self, outcome: Outcome) -> None:
        """Keep an outcome, in place of an earlier one of its key."""
        if self.store is not None:
            self.store.append(outcome)
        self.outcomes[outcome.key] = outcome


@contextmanager
def kept_run(
    engine: Engine, job: Job, header: Header, out: Path | None, stop: Stop, seconds: float | None
) -> Iterator[TaskRun]:
    """Yield a run that starts no task after ``seconds``, with a store in ``out``, if that is given."""
    with nullcontext() if out is None else Store(out, header) as store:
        yield TaskRun(engine=engine, job=job, store=store, stop=stop, is_late=deadline(seconds))


def deadline(seconds: float | None) -> Stop:
    """Return a function that returns True from ``seconds`` after its first call on; None for never."""
    if seconds is None:
        return never
    limit, ends = seconds, list[float]()

    def is_late() -> bool:
        if not ends:
            ends.append(time.monotonic() + limit)
        return time.monotonic() >= ends[0]

    return is_late


class Remaining:
    """Estimates the remaining time of tasks from their costs and the time that the first ones took."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._costs = {task.key: task.cost_s for task in tasks}
        self._total = sum(self._costs.values())
        self._done, self._began = 0.0, time.monotonic()

    def seconds(self, outcome: Outcome) -> float | None:
        """Note that a task is done; return how long the others will take, None if that is unknown."""
        self._done += self._costs.get(outcome.key, 0.0)
        elapsed = time.monotonic() - self._began
        if self._done <= 0 or elapsed < 1.0:
            return None
        return elapsed * max(0.0, self._total - self._done) / self._done


# Interrupts: Ctrl-C, SIGTERM and SIGHUP stop a run in an orderly way instead of ending the process.

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
def handling(
    names: Iterable[str],
    handler: Callable[[int, FrameType | None], object],
    *,
    ignored_too: bool = True,
) -> Iterator[None]:
    """Handle signals by a function inside the block; ``ignored_too``: also those that are ignored outside.

    Signals that this system does not have are left out. Outside the main thread, where signals cannot be
    handled, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in names if is_main and hasattr(signal, name)]
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if ignored_too or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


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

    with handling(_SIGNALS, note, ignored_too=False):
        yield interrupt
