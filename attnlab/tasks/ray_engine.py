"""The engine ``ray``: the same tasks on a Ray cluster, or on a local one that is started for them.

A child process talks to Ray (:mod:`attnlab.tasks.ray_driver`). It can be ended at any time, and it keeps
Ray's signal handlers, output and aborts out of this process. Each slot is an actor
(:mod:`attnlab.tasks.ray_actor`).
"""

import contextlib
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from attnlab.case.errors import AttnLabError, Unavailable, check_installed
from attnlab.kernels.child_process import run_in_child
from attnlab.tasks import ray_driver as driver
from attnlab.tasks.local import Pool, Slot
from attnlab.tasks.ray_actor import PickledJob
from attnlab.tasks.task import NOT_RUN, OUT_OF_MEMORY, Job, Outcome, Stop, Task, never

_POLL_S = 0.1
_REACH_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 150.0  # to start a local cluster, or until one has a process for this client
_START_LIMIT_S = 180.0  # until the first actor has a place in the cluster
_CLOSE_LIMIT_S = 1.2  # to end the actors of a cluster
_LONGEST_FOLDER = 45  # the paths of Ray's sockets must be shorter than 108 bytes


class RaySlot(Slot):
    """This process's end of an actor; its ``host`` is the node."""

    def __init__(self, number: int, engine: "RayEngine") -> None:
        self.number, self._engine = number, engine
        self.began = time.monotonic()
        self.is_out_of_memory = False

    def start(self, task: Task) -> None:
        self.task, self.began = task, time.monotonic()
        self._engine.send(driver.RUN, self.number, task)

    def crash(self, task: Task) -> Outcome:
        """Return the outcome of a task whose actor was lost.

        The case ran in another process, so it has no verdict, unless the node ran out of memory.
        """
        return Outcome(
            key=task.key,
            status=OUT_OF_MEMORY if self.is_out_of_memory else NOT_RUN,
            text=self.start_error,
            seconds=time.monotonic() - self.began,
        )

    def kill(self) -> None:
        self._engine.send(driver.KILL, self.number)


class RayEngine(Pool[RaySlot]):
    """A slot per GPU of a Ray cluster for device "cuda", else per core.

    ``address``: "ray://HOST:PORT", "HOST:PORT" or "auto" for a cluster that runs. None starts a local one,
    which :meth:`close` shuts down, and then has its address. The cluster is reached or started here, unless
    ``stop`` returns True before. Raises Unavailable without the extra ray, and if a cluster cannot be
    reached within 10 s.
    """

    def __init__(self, address: str | None = None, device: str = "cpu", stop: Stop = never) -> None:
        super().__init__()
        check_installed("engine ray", "ray")
        self._is_local, self.address = address is None, address
        self._name = f"the Ray cluster at {address}" if address else "a local Ray cluster"
        self._count = self._last_number = 0
        self._free_bytes: dict[str, int] = {}
        self._folder = _short_folder() if self._is_local else None
        context = multiprocessing.get_context("spawn")
        self._driver, theirs = context.Pipe()
        work = pickle.dumps((driver.serve, (address, device, self._folder)))
        self._process = context.Process(target=run_in_child, args=(work, theirs))
        self._process.start()
        theirs.close()
        try:
            self._connect(stop)
        except BaseException:
            self.close()
            raise

    def _connect(self, stop: Stop) -> None:
        """Wait until the driver is connected. Raises Unavailable if it cannot connect."""
        began, limit_s, problem = time.monotonic(), _REACH_LIMIT_S, "is not reachable"
        while not stop():
            if time.monotonic() - began > limit_s:
                raise Unavailable(f"engine: {self._name} {problem} within {limit_s:g} s")
            if not self._driver.poll(_POLL_S):
                continue
            try:
                step, what = self._driver.recv()
            except (EOFError, OSError) as error:
                raise Unavailable(f"engine: {self._name} {problem}") from error
            if step == driver.REACHED:
                limit_s, problem = _CONNECT_LIMIT_S, "did not start, or answer,"
            if step == driver.FAILED:
                raise Unavailable(f"engine: {self._name} {what}")
            if step == driver.CONNECTED:
                self.address, self._count = what
                return

    def _begin(self, job: Job) -> None:
        self._on_host = job.device == "cpu"

    def close(self) -> None:
        """End the actors, and the local cluster if there is one; wait until they have ended."""
        if self._process.is_alive() and self._is_local and sys.platform == "linux":
            driver.end_tree(self._process.pid or 0)
        elif self._process.is_alive():
            self.send(driver.CLOSE)
            self._process.join(_CLOSE_LIMIT_S)
        self._process.kill()
        self._process.join()
        self._driver.close()
        self._slots.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, *request: Any) -> None:
        """Send a request to the driver; if it has ended, :meth:`run` raises Unavailable."""
        with contextlib.suppress(OSError):
            self._driver.send(request)

    def _take(self, job: Job) -> None:
        """Keep the actors; each takes the job with its next task."""
        self.send(driver.JOB, pickle.dumps(PickledJob.of(job)))

    def _fill(self) -> None:
        wanted = min(self._count, len(self._queue) + len(self._busy()))
        while len(self._slots) < wanted:
            self._last_number += 1
            self._slots.append(RaySlot(self._last_number, self))
            self.send(driver.START, self._last_number)

    def _room(self, host: str) -> int | None:
        return self._free_bytes[host] if self._on_host else None

    def _free(self, host: str) -> int:
        return self._free_bytes[host]

    def _messages(self) -> Iterator[tuple[RaySlot, Any]]:
        wait_s = _POLL_S
        while self._driver.poll(wait_s):
            wait_s = 0.0
            try:
                number, kind, what = self._driver.recv()
            except (EOFError, OSError) as error:
                raise Unavailable(f"engine: the connection to {self._name} was lost") from error
            slot = next((slot for slot in self._slots if slot.number == number), None)
            if slot is None:
                continue  # it was ended
            if kind == driver.READY:
                slot.host, free = what
                slot.is_ready = True
                self._note_free(slot, free)
            elif kind == driver.DONE:
                message, free = what
                self._note_free(slot, free)
                yield slot, message
            else:
                cause, slot.is_out_of_memory = what
                slot.start_error = f"a Ray worker was lost: {cause}"
                yield slot, None

    def _note_free(self, slot: RaySlot, free: int) -> None:
        """Keep the free memory of a node, as it is while no other task runs there."""
        if self._busy(slot.host) in ([], [slot]):
            self._free_bytes[slot.host] = free
        self._free_bytes.setdefault(slot.host, free)

    def _watch(self) -> None:
        is_waiting = self._slots and not any(slot.is_ready for slot in self._slots)
        oldest = min((slot.began for slot in self._slots), default=0.0)
        if is_waiting and time.monotonic() - oldest > _START_LIMIT_S:
            raise AttnLabError(f"engine: {self._name} did not start a worker in time; is it busy?")


def _short_folder() -> str | None:
    """Make a folder for the files of a local cluster; None if its path is too long for Ray's sockets."""
    folder = tempfile.mkdtemp(prefix="attnlab-ray-")
    if len(folder) <= _LONGEST_FOLDER:
        return folder
    shutil.rmtree(folder)
    return None
