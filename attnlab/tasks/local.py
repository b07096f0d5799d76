"""The engine ``local``: long-lived worker processes on this machine.

All workers are started and watched by one thread, because Linux ends a child when the thread that
started it ends (:mod:`attnlab.kernels.child_process`).
"""

import contextlib
import gc
import os
import pickle
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnlab.case.errors import AttnLabError
from attnlab.case.machine import available_bytes
from attnlab.kernels.child_process import ONE_THREAD, run_in_child, start_context
from attnlab.tasks.task import (
    CRASH,
    DEVICE_LOST,
    ERROR,
    NOT_RUN,
    OUT_OF_MEMORY,
    TIMEOUT,
    Engine,
    Job,
    OnOutcome,
    OpenJob,
    Outcome,
    Stop,
    Task,
    does_not_fit,
    never,
)

# Pool: an engine with several slots, and the order in which they get tasks.
#
# :mod:`attnlab.tasks.local` has slots that are processes, :mod:`attnlab.tasks.ray_engine` slots on a
# cluster.

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


_NOT_STARTED = (
    "a worker process did not start in time; if a script asked for it, the call must be under "
    "'if __name__ == \"__main__\":', because a worker imports the script"
)
_IDLE_SHARE = 0.25  # of the time in which a task does nothing


class Worker(Slot):
    """The parent's end of a worker process. It is ready once the job is open.

    ``gpu`` is the value of CUDA_VISIBLE_DEVICES for the worker, None for the parent's.
    """

    def __init__(self, job: bytes, gpu: str | None = None) -> None:
        self.gpu = gpu
        context = start_context(is_copy=gpu is None)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        work = pickle.dumps((_serve, (job,)))
        self._process: BaseProcess = context.Process(target=run_in_child, args=(work, theirs))
        with _environment(gpu):
            self._process.start()
        theirs.close()
        self._begin()

    def _begin(self) -> None:
        self._began, self._waited = time.monotonic(), _waiting_s(self._process.pid)
        self._computed = processor_s(self._process.pid)

    @property
    def elapsed_s(self) -> float:
        """Return the time since the task, or the worker, began, without the time it waited for a core."""
        waited = _waiting_s(self._process.pid) - self._waited
        return time.monotonic() - self._began - max(0.0, waited)

    @property
    def spent_s(self) -> float:
        """Return what counts for the time limit of a task: on a CPU its processor time, on a GPU its time.

        On a CPU a task also spends a part of the time in which it does nothing, so that one that waits for
        ever is stopped, too.
        """
        computed = processor_s(self._process.pid)
        if self.gpu is not None or computed is None or self._computed is None:
            return self.elapsed_s
        return max(computed - self._computed, _IDLE_SHARE * self.elapsed_s)

    @property
    def resident_bytes(self) -> int:
        """Return the memory that the process uses; 0 if the system does not say."""
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0

    def start(self, task: Task) -> None:
        self.task = task
        self._begin()
        with contextlib.suppress(OSError):  # if the process has ended, receive() says so
            self.connection.send(task)

    def receive(self) -> Any:
        """Return READY, the exception of opening the job, or an Outcome; None if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            return None
        except Exception as error:  # the message cannot be restored in this process
            return AttnLabError(f"a worker's message cannot be read: {error}")

    def crash(self, task: Task) -> Outcome:
        code, seconds = self._process.exitcode, time.monotonic() - self._began
        how = "in an unknown way"
        if code is not None:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = f"the kernel ended its process {how}"
        return Outcome(key=task.key, status=CRASH, text=text, seconds=seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def _environment(gpu: str | None) -> Iterator[None]:
    """Set the environment of a process that starts inside the block.

    It sees one GPU, if ``gpu`` names one. Its linear algebra uses one thread unless a variable says
    otherwise, because other workers use the other cores. Libraries read these variables when they are loaded.
    """
    wanted = {name: os.environ.get(name, "1") for name in ONE_THREAD}
    if gpu is not None:
        wanted["CUDA_VISIBLE_DEVICES"] = gpu
    before = {name: os.environ.get(name) for name in wanted}
    try:
        os.environ.update(wanted)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def processor_s(process: int | None) -> float | None:
    """Return the processor time of a process and of its children that have ended; None if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return None


