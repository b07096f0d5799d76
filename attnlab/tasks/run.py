"""Run tasks on an engine and keep their outcomes, in memory and in a store."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnlab.tasks.engine import Engine, Stop, never
from attnlab.tasks.store import Store
from attnlab.tasks.task import Job, Outcome, Task


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
            if self.store is not None:
                self.store.append(outcome)
            self.outcomes[outcome.key] = outcome
            on_outcome(outcome)

        if missing:
            self.engine.run(self.job, missing, keep, self.stop, self.is_late)


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


@dataclass(slots=True)
class Remaining:
    """Estimates the remaining time of tasks from their costs and the time that the first ones took."""

    tasks: Sequence[Task]
    _costs: dict[str, float] = field(init=False, repr=False)
    _total: float = field(init=False)
    _done: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Sum the costs."""
        self._costs = {task.key: task.cost_s for task in self.tasks}
        self._total = sum(self._costs.values())

    def seconds(self, outcome: Outcome) -> float | None:
        """Note that a task is done; return how long the others will take, None if that is unknown."""
        self._done += self._costs.get(outcome.key, 0.0)
        elapsed = time.monotonic() - self._began
        if self._done <= 0 or elapsed < 1.0:
            return None
        return elapsed * max(0.0, self._total - self._done) / self._done
