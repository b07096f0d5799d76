"""Running a whole library: every op over its hostile cases, equal findings in one, in several processes."""

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, DeviceLost
from attnlab.case.shown import Shown
from attnlab.checker.check_case import look, shrink
from attnlab.checker.finding import Finding
from attnlab.checker.hostile import hostile_cases
from attnlab.checker.slot_reads import ReadCounts
from attnlab.checker.subject import Subject
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violations import find_violations
from attnlab.lab.lab import Lab

OnCase = Callable[[int, int], None]
LEFT_OUT = ("output scales, quantisation by token and head, bidirectional masks",)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Shown):
    """What came of a library.

    - ``findings``: one for each group of equal ones, at its smallest Case; ``observations`` likewise.
    - ``reads``: by op how many slots of each kind its kernels read (:mod:`attnlab.lab.reads`), of ops whose
      reads were seen; ``reads_allowed``: the kinds that their contracts let them read.
    - ``reports``: files that were written for the findings, by path.
    - ``left_out``: what was not looked at, and why, in words.
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
            "observations": [one.to_dict() for one in self.observations],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What came of one op, or of its first cases.

    ``resume``: the case that another process has to go on with, where one has broken the GPU's context.
    """

    cases_run: int
    op: str
    findings: list[Finding]
    left_out: list[str]
    tally: ReadCounts = field(default_factory=ReadCounts)
    resume: int | None = None


def check_library(
    subject: Subject,
    ops: Sequence[str],
    platform: str,
    cases: int,
    seconds: float,
    seed: int = 0,
    processes: int = 1,
    on_op: OnCase = lambda done, total: None,
) -> Report:
    """Run ``cases`` hostile Cases of each op on a platform, for about ``seconds`` in all.

    With more than one of ``processes`` each op runs in a process of its own, so that one that dies is a
    finding, and the others are not lost.
    """
    began = time.perf_counter()
    share = seconds * processes / len(ops)
    parts: list[_Part] = []
    for part in _parts(subject, ops, (platform, cases, share, seed), processes):
        parts.append(part)
        on_op(len(parts), len(ops))
    found = [finding for part in parts for finding in part.findings]
    found.sort(key=lambda one: (ops.index(one.op), one.kind))
    parts.sort(key=lambda part: ops.index(part.op))
    tallies = {part.op: part.tally for part in parts if part.tally.watched}
    return Report(
        source=subject.source or subject.backend,
        version=subject.version,
        cases_run=sum(part.cases_run for part in parts),
        seconds=time.perf_counter() - began,
        findings=[one for one in found if one.is_fault],
        observations=[one for one in found if not one.is_fault],
        reads={op: tally.to_dict() for op, tally in tallies.items()},
        reads_allowed={op: sorted(tally.allowed) for op, tally in tallies.items()},
        left_out=[
            *(text for part in parts for text in part.left_out),
            *subject.left_out(),
            *LEFT_OUT,
        ],
    )


def _parts(
    subject: Subject, ops: Sequence[str], how: tuple[str, int, float, int], processes: int
) -> Iterator[_Part]:
    """Yield what came of each op, as it comes."""
    if processes == 1:
        for op in ops:
            yield check_op(subject, op, *how)
        return
    with ThreadPoolExecutor(processes) as threads:
        waiting = [threads.submit(_in_a_process, subject, op, how) for op in ops]
        for future in as_completed(waiting):
            yield future.result()


def _in_a_process(subject: Subject, op: str, how: tuple[str, int, float, int]) -> _Part:
    """Return what came of an op in processes of its own: one that dies, or breaks the GPU's context, is a
    finding, and in the latter case another goes on behind it."""
    parts = [_in_one_process(subject, op, how, 0)]
    while (resume := parts[-1].resume) is not None:
        parts.append(_in_one_process(subject, op, how, resume))
    return _Part(
        op=op,
        cases_run=sum(part.cases_run for part in parts),
        findings=_grouped(one for part in parts for one in part.findings),
        left_out=list(dict.fromkeys(text for part in parts for text in part.left_out)),
        tally=parts[0].tally,
    )


def _in_one_process(
    subject: Subject, op: str, how: tuple[str, int, float, int], begin: int
) -> _Part:
    """Return what came of an op's cases from ``begin`` on."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_alone) as pool:
        try:
            return pool.submit(check_op, subject, op, *how, begin).result()
        except BrokenProcessPool:
            platform, cases, _, seed = how
            first = next(hostile_cases(subject, op, platform, cases, seed))
            text = "its process died at one of the cases, this one or a later one"
            died = Finding(op=op, kind="fails", case=first, evidence=text, diagnosis="crash")
            lost = f"{op}: every case after the crash"
            return _Part(op=op, cases_run=0, findings=[died], left_out=[lost])


def _alone() -> None:
    torch.set_num_threads(1)


def is_callers_fault(lab: Lab, case: Case) -> bool:
    """Answer whether the Case's call breaks a contract, so that nothing wrong with it is the kernel's.

    A default scale by the number of heads is the op's own fault.
    """
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return any(b.effect != "harmless" and b.kind != "default_scale" for b in violations)


def check_op(
    subject: Subject, op: str, platform: str, cases: int, seconds: float, seed: int, begin: int = 0
) -> _Part:
    """Run one op over its hostile Cases, from ``begin`` on, and shrink one finding of each group, until the
    time is up."""
    began, ran, left_out = time.perf_counter(), 0, list[str]()
    lab = Lab(source=subject.source if subject.backend == "vllm" else None, device="cpu", keep=3)
    every = list[Finding]()
    tally, resume = ReadCounts(), None
    hostile = enumerate(hostile_cases(subject, op, platform, cases, seed))
    for i, case in itertools.islice(hostile, begin, None):
        if time.perf_counter() - began > seconds:
            left_out.append(f"{op}: {cases - i} of {cases} cases, the time was up")
            break
        try:
            if is_callers_fault(lab, case):
                continue
            found = look(lab, subject, case, tally.add)
        except DeviceLost as error:
            text, resume = str(error), i + 1
            found = [Finding(op=op, kind="fails", case=case, evidence=text, diagnosis="crash")]
        except AttnLabError as error:
            left_out.append(f"{op}: {error}")
            continue
        ran += 1
        every += found
        if resume is not None:
            break
    small = _grouped(every)
    if resume is None:  # a broken GPU shrinks nothing
        small = _shrunk(lab, subject, small, began + seconds)
    return _Part(
        op=op,
        cases_run=ran,
        findings=small,
        left_out=[*dict.fromkeys(left_out), *tally.left_out(op)],
        tally=tally,
        resume=resume,
    )


def _grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first of each group of equal findings, which tells how many Cases show it."""
    groups: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        first = groups.get(finding.group)
        seen = finding.seen + (first.seen if first else 0)
        groups[finding.group] = dataclasses.replace(first or finding, seen=seen)
    return list(groups.values())


def _shrunk(lab: Lab, subject: Subject, findings: list[Finding], until: float) -> list[Finding]:
    """Return each finding at its smallest Case, with the one where it was seen first: faults before what
    is told beside, each with an equal part of the time that is left."""
    small = []
    findings = sorted(findings, key=lambda one: not one.is_fault)
    for i, finding in enumerate(findings):
        left = (until - time.perf_counter()) / (len(findings) - i)
        least = shrink(lab, subject, finding, left)
        first = None if least.case == finding.case else finding.case
        small.append(dataclasses.replace(least, seen=finding.seen, first=first))
    return small
