"""Refine a diagnosis by running the kernel again: other buffers, other empty slots, and a second case."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCall, KernelRejected
from attnlab.contracts.violations import find_violations
from attnlab.defects import Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slices import sample_rows
from attnlab.diagnosis.candidates import Candidate, fit
from attnlab.diagnosis.decision import (
    Evidence,
    collect_evidence,
    conclude,
    if_all_unwritten,
    select_cause,
    status_of,
)
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.error_location import locate
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import CacheRun, Rerun, find_dependence, find_slot_kinds
from attnlab.diagnosis.second_case import second_case
from attnlab.diagnosis.withdrawal import with_slot_kinds, withdraw
from attnlab.diagnosis.xray_evidence import needs_xray, with_xray
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import PagedCache
from attnlab.weights.public import xray
from attnlab.weights.xray import XRay

_XRAY_S = 6.0  # time for the search for a description
_RERUNS = 6  # of the kernel, before an X-ray
_XRAY_RUNS, _XRAY_RUN_S = 20, 30.0  # further runs of an X-ray, and the time that all may take
_XRAY_WEIGHTS = 1 << 22  # rows × heads × slots, up to which the weights are measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel at hand.

    ``run``: runs a Case; ``run_with``: runs a Case with another cache than ``cache_of`` returns for it, or
    None; ``xray``: measures the weights. All outputs are on the CPU.
    """

    run: Rerun
    run_with: CacheRun | None = None
    cache_of: Callable[[Case], PagedCache] | None = None
    xray: Callable[[Case], XRay] | None = None