def _waiting_s(process: int | None) -> float:
    """Return how long a process could have run but had no core; 0 if the system does not say.

    So a busy machine does not make a case exceed its time limit.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def _serve(connection: Connection, job: bytes) -> None:
    """Run tasks in the child until the connection is closed or the worker cannot be used any more."""
    for one in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and kills this process
        signal.signal(one, signal.SIG_IGN)
    opened: Job = pickle.loads(job)
    run = OpenJob(opened)
    try:
        run.open()
    except AttnLabError as error:
        connection.send(error)
        return
    except Exception:
        connection.send(RuntimeError(f"a worker cannot start:\n{traceback.format_exc()}"))
        return
    gc.freeze()  # what was imported stays; with many small objects, collections took 5 to 7 % of a check
    gc.set_threshold(20_000, 20, 100)
    connection.send(READY)
    with contextlib.suppress(EOFError, OSError):
        while True:
            outcome = run.run(connection.recv())
            connection.send(outcome)
            if ends_worker(outcome, opened):
                return


def ends_worker(outcome: Outcome, job: Job) -> bool:
    """Answer whether a worker cannot be used after an outcome: its GPU's context may be broken."""
    is_unclear = outcome.status == ERROR and job.device != "cpu"
    return outcome.status in (DEVICE_LOST, OUT_OF_MEMORY) or is_unclear


_POLL_S = 0.1
_START_LIMIT_S = 180.0  # until a worker has imported torch and opened the job
_RESERVE_BYTES = 256 << 20  # a worker is ended when less memory than this is left …
_MODEST_BYTES = 1 << 30  # … unless it uses no more than this in addition to the task's estimate


class LocalEngine(Pool[Worker]):
    """``processes`` workers; on device "cuda" they share the visible GPUs, each worker using one."""

    def __init__(self, processes: int, device: str = "cpu") -> None:
        super().__init__()
        self._processes = processes
        self._gpus: list[str | None] = [*visible_gpus()] if device == "cuda" else [None]

    def _begin(self, job: Job) -> None:
        self._capacity = available_bytes() if job.device == "cpu" else None

    def _take(self, job: Job) -> None:
        super()._take(job)
        self._pickled = pickle.dumps(job)

    def _fill(self) -> None:
        wanted = min(self._processes, len(self._queue) + len(self._busy()))
        while len(self._slots) < wanted:
            used = [worker.gpu for worker in self._slots]
            self._slots.append(Worker(self._pickled, min(self._gpus, key=used.count)))

    def _room(self, host: str) -> int | None:
        return self._capacity

    def _free(self, host: str) -> int:
        return available_bytes()

    def _is_spent(self, outcome: Outcome) -> bool:
        assert self._job is not None
        return ends_worker(outcome, self._job)

    def _messages(self) -> Iterator[tuple[Worker, Any]]:
        connections = {worker.connection: worker for worker in self._slots}
        for connection in wait(list(connections), _POLL_S):
            worker = connections[connection]  # type: ignore[index]
            yield worker, worker.receive()

    def _watch(self) -> None:
        for worker in [*self._slots]:
            if worker.task is not None:
                limit = worker.task.limit_s
                if limit is not None and worker.spent_s > limit:
                    kind = " of processor time" if worker.gpu is None else ""
                    text, key = f"the case did not end within {limit:g} s{kind}", worker.task.key
                    seconds = worker.elapsed_s
                    self._remove(worker)
                    outcome = Outcome(key=key, status=TIMEOUT, text=text, seconds=seconds)
                    self._finish(worker, outcome)
            elif not worker.is_ready and worker.elapsed_s > _START_LIMIT_S:
                self._remove(worker)
                self._cannot_start(AttnLabError(_NOT_STARTED), tries=1)
        if self._capacity is not None:
            self._keep_reserve()

    def _keep_reserve(self) -> None:
        """End the largest busy worker if little memory is left, before the system ends any process."""
        busy = self._busy()
        if not busy or available_bytes() >= _RESERVE_BYTES:
            return
        worker = max(busy, key=lambda worker: worker.resident_bytes)
        assert worker.task is not None
        key, size = worker.task.key, worker.resident_bytes
        if size < _MODEST_BYTES + worker.task.memory_bytes:
            return  # other processes use the memory
        seconds = worker.elapsed_s
        self._remove(worker)
        text = f"the case was stopped when its process had {size / 2**30:.1f} GiB and no memory was left"
        self._finish(worker, Outcome(key=key, status=OUT_OF_MEMORY, text=text, seconds=seconds))


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(max(1, torch.cuda.device_count()))]
