"""The engine ``local``: long-lived worker processes on this machine.

All workers are started and watched by one thread, because Linux ends a child when the thread that
started it ends (:mod:`attnlab.kernels.child_process`).
"""

import os
import pickle
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from attnlab.case.errors import AttnLabError
from attnlab.tasks.engine import Engine, OnOutcome, Stop, never
from attnlab.tasks.memory import available_bytes
from attnlab.tasks.task import (
    NOT_RUN,
    OUT_OF_MEMORY,
    TIMEOUT,
    Job,
    Outcome,
    Task,
    does_not_fit,
)
from attnlab.tasks.worker import READY, Worker, ends_worker

_POLL_S = 0.1
_START_LIMIT_S = 180.0  # until a worker has imported torch and opened the job
_MOST_STARTS = 3  # workers in a row that end before they are ready
_RESERVE_BYTES = 256 << 20  # a worker is ended when less memory than this is left …
_MODEST_BYTES = 1 << 30  # … unless it uses no more than this in addition to the task's estimate


class LocalEngine(Engine):
    """``processes`` workers; on device "cuda" they share the visible GPUs, each worker using one."""

    def __init__(self, processes: int, device: str = "cpu") -> None:
        self._processes = processes
        self._gpus: list[str | None] = [*visible_gpus()] if device == "cuda" else [None]
        self._workers: list[Worker] = []
        self._job: Job | None = None

    def run(
        self,
        job: Job,
        tasks: Sequence[Task],
        on_outcome: OnOutcome,
        stop: Stop = never,
        is_late: Stop = never,
    ) -> None:
        if job is not self._job:
            self.close()
            self._job, self._pickled = job, pickle.dumps(job)
        self._failed_starts, self._any_ready = 0, False
        self._queue, self._on_outcome = deque(tasks), on_outcome
        self._alone = set[str]()  # tasks that ran out of memory next to others
        on_host = job.device == "cpu"
        self._capacity = available_bytes() if on_host else None
        while (self._queue or self._busy()) and not stop():
            self._fill()
            self._assign(is_late)
            self._receive()
            self._stop_late()
            if on_host:
                self._keep_reserve()
        for worker in self._busy():  # dropped, without an outcome
            self._remove(worker)

    def close(self) -> None:
        for worker in [*self._workers]:
            self._remove(worker)

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.task is not None]

    def _remove(self, worker: Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

    def _fill(self) -> None:
        """Start workers until there is one for each task, at most the engine's number."""
        wanted = min(self._processes, len(self._queue) + len(self._busy()))
        while len(self._workers) < wanted:
            used = [worker.gpu for worker in self._workers]
            self._workers.append(Worker(self._pickled, min(self._gpus, key=used.count)))

    def _assign(self, is_late: Stop) -> None:
        """Give each idle worker a task that fits into memory next to those that run."""
        for worker in self._workers:
            if worker.is_ready and worker.task is None and self._queue:
                if is_late():
                    self._queue.clear()
                    return
                task = self._next_task()
                if task is None:
                    return
                worker.start(task)

    def _next_task(self) -> Task | None:
        """Remove and return the first task that may start now, or None.

        A task that fits only alone waits until nothing else runs. One that does not fit at all gets its
        outcome here.
        """
        running = [worker.task for worker in self._workers if worker.task is not None]
        if any(task.key in self._alone for task in running):
            return None
        used = sum(task.memory_bytes for task in running)
        for task in self._queue:
            fits = self._capacity is None or used + task.memory_bytes <= self._capacity
            if fits and not (running and task.key in self._alone):
                self._queue.remove(task)
                return task
        while not running and self._queue:
            task, free = self._queue.popleft(), available_bytes()
            if task.memory_bytes <= free:
                return task
            self._on_outcome(does_not_fit(task, free))
        return None

    def _receive(self) -> None:
        """Wait a moment for messages and handle them."""
        assert self._job is not None
        connections = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(connections), _POLL_S):
            worker = connections[connection]  # type: ignore[index]
            message = worker.receive()
            if message == READY:
                worker.is_ready = self._any_ready = True
                self._failed_starts = 0
            elif isinstance(message, Outcome):
                if ends_worker(message, self._job):
                    self._remove(worker)
                self._finish(worker, message)
            elif isinstance(message, Exception):
                self._remove(worker)
                self._cannot_start(message)
            else:
                self._ended(worker)

    def _finish(self, worker: Worker, outcome: Outcome) -> None:
        """Report the outcome of a worker's task; a task that ran out of memory runs once more, alone."""
        task, worker.task = worker.task, None
        assert task is not None
        is_shared = bool(self._busy()) and task.key not in self._alone
        if outcome.status == OUT_OF_MEMORY and is_shared:
            self._alone.add(task.key)
            self._queue.append(task)
            return
        self._on_outcome(outcome)

    def _ended(self, worker: Worker) -> None:
        """Handle a worker whose process has ended."""
        if worker.task is not None:
            self._finish(worker, worker.crash(worker.task))
        elif not worker.is_ready:
            self._cannot_start(AttnLabError("a worker process ended before its first case"))
        self._remove(worker)

    def _cannot_start(self, error: Exception) -> None:
        """Raise the error of a worker that cannot start, unless others have run tasks."""
        self._failed_starts += 1
        if not self._any_ready:
            raise error
        if self._failed_starts >= _MOST_STARTS:
            text = f"no worker can start: {' '.join(str(error).split())[:300]}"
            while self._queue:
                key = self._queue.popleft().key
                self._on_outcome(Outcome(key=key, status=NOT_RUN, text=text))

    def _stop_late(self) -> None:
        """End workers that exceed a time limit."""
        for worker in [*self._workers]:
            if worker.task is not None:
                limit = worker.task.limit_s
                if limit is not None and worker.elapsed_s > limit:
                    text, key = f"the case did not end within {limit:g} s", worker.task.key
                    seconds = worker.elapsed_s
                    self._remove(worker)
                    outcome = Outcome(key=key, status=TIMEOUT, text=text, seconds=seconds)
                    self._finish(worker, outcome)
            elif not worker.is_ready and worker.elapsed_s > _START_LIMIT_S:
                self._remove(worker)
                self._cannot_start(AttnLabError("a worker process did not start in time"))

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
