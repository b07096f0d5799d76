"""Pool: an engine with several slots, and the order in which they get tasks.

:mod:`attnlab.tasks.local` has slots that are processes, :mod:`attnlab.tasks.ray_engine` slots on a cluster.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from attnlab.case.errors import AttnLabError
from attnlab.tasks.engine import Engine, OnOutcome, Stop, never
from attnlab.tasks.task import NOT_RUN, OUT_OF_MEMORY, TIMEOUT, Job, Outcome, Task, does_not_fit

READY = "ready"
_MOST_STARTS = 3  # slots in a row that end before they are ready


class Slot(ABC):
    """What runs one task at a time.

    - ``task``: what it runs, None if it is idle; ``is_ready``: whether it can start a task.
    - ``is_shared``: whether other tasks ran on its host since the task began.
    - ``host``: tasks of slots with the same host share its memory.
    - ``start_error``: why it cannot start, if it ends before it is ready.
    """

    task: Task | None = None
    is_ready: bool = False
    is_shared: bool = False
    host: str = ""
    start_error: str = "a worker process ended before its first case"

    @abstractmethod
    def start(self, task: Task) -> None:
        """Begin a task."""

    @abstractmethod
    def crash(self, task: Task) -> Outcome:
        """Return the outcome of a task whose slot has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End the slot now."""


SlotT = TypeVar("SlotT", bound=Slot)


class Pool(Engine, Generic[SlotT]):
    """Gives tasks to slots, and replaces a slot that ends.

    A message of a slot is READY, the Outcome of its task, the exception of opening the job, or None if the
    slot has ended.
    """

    def __init__(self) -> None:
        self._slots: list[SlotT] = []
        self._job: Job | None = None

    @abstractmethod
    def _fill(self) -> None:
        """Start slots until there is one for each task, as far as the machine allows."""

    @abstractmethod
    def _messages(self) -> Iterable[tuple[SlotT, Any]]:
        """Wait a moment and return the messages that have arrived."""

    @abstractmethod
    def _watch(self) -> None:
        """End slots that exceed a limit."""

    @abstractmethod
    def _room(self, host: str) -> int | None:
        """Return how many bytes the tasks of a host may use together; None for no limit."""

    @abstractmethod
    def _free(self, host: str) -> int:
        """Return how many bytes are free now on a host where no task runs."""

    def _begin(self, job: Job) -> None:
        """Prepare for a run, of the same job as before or of another."""

    def _take(self, job: Job) -> None:
        """Prepare for tasks of another job."""
        self._end_slots()

    def _is_spent(self, outcome: Outcome) -> bool:
        """Answer whether a slot cannot be used after an outcome."""
        return False

    def run(
        self,
        job: Job,
        tasks: Sequence[Task],
        on_outcome: OnOutcome,
        stop: Stop = never,
        is_late: Stop = never,
    ) -> None:
        self._begin(job)
        if job is not self._job:
            self._take(job)
            self._job = job
        self._failed_starts, self._any_ready = 0, False
        self._queue, self._on_outcome = deque(tasks), on_outcome
        self._alone = set[str]()  # tasks that ran out of memory, or of time, next to others
        while (self._queue or self._busy()) and not stop():
            self._fill()
            self._assign(is_late)
            for slot, message in self._messages():
                self._handle(slot, message)
            self._watch()
        for slot in self._busy():  # dropped, without an outcome
            self._remove(slot)

    def close(self) -> None:
        self._end_slots()

    def _busy(self, host: str | None = None) -> list[SlotT]:
        """Return the slots that run a task, of all hosts or of one."""
        return [slot for slot in self._slots if slot.task is not None and host in (None, slot.host)]

    def _end_slots(self) -> None:
        for slot in [*self._slots]:
            self._remove(slot)

    def _remove(self, slot: SlotT) -> None:
        slot.kill()
        self._slots.remove(slot)

    def _assign(self, is_late: Stop) -> None:
        """Give each idle slot a task that fits into memory next to those that run."""
        for slot in self._slots:
            if slot.is_ready and slot.task is None and self._queue:
                if is_late():  # a task that has begun, and runs again alone, gets its outcome
                    self._queue = deque(task for task in self._queue if task.key in self._alone)
                task = self._next_task(slot.host)
                if task is not None:
                    slot.start(task)
                    busy = self._busy(slot.host)
                    for one in busy:
                        one.is_shared = len(busy) > 1 or (one is not slot and one.is_shared)

    def _next_task(self, host: str) -> Task | None:
        """Remove and return the first task that may start now on a host, or None.

        A task that fits only alone waits until nothing else runs on the host. One that does not fit on
        any host gets its outcome here.
        """
        running = [slot.task for slot in self._busy(host) if slot.task is not None]
        if any(task.key in self._alone for task in running):
            return None
        room, used = self._room(host), sum(task.memory_bytes for task in running)
        for task in self._queue:
            fits = room is None or used + task.memory_bytes <= room
            if fits and not (running and task.key in self._alone):
                self._queue.remove(task)
                return task
        return None if running else self._large_task(host)

    def _large_task(self, host: str) -> Task | None:
        """Return a task that needs all of an idle host, if it fits; skip those that fit on another host."""
        others = {slot.host for slot in self._slots if slot.is_ready} - {host}
        for task in [*self._queue]:
            free = self._free(host)
            if task.memory_bytes <= free:
                self._queue.remove(task)
                return task
            if all(task.memory_bytes > self._free(other) for other in others):
                self._queue.remove(task)
                self._on_outcome(does_not_fit(task, free))
        return None

    def _handle(self, slot: SlotT, message: Any) -> None:
        """Handle a message of a slot."""
        if message == READY:
            slot.is_ready = True
            self._note_success()
        elif isinstance(message, Outcome):
            self._note_success()
            if self._is_spent(message):
                self._remove(slot)
            self._finish(slot, message)
        elif isinstance(message, Exception):
            if slot.task is not None:
                self._queue.appendleft(slot.task)  # it has not begun
            self._remove(slot)
            self._cannot_start(message, tries=1)
        else:
            if slot.task is not None:
                self._finish(slot, slot.crash(slot.task))
            elif not slot.is_ready:
                self._cannot_start(AttnLabError(slot.start_error), tries=_MOST_STARTS)
            self._remove(slot)

    def _note_success(self) -> None:
        self._any_ready, self._failed_starts = True, 0

    def _finish(self, slot: SlotT, outcome: Outcome) -> None:
        """Report the outcome of a slot's task; one that ran out of memory or time next to others runs once
        more, alone."""
        task, slot.task = slot.task, None
        assert task is not None
        is_first = slot.is_shared and task.key not in self._alone
        if outcome.status in (OUT_OF_MEMORY, TIMEOUT) and is_first:
            self._alone.add(task.key)
            self._queue.append(task)
            return
        self._on_outcome(outcome)

    def _cannot_start(self, error: Exception, tries: int) -> None:
        """Note a slot that cannot start; it will be replaced.

        Raises its error if no slot was ever ready, and as many in a row as ``tries`` could not start.
        """
        self._failed_starts += 1
        if not self._any_ready:
            if self._failed_starts >= tries:
                raise error
            return
        if self._failed_starts >= _MOST_STARTS:
            text = f"no worker can start: {' '.join(str(error).split())[:300]}"
            while self._queue:
                key = self._queue.popleft().key
                self._on_outcome(Outcome(key=key, status=NOT_RUN, text=text))
