"""Check one op in child processes. A case that does not end, or that ends its process, is a finding.

Each case has a time limit. If a case exceeds it or ends its process, a new process continues with the next
case.
"""

import contextlib
import dataclasses
import multiprocessing
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from attnlab.case.errors import AttnLabError
from attnlab.checker.finding import Finding
from attnlab.checker.op_check import (
    Budget,
    OpReport,
    Progress,
    check_op,
    crash,
    grouped,
    time_is_up,
)
from attnlab.kernels.backend import Backend
from attnlab.kernels.child_process import run_in_child

_START_LIMIT_S = 180.0  # until the child has imported torch and loaded the kernels
_POLL_S = 0.1


def check_in_workers(backend: Backend, op: str, budget: Budget, stop: threading.Event) -> OpReport:
    """Check an op in a process of its own, or in several if a kernel hangs, crashes or breaks the GPU.

    When ``stop`` is set, the process is killed. Raises what the check raises, such as Unavailable.
    """
    parts: list[OpReport] = []
    spent, begin = 0.0, 0
    while True:
        rest = dataclasses.replace(budget, seconds=budget.seconds - spent)
        if parts and rest.seconds <= 0:
            parts.append(time_is_up(op, budget, begin))
            break
        worker = _Worker(backend, op, rest, begin)
        parts.append(worker.report(stop))
        spent += worker.spent_s
        resume = parts[-1].resume
        if resume is None or stop.is_set():
            break
        begin = resume
    return _joined(op, parts)


def _joined(op: str, parts: Sequence[OpReport]) -> OpReport:
    """Return one report of the parts of an op; the reads are those of the first part."""
    return OpReport(
        op=op,
        cases_run=sum(part.cases_run for part in parts),
        findings=grouped(finding for part in parts for finding in part.findings),
        left_out=list(dict.fromkeys(text for part in parts for text in part.left_out)),
        reads=parts[0].reads,
    )


class _Worker:
    """A child process that checks an op from case ``begin`` on, and how far it has come."""

    def __init__(self, backend: Backend, op: str, budget: Budget, begin: int) -> None:
        self._op, self._budget = op, budget
        self._progress: Progress | None = None
        self._started: float | None = None
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        job = pickle.dumps((_work, (backend, op, budget, begin)))
        self._process: BaseProcess = context.Process(target=run_in_child, args=(job, sender))
        self._process.start()
        sender.close()

    @property
    def spent_s(self) -> float:
        """Return the time since the first case began; loading does not count."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    def report(self, stop: threading.Event) -> OpReport:
        """Wait for the process, or kill it, and return its report; ``resume`` is the next case."""
        try:
            while (message := self._receive(stop)) is not None:
                if isinstance(message, OpReport):
                    return message
                if isinstance(message, Exception):
                    raise message
                self._started = self._started or time.monotonic()
                self._progress = message
            return self._ended_early(stop)
        finally:
            self._process.kill()
            self._process.join()
            self._receiver.close()

    def _receive(self, stop: threading.Event) -> Any:
        """Return the next message; None if there is none in time or the process has ended."""
        deadline = time.monotonic() + self._limit_s()
        while not stop.is_set() and time.monotonic() < deadline:
            if self._receiver.poll(_POLL_S):
                with contextlib.suppress(EOFError, OSError):
                    return self._receiver.recv()
                self._process.join()
                return None
        return None

    def _limit_s(self) -> float:
        """Return how long the next message may take."""
        if self._progress is None:
            return _START_LIMIT_S
        if self._progress.case is None:  # while it shrinks, there is no message
            return max(0.0, self._budget.seconds - self.spent_s) + self._budget.case_limit_s
        return self._budget.case_limit_s

    def _ended_early(self, stop: threading.Event) -> OpReport:
        """Return the report so far and, if a case is the reason, a finding and the next case."""
        progress = self._progress
        if progress is None:
            if stop.is_set():
                return OpReport(op=self._op, cases_run=0, findings=[], left_out=[])
            raise AttnLabError(f"{self._op}: the process of the check ended before its first case")
        if progress.case is None or stop.is_set():
            return progress.report
        return dataclasses.replace(
            progress.report,
            cases_run=progress.report.cases_run + 1,
            findings=grouped([*progress.report.findings, self._fault(progress)]),
            resume=progress.index + 1,
        )

    def _fault(self, progress: Progress) -> Finding:
        """Return the finding of the case that did not end or that ended the process."""
        assert progress.case is not None
        code, limit = self._process.exitcode, f"{self._budget.case_limit_s:g}"
        if code is None:
            finding = crash(progress.case, f"the case did not end within {limit} s")
            finding = dataclasses.replace(finding, diagnosis="does not end")
        else:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            finding = crash(progress.case, f"the kernel ended its process {how}")
        return dataclasses.replace(finding, flags=("--seconds", limit))


def _work(sender: Connection, backend: Backend, op: str, budget: Budget, begin: int) -> None:
    """Check an op in the child, and send progress, then the report or the exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    torch.set_num_threads(1)
    try:
        sender.send(check_op(backend, op, budget, begin, on_progress=sender.send))
    except AttnLabError as error:
        sender.send(error)
    except Exception:
        sender.send(RuntimeError(f"the process of the check failed:\n{traceback.format_exc()}"))
