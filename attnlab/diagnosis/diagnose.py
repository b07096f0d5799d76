"""Diagnosing an output: by place, by value and by size, and abstaining where that does not decide."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall, KernelRejected
from attnlab.case.fields import refuse
from attnlab.contracts.dispatch import Target, decide
from attnlab.contracts.violations import find_violations
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.problem import Problem
from attnlab.diagnosis.candidates import (
    Candidate,
    fit,
)
from attnlab.diagnosis.decide import decided, gather, judge
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.distinguish import row_slices_of, separate
from attnlab.diagnosis.locate import locate
from attnlab.diagnosis.reruns import Rerun, probe
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall

_TWO_RUNS = "two runs with other contents of the buffer"


def diagnose(
    case: Case,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    rerun: Rerun | None = None,
    catalogue: Sequence[Defect] = CATALOGUE,
    propose: bool = True,
) -> Diagnosis:
    """Return what explains an output of the Case.

    - ``output``: [num_tokens, num_heads, head_size], of any backend; None runs the Case.
    - ``rerun``: runs a changed Case on whatever gave ``output``, to tell rows that nobody wrote, and
      rows that read slots that nobody wrote. With ``output`` None it is the lab; without it nothing
      is run again.
    - ``propose``: look for a Case that tells apart what this one does not.

    Raises InvalidCall for an output of another shape. A Case that its kernel refuses is "rejected".
    """
    began = time.perf_counter()
    if case.spec.writes_cache:
        refuse("op", "an attention op to be diagnosed", case.op)
    lab = lab or Lab()
    if output is None:
        rerun = rerun or _on_cpu(lab.output)
        try:
            output = rerun(case)
        except KernelRejected as rejection:
            return _rejected(lab, case, str(rejection))
    lab = _by_hand(lab, case)
    first = _look(lab, case, output.cpu(), catalogue)
    told = first.told
    if rerun is not None and told.is_wrong:
        probes = probe(rerun, case, output.cpu())
        told = _again(lab, case, first, rerun, catalogue)
        told = dataclasses.replace(
            told,
            unwritten=probes.unwritten.tolist(),
            unwritten_by=_TWO_RUNS if len(probes.unwritten) else "",
            by_slots=probes.by_slots.tolist(),
        )
    told = dataclasses.replace(told, tolerance=case.tolerance)
    if propose and len(told.explanations) > 1:
        one, other = told.explanations[:2]
        kinds = _kind(first.problem, one), _kind(first.problem, other)
        apart = separate(case, one.defect, other.defect, scopes=kinds)
        told = dataclasses.replace(told, separation=apart)
    return dataclasses.replace(told, seconds=time.perf_counter() - began)


def _on_cpu(run: Rerun) -> Rerun:
    """Return ``run`` with its output brought to the CPU."""
    return lambda case: run(case).cpu()


def _by_hand(lab: Lab, case: Case) -> Lab:
    """Return a Lab whose tensors lie on the CPU, where the candidates are computed."""
    return lab if lab.where(case) == "cpu" else Lab(source=lab.source, device="cpu")


def _kind(problem: Problem, candidate: Candidate) -> str:
    """Return a candidate's scope for another Case, in which its sequences are others."""
    if candidate.scope == "all":
        return "all"
    kinds = {"decode" if problem.is_decode(seq) else "prefill" for seq in candidate.seqs}
    return kinds.pop() if len(kinds) == 1 else "all"


def _rejected(lab: Lab, case: Case, text: str) -> Diagnosis:
    """Return the diagnosis of a Case that its kernel refuses: the violations say why."""
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return Diagnosis(status="rejected", rejection=text, violations=violations)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """A look at one output, and the scene that it was held against."""

    problem: Problem
    told: Diagnosis


def _look(lab: Lab, case: Case, output: torch.Tensor, catalogue: Sequence[Defect]) -> _Look:
    """Return what one output of a Case tells."""
    call = lab.call(case)
    _check_output(output, call.output)
    problem = Problem.of_case(case, lab.batch(case), call, call.output)
    violations = find_violations(call, problem.target, problem.kernels, lab.cache(case).provenance)
    found = locate(problem, output, case.query_heads, lab.reference(case))
    known = gather(problem, output, found, violations)
    return _Look(problem=problem, told=judge(known, catalogue, case.query_heads))


def _again(
    lab: Lab, case: Case, first: _Look, rerun: Rerun, catalogue: Sequence[Defect]
) -> Diagnosis:
    """Run a Case that hides its numbers behind NaN or a plain buffer again with finite garbage there.

    NaN tells a place and nothing more. Where the garbage shows, it decides; where it does not, what
    remains are the explanations that it would not show either.
    """
    empty = "garbage" if case.empty_slots == "nan" else case.empty_slots
    finite = case.replace(empty_slots=empty, output_init="recycled")
    if finite == case:
        return first.told
    second = _look(lab, finite, rerun(finite), catalogue)
    if second.told.is_wrong:
        return second.told
    hidden = [s for s in first.told.explanations if _is_hidden(second.problem, s)]
    cause = decided(hidden)
    status = "unexplained" if not hidden else "ambiguous" if cause is None else "explained"
    return dataclasses.replace(first.told, status=status, cause=cause, explanations=hidden)


def _is_hidden(problem: Problem, candidate: Candidate) -> bool:
    """Answer whether a candidate changes nothing but rounding in another scene."""
    if not candidate.defect.applies(problem):
        return True
    for row_slice in row_slices_of(problem):
        told, right = candidate.defect.compute(problem, row_slice), problem.right(row_slice)
        if bool((fit(told.output, right, 1).ratio > 1).any()):
            return False
    return True


def diagnose_call(
    call: KernelCall,
    target: Target,
    kernels: Sequence[str],
    *,
    output: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    catalogue: Sequence[Defect] = CATALOGUE,
) -> Diagnosis:
    """Return what explains the output of a call that was captured elsewhere.

    The context is taken to be in the cache as it was meant, new tokens to be the arguments. ``output``
    is the call's own where none is given; ``before`` what the buffer held, where that is known.
    """
    began = time.perf_counter()
    output = call.output if output is None else output
    _check_output(output, call.output)
    problem = dataclasses.replace(Problem.of_call(call, target, kernels), before=before)
    violations = find_violations(call, target, kernels)
    known = gather(problem, output, locate(problem, output), violations)
    told = judge(known, catalogue, None)
    return dataclasses.replace(told, seconds=time.perf_counter() - began)


def _check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall where an output is not of the call's shape or dtype."""
    for name in ("shape", "dtype"):
        told, wanted = getattr(output, name), getattr(expected, name)
        if told != wanted:
            words = [str(tuple(one)) if name == "shape" else str(one) for one in (wanted, told)]
            raise InvalidCall(f"output must have {name} {words[0]}, got {words[1]}")
