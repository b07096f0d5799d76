"""Check a kernel library: every op, in this process or one process per op, merged into one report."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.shown import Shown
from attnlab.checker.finding import Finding
from attnlab.checker.op_check import Budget, OpReport, check_op
from attnlab.checker.worker import check_in_workers
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
    case_limit_s: float = 60.0,
) -> Report:
    """Check ``cases`` hostile Cases of each op on a platform, for about ``seconds`` in total.

    With ``processes`` > 1 each op runs in a process of its own. A case that ends its process, or takes
    longer than ``case_limit_s``, becomes a finding, and the check continues. ``on_op`` is called with the
    number of finished ops and of all ops.
    """
    start = time.perf_counter()
    at_once = min(processes, len(ops))
    budget = Budget(
        platform=platform,
        cases=cases,
        seconds=seconds * at_once / len(ops),
        seed=seed,
        case_limit_s=case_limit_s,
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
        dataclasses.replace(finding, flags=(*backend.flags, *finding.flags))
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
    stop = threading.Event()
    with ThreadPoolExecutor(processes) as threads:
        futures = [threads.submit(check_in_workers, backend, op, budget, stop) for op in ops]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:  # also if the caller is interrupted
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
