"""Check one op: run its hostile cases, group equal findings, and shrink one of each group."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, DeviceLost
from attnlab.checker.case_check import check_case
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.shrinking import shrink
from attnlab.checker.slot_reads import ReadCounts
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violations import find_violations
from attnlab.kernels.backend import Backend
from attnlab.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What to run: ``cases`` hostile Cases per op on a platform, for ``seconds`` per op.

    ``case_limit_s`` is how long one case may take in a process of its own before it is a finding.
    """

    platform: str
    cases: int
    seconds: float
    seed: int = 0
    case_limit_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """What one op showed on its cases, or on a part of them.

    - ``findings``: faults and observations, one per group.
    - ``left_out``: what did not run, and why.
    - ``reads``: the slots that the op's kernels read, counted by kind.
    - ``resume``: the index of the next case, if a kernel broke the GPU's context and a new process must
      continue; else None.
    """

    op: str
    cases_run: int
    findings: list[Finding]
    left_out: list[str]
    reads: ReadCounts = field(default_factory=ReadCounts)
    resume: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the check of an op has come: what runs next, and the report of the cases before it.

    ``case`` is the Case with number ``index``, or None if the findings are being shrunk.
    """

    index: int
    case: Case | None
    report: OpReport


def check_op(
    backend: Backend,
    op: str,
    budget: Budget,
    begin: int = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> OpReport:
    """Check the hostile Cases of an op, from index ``begin`` on, until the time is up.

    ``on_progress`` is called before each case and before the findings are shrunk.
    """
    start, cases_run = time.perf_counter(), 0
    lab = Lab(source=backend.path, device="cpu", keep=3)
    findings, left_out = list[Finding](), list[str]()
    reads, resume = ReadCounts(), None

    def report() -> OpReport:
        return OpReport(
            op=op,
            cases_run=cases_run,
            findings=grouped(findings),
            left_out=[*dict.fromkeys(left_out), *reads.left_out(op)],
            reads=reads,
            resume=resume,
        )

    cases = hostile_cases(backend, op, budget.platform, budget.cases, budget.seed)
    for i, case in itertools.islice(enumerate(cases), begin, None):
        if time.perf_counter() - start > budget.seconds:
            left_out += time_is_up(op, budget, i).left_out
            break
        on_progress(Progress(index=i, case=case, report=report()))
        try:
            if is_callers_fault(lab, case):
                continue
            findings += check_case(lab, backend, case, reads.add)
        except DeviceLost as error:
            findings.append(crash(case, str(error)))
            resume = i + 1
        except AttnLabError as error:
            left_out.append(f"{op}: {error}")
            continue
        cases_run += 1
        if resume is not None:
            break
    if resume is not None:  # nothing can run on a broken GPU context
        return report()
    on_progress(Progress(index=budget.cases, case=None, report=report()))
    findings = _shrink_all(lab, backend, grouped(findings), start + budget.seconds)
    return report()


def time_is_up(op: str, budget: Budget, begin: int) -> OpReport:
    """Return the report of the cases from index ``begin`` on, which do not run any more."""
    count = budget.cases - begin
    text = f"{op}: {count} of {budget.cases} cases, because the time was up"
    return OpReport(op=op, cases_run=0, findings=[], left_out=[text] if count > 0 else [])


def crash(case: Case, evidence: str) -> Finding:
    """Return the finding of a kernel that ended its process or broke the GPU's context."""
    return Finding(op=case.op, kind="fails", case=case, evidence=evidence, diagnosis="crash")


def is_callers_fault(lab: Lab, case: Case) -> bool:
    """Return whether the Case's call violates a contract, so that a wrong result is the caller's fault.

    A default scale computed from the number of heads does not count: the op chooses it.
    """
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return any(v.effect != "harmless" and v.kind != "default_scale" for v in violations)


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each group, with the number of cases of the whole group."""
    groups: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        first = groups.get(finding.group)
        seen = finding.seen + (first.seen if first else 0)
        groups[finding.group] = dataclasses.replace(first or finding, seen=seen)
    return list(groups.values())


def _shrink_all(
    lab: Lab, backend: Backend, findings: list[Finding], deadline: float
) -> list[Finding]:
    """Shrink faults before observations; split the remaining time equally.

    Each result keeps the Case that showed it first in ``first``.
    """
    smallest = []
    findings = sorted(findings, key=lambda finding: not finding.is_fault)
    for i, finding in enumerate(findings):
        seconds = (deadline - time.perf_counter()) / (len(findings) - i)
        small = shrink(lab, backend, finding, seconds)
        first = None if small.case == finding.case else finding.case
        smallest.append(dataclasses.replace(small, seen=finding.seen, first=first))
    return smallest
