"""The engine ``local``: long-lived worker processes on this machine.

All workers are started and watched by one thread, because Linux ends a child when the thread that
started it ends (:mod:`attnlab.kernels.child_process`).
"""

import os
import pickle
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from attnlab.case.errors import AttnLabError
from attnlab.tasks.memory import available_bytes
from attnlab.tasks.pool import Pool
from attnlab.tasks.task import OUT_OF_MEMORY, TIMEOUT, Job, Outcome
from attnlab.tasks.worker import Worker, ends_worker

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
        self._stop_late()
        if self._capacity is not None:
            self._keep_reserve()

    def _stop_late(self) -> None:
        """End workers that exceed a time limit."""
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
                self._cannot_start(AttnLabError("a worker process did not start in time"), tries=1)

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
