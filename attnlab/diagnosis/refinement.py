"""Refine a diagnosis by running the kernel again: other buffers, other empty slots, and a second case."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.defects import Defect
from attnlab.diagnosis.argument_lab import ArgumentLab
from attnlab.diagnosis.confirmation import is_hidden, with_second_cases
from attnlab.diagnosis.decision import (
    Evidence,
    if_all_unwritten,
    select_cause,
    status_of,
)
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import Examination, examine
from attnlab.diagnosis.leak_check import confirmed_leak
from attnlab.diagnosis.pattern_check import confirmed_claim
from attnlab.diagnosis.reruns import CacheRun, Rerun, find_dependence, find_slot_kinds
from attnlab.diagnosis.rule_search import find_rule
from attnlab.diagnosis.weights_check import confirmed_weights
from attnlab.diagnosis.withdrawal import with_slot_kinds
from attnlab.diagnosis.xray_evidence import needs_xray, with_xray
from attnlab.kernels.control import Control
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import PagedCache
from attnlab.weights.cost import most_runs
from attnlab.weights.public import xray
from attnlab.weights.xray import XRay

_XRAY_S = 6.0  # time for the search for a description
_RERUNS = 6  # of the kernel, before an X-ray
_XRAY_RUN_S = 30.0  # time that all runs of an X-ray may take
_XRAY_WEIGHTS = 1 << 24  # rows × heads × slots, up to which the weights are measured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel at hand.

    ``run``: runs a Case; ``run_with``: runs a Case with another cache than ``cache_of`` returns for it, or
    None; ``xray``: measures the weights. All outputs are on the CPU. ``is_deterministic``: as
    ``Backend.is_deterministic``.
    """

    run: Rerun
    run_with: CacheRun | None = None
    cache_of: Callable[[Case], PagedCache] | None = None
    xray: Callable[[Case], XRay] | None = None
    is_deterministic: bool = False

    def check_repeats(
        self, control: Control, case: Case, output: torch.Tensor, diagnosis: Diagnosis
    ) -> None:
        """Run a Case with a wrong output again, and raise NotDeterministic if it gives another one."""
        if diagnosis.is_wrong and not self.is_deterministic:
            control.compare(output, lambda: self.run(case))


def kernel_of(lab: Lab, case: Case) -> Kernel:
    """Return the kernels of a lab that run a Case. An X-ray would run them without an op argument."""
    return Kernel(
        is_deterministic=lab.backend(case).is_deterministic,
        run=lambda case: lab.output(case).cpu(),
        run_with=lambda case, cache: lab.output(case, cache).cpu(),
        cache_of=lab.cache,
        xray=None
        if isinstance(lab, ArgumentLab)
        else lambda case: xray(case, lab=lab, limit_s=_XRAY_S),
    )


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
    is_wrong = first.evidence.locations.is_wrong.any(1)
    dependence = find_dependence(kernel.run, case, output, is_wrong)
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
    diagnosis = with_second_cases(lab, case, kernel.run, diagnosis)
    seconds = (time.perf_counter() - began) / _RERUNS
    rule = None if diagnosis.explanations else find_rule(lab, case, kernel.run)
    if rule is not None:
        return dataclasses.replace(diagnosis, status="described", rule=rule)
    diagnosis = _with_weights(lab, case, kernel, _with_xray(case, kernel, diagnosis, seconds))
    if diagnosis.explanations or diagnosis.weights is not None:
        return diagnosis
    if len(dependence.on_slots) and not len(dependence.on_finite_slots):
        leak = confirmed_leak(lab, case, kernel.run)
        if leak is not None:
            return dataclasses.replace(diagnosis, status="described", leak=leak)
    claim = confirmed_claim(lab, case, first, kernel.run)
    status = "unexplained" if claim is None else "described"
    diagnosis = dataclasses.replace(diagnosis, status=status, claim=claim)
    if status == "unexplained" and case.first_block:
        return _from_the_first_block(lab, case, diagnosis, kernel)
    return diagnosis


def _from_the_first_block(lab: Lab, case: Case, diagnosis: Diagnosis, kernel: Kernel) -> Diagnosis:
    """Return the diagnosis with what describes the kernel in a small cache, if it is wrong there, too.

    A cache that begins with unused blocks is too large for most rules.
    """
    small = case.replace(first_block=0, num_blocks=None)
    try:
        output = kernel.run(small)
    except AttnLabError:
        return diagnosis
    first = examine(lab, small, output, ())
    if not first.diagnosis.is_wrong:
        return diagnosis
    found = with_reruns(lab, small, output, first, kernel, ())
    if found.status != "described":
        return diagnosis
    names = ("status", "rule", "weights", "leak", "claim")
    return dataclasses.replace(diagnosis, **{name: getattr(found, name) for name in names})


def _with_xray(case: Case, kernel: Kernel, diagnosis: Diagnosis, seconds: float) -> Diagnosis:
    """Return the diagnosis with an X-ray, if one may change it and is quick; a run takes ``seconds``."""
    if kernel.xray is None or not needs_xray(diagnosis) or not can_xray(case, seconds):
        return diagnosis
    try:
        return with_xray(diagnosis, kernel.xray(case))
    except AttnLabError:
        return diagnosis  # the call is too large, or the kernel rejects coded values


def _with_weights(lab: Lab, case: Case, kernel: Kernel, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with what of the X-ray the outputs of further cases confirm; without that, the
    X-ray describes nothing."""
    found = diagnosis.xray
    if found is None or found.status != "described" or diagnosis.explanations:
        return diagnosis
    weights = confirmed_weights(lab, case, found.descriptions, kernel.run)
    status = "unexplained" if weights is None else "described"
    return dataclasses.replace(diagnosis, status=status, weights=weights)


def can_xray(case: Case, seconds: float) -> bool:
    """Answer whether an X-ray takes seconds at most, if a run takes ``seconds``."""
    slots = case.total_blocks * case.block_size
    is_small = case.lengths.num_tokens * case.num_heads * slots <= _XRAY_WEIGHTS
    return is_small and seconds * most_runs(case) <= _XRAY_RUN_S


def _if_unwritten(
    evidence: Evidence, unwritten: torch.Tensor, diagnosis: Diagnosis, defects: Iterable[Defect]
) -> Diagnosis:
    """Return that no kernel writes the wrong rows, if reruns show it for all and no defect explains them."""
    if diagnosis.explanations or not len(unwritten):
        return diagnosis
    known = dataclasses.replace(evidence, unwritten=unwritten, unwritten_by="reruns")
    return if_all_unwritten(known, diagnosis, tuple(defects)) or diagnosis


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
        if is_hidden(second.problem, candidate.defect)
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
