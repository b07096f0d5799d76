"""Check a kernel library: every op, in this process or one process per op, merged into one report."""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.op_check import Budget, OpReport, check_op, crash, grouped
from attnlab.kernels.backend import Backend

OnOp = Callable[[int, int], None]
NOT_COVERED = ("output scales; scales per token and head; bidirectional masks",)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Shown):
    """The findings of a library.

    - ``source``, ``version``: the path of the vLLM or the plugin, and its version in words.
    - ``cases_run``, ``seconds``: the number of cases of all ops, and the time that they took.
    - ``findings``, ``observations``: one per group, each at its smallest Case.
    - ``reads``: per op, the number of slots that its kernels read, by kind
      (:mod:`attnlab.lab.reads`); only ops whose reads were traced.
    - ``reads_allowed``: per op, the kinds that the contracts of its kernels allow.
    - ``reports``: the paths of the files written for the findings.
    - ``left_out``: what was not checked, and why.
    """

    source: str
    version: str
    cases_run: int
    seconds: float
    findings: list[Finding] = field(default_factory=list)
    observations: list[Finding] = field(default_factory=list)
    reads: dict[str, dict[str, int]] = field(default_factory=dict)
    reads_allowed: dict[str, list[str]] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **fields,
            "findings": [finding.to_dict() for finding in self.findings],
            "observations": [finding.to_dict() for finding in self.observations],
        }


def check_library(
    backend: Backend,
    ops: Sequence[str],
    platform: str,
    cases: int,
    seconds: float,
    seed: int = 0,
    processes: int = 1,
    on_op: OnOp = lambda done, total: None,
) -> Report:
    """Check ``cases`` hostile Cases of each op on a platform, for about ``seconds`` in total.

    With ``processes`` > 1 each op runs in a process of its own. A process that dies becomes a finding;
    the other ops continue. ``on_op`` is called with the number of finished ops and of all ops.
    """
    start = time.perf_counter()
    budget = Budget(
        platform=platform, cases=cases, seconds=seconds * processes / len(ops), seed=seed
    )
    op_reports: list[OpReport] = []
    for op_report in _check_ops(backend, ops, budget, processes):
        op_reports.append(op_report)
        on_op(len(op_reports), len(ops))
    op_reports.sort(key=lambda op_report: ops.index(op_report.op))
    return _merged(backend, op_reports, time.perf_counter() - start)


def _merged(backend: Backend, op_reports: Sequence[OpReport], seconds: float) -> Report:
    """Return one report of all ops, findings in the order of the ops, then by kind."""
    findings = [
        finding
        for op_report in op_reports
        for finding in sorted(op_report.findings, key=lambda finding: finding.kind)
    ]
    reads = {op_report.op: op_report.reads for op_report in op_reports if op_report.reads.watched}
    left_out = [text for op_report in op_reports for text in op_report.left_out]
    return Report(
        source=str(backend.path or backend.name),
        version=backend.version,
        cases_run=sum(op_report.cases_run for op_report in op_reports),
        seconds=seconds,
        findings=[finding for finding in findings if finding.is_fault],
        observations=[finding for finding in findings if not finding.is_fault],
        reads={op: counts.to_dict() for op, counts in reads.items()},
        reads_allowed={op: sorted(counts.allowed) for op, counts in reads.items()},
        left_out=[*left_out, *backend.blind_spots, *NOT_COVERED],
    )


def _check_ops(
    backend: Backend, ops: Sequence[str], budget: Budget, processes: int
) -> Iterator[OpReport]:
    """Yield the report of each op as soon as the op is finished."""
    if processes == 1:
        for op in ops:
            yield check_op(backend, op, budget)
        return
    with ThreadPoolExecutor(processes) as threads:
        futures = [threads.submit(_check_in_processes, backend, op, budget) for op in ops]
        for future in as_completed(futures):
            yield future.result()


def _check_in_processes(backend: Backend, op: str, budget: Budget) -> OpReport:
    """Check an op in a process of its own; if a kernel breaks the GPU's context, continue in a new one."""
    parts = [_check_in_process(backend, op, budget, 0)]
    while (resume := parts[-1].resume) is not None:
        parts.append(_check_in_process(backend, op, budget, resume))
    return OpReport(
        op=op,
        cases_run=sum(part.cases_run for part in parts),
        findings=grouped(finding for part in parts for finding in part.findings),
        left_out=list(dict.fromkeys(text for part in parts for text in part.left_out)),
        reads=parts[0].reads,
    )


def _check_in_process(backend: Backend, op: str, budget: Budget, begin: int) -> OpReport:
    """Check an op from case ``begin`` on in a new process; a process that dies is a finding."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_use_one_thread) as pool:
        try:
            return pool.submit(check_op, backend, op, budget, begin).result()
        except BrokenProcessPool:
            cases = hostile_cases(backend, op, budget.platform, budget.cases, budget.seed)
            text = "the process died while it ran this case or a later one"
            return OpReport(
                op=op,
                cases_run=0,
                findings=[crash(next(cases), text)],
                left_out=[f"{op}: every case after the crash"],
            )


def _use_one_thread() -> None:
    torch.set_num_threads(1)
