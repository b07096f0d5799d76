"""Worker: a child process that keeps a job's state and runs one task at a time."""

import contextlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attnlab.case.errors import AttnLabError
from attnlab.kernels.child_process import run_in_child, start_context
from attnlab.tasks.pool import READY, Slot
from attnlab.tasks.task import (
    CRASH,
    DEVICE_LOST,
    ERROR,
    OUT_OF_MEMORY,
    Job,
    OpenJob,
    Outcome,
    Task,
)

_IDLE_SHARE = 0.25  # of the time in which a task does nothing


class Worker(Slot):
    """The parent's end of a worker process. It is ready once the job is open.

    ``gpu`` is the value of CUDA_VISIBLE_DEVICES for the worker, None for the parent's.
    """

    def __init__(self, job: bytes, gpu: str | None = None) -> None:
        self.gpu = gpu
        context = start_context()
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        work = pickle.dumps((_serve, (job,)))
        self._process: BaseProcess = context.Process(target=run_in_child, args=(work, theirs))
        with _visible(gpu):
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
def _visible(gpu: str | None) -> Iterator[None]:
    """Set CUDA_VISIBLE_DEVICES for a process that starts inside the block."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    try:
        if gpu is not None:
            os.environ[name] = gpu
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
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