def kernel_of(lab: Lab) -> Kernel:
    """Return the kernels of a lab."""
    return Kernel(
        run=lambda case: lab.output(case).cpu(),
        run_with=lambda case, cache: lab.output(case, cache).cpu(),
        cache_of=lab.cache,
        xray=lambda case: xray(case, lab=lab, limit_s=_XRAY_S),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examination:
    """A diagnosis and the evidence that it rests on."""

    evidence: Evidence
    diagnosis: Diagnosis

    @property
    def problem(self) -> Problem:
        """Return the problem that was diagnosed."""
        return self.evidence.problem


def examine(
    lab: Lab,
    case: Case,
    output: torch.Tensor,
    defects: Iterable[Defect],
    pattern: Pattern | None = None,
) -> Examination:
    """Diagnose one output of a Case without running anything; ``pattern`` is its pattern, if known."""
    call = lab.call(case)
    check_output(output, call.output)
    problem = Problem.of_case(case, lab.batch(case), call, call.output)
    violations = find_violations(call, problem.target, problem.kernels, lab.cache(case).provenance)
    locations = locate(problem, output, case.query_heads, lab.reference(case))
    evidence = collect_evidence(problem, output, locations, violations, case.query_heads)
    return Examination(evidence=evidence, diagnosis=conclude(evidence, defects, pattern))


def with_reruns(
    lab: Lab,
    case: Case,
    output: torch.Tensor,
    first: Examination,
    kernel: Kernel,
    defects: Iterable[Defect],
) -> Diagnosis:
    """Return the first diagnosis, refined by what reruns of the kernel show."""
    began = time.perf_counter()
    diagnosis = _with_finite_contents(
        lab, case, first, kernel.run, defects
    )  # its cache is reused below
    dependence = find_dependence(kernel.run, case, output)
    diagnosis = dataclasses.replace(
        _if_unwritten(first.evidence, dependence.unwritten, diagnosis, defects),
        pattern=first.diagnosis.pattern,
        unwritten=dependence.unwritten.tolist(),
        unwritten_by="reruns" if len(dependence.unwritten) else "",
        slot_dependent=dependence.on_slots.tolist(),
    )
    if len(dependence.on_slots) and kernel.run_with is not None and kernel.cache_of is not None:
        zeros = case.replace(empty_slots="zeros")
        kinds = find_slot_kinds(kernel.run_with, zeros, kernel.cache_of(zeros))
        diagnosis = with_slot_kinds(diagnosis, kinds)
    diagnosis = _with_second_case(lab, case, kernel, diagnosis)
    seconds = (time.perf_counter() - began) / _RERUNS
    if kernel.xray is None or not needs_xray(diagnosis) or not _can_xray(case, seconds):
        return diagnosis
    try:
        return with_xray(diagnosis, kernel.xray(case))
    except AttnLabError:
        return diagnosis  # the call is too large, or the kernel rejects coded values


def _can_xray(case: Case, seconds: float) -> bool:
    """Answer whether an X-ray takes seconds at most, if a run takes ``seconds``: it runs the kernel once for
    every ``head_size`` slots, and some more for confirmation."""
    slots = case.total_blocks * case.block_size
    runs = _XRAY_RUNS + -(-slots // case.head_size)
    is_small = case.lengths.num_tokens * case.num_heads * slots <= _XRAY_WEIGHTS
    return is_small and seconds * runs <= _XRAY_RUN_S


def _if_unwritten(
    evidence: Evidence, unwritten: torch.Tensor, diagnosis: Diagnosis, defects: Iterable[Defect]
) -> Diagnosis:
    """Return that no kernel writes the wrong rows, if reruns show it for all and no defect explains them."""
    if diagnosis.explanations or not len(unwritten):
        return diagnosis
    known = dataclasses.replace(evidence, unwritten=unwritten, unwritten_by="reruns")
    return if_all_unwritten(known, diagnosis, tuple(defects)) or diagnosis


def _with_second_case(lab: Lab, case: Case, kernel: Kernel, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without explanations that do not hold in a second case.

    A defect that does not show in the second case, or that a rejection hides, is kept; unwritten rows, too.
    """
    other = second_case(case) if diagnosis.explanations else None
    if other is None:
        return diagnosis
    try:
        output = kernel.run(other)
    except KernelRejected:
        return diagnosis

    def is_refuted(candidate: Candidate) -> bool:
        if candidate.defect.touches == "unwritten":
            return False  # reruns with another buffer have shown it
        again = examine(lab, other, output, (candidate.defect,), Pattern())
        if again.diagnosis.is_wrong:
            return not again.diagnosis.explanations
        return not _is_hidden(again.problem, candidate.defect)

    names = ("query_lens", "ctx_lens", "sm_scale", "k_scale", "v_scale")
    changes = [
        f"{name}={getattr(other, name)}"
        for name in names
        if getattr(other, name) != getattr(case, name)
    ]
    reason = f"{{names}} does not explain a second run with {', '.join(changes)}"
    return withdraw(diagnosis, is_refuted, "excluded by rerun", reason)


def _with_finite_contents(
    lab: Lab, case: Case, first: Examination, rerun: Rerun, defects: Iterable[Defect]
) -> Diagnosis:
    """Run the Case with finite garbage in unwritten slots and rows, and diagnose that output.

    NaN shows where unwritten memory is used, but not how; finite garbage also has values. If the output
    with garbage is correct, the remaining explanations are those that garbage does not show.
    """
    empty_slots = "garbage" if case.empty_slots == "nan" else case.empty_slots
    finite = case.replace(empty_slots=empty_slots, output_init="recycled")
    if finite == case:
        return first.diagnosis
    second = examine(lab, finite, rerun(finite), defects, first.diagnosis.pattern)
    if second.diagnosis.is_wrong:
        return second.diagnosis
    explanations = [
        candidate
        for candidate in first.diagnosis.explanations
        if _is_hidden(second.problem, candidate.defect)
    ]
    left = [candidate.name for candidate in explanations]
    candidates = [
        dataclasses.replace(candidate, verdict="excluded by rerun")
        if candidate.verdict == "explains" and candidate.name not in left
        else candidate
        for candidate in first.diagnosis.candidates
    ]
    cause = select_cause(explanations)
    return dataclasses.replace(
        first.diagnosis,
        status=status_of(cause, explanations, first.diagnosis.pattern),
        cause=cause,
        explanations=explanations,
        candidates=candidates,
    )


def _is_hidden(problem: Problem, defect: Defect) -> bool:
    """Answer whether a defect changes only the rounding in a problem."""
    if not defect.applies(problem):
        return True
    for row_slice in sample_rows(problem):
        predicted, correct = defect.compute(problem, row_slice), problem.correct(row_slice)
        if bool((fit(predicted.output, correct, 1).ratio > 1).any()):
            return False
    return True


def check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall if an output has another shape or dtype than the call's."""
    if output.shape != expected.shape:
        raise InvalidCall(
            f"output must have shape {tuple(expected.shape)}, got {tuple(output.shape)}"
        )
    if output.dtype != expected.dtype:
        raise InvalidCall(f"output must have dtype {expected.dtype}, got {output.dtype}")
