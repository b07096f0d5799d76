"""diagnose and diagnose_call: find the defect that explains an output. The package describes the method."""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall, KernelRejected
from attnlab.case.fields import refuse
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violations import find_violations
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slices import sample_rows
from attnlab.diagnosis.candidates import Candidate, fit
from attnlab.diagnosis.decision import collect_evidence, conclude, select_cause, status_of
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.distinction import Distinction, find_distinction
from attnlab.diagnosis.error_location import locate
from attnlab.diagnosis.reruns import Rerun, find_dependence
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall


def diagnose(
    case: Case,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    rerun: Rerun | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
    propose: bool = True,
) -> Diagnosis:
    """Diagnose an output of the Case.

    - ``output``: [num_tokens, num_heads, head_size] of any backend; None runs the Case in the lab.
    - ``rerun``: runs a changed Case on the backend that produced ``output``. It finds unwritten rows and
      rows that read unwritten slots. It is the lab if ``output`` is None; otherwise None reruns nothing.
    - ``defects``: the candidates.
    - ``propose``: if the output is ambiguous, search for a Case that distinguishes the first two
      explanations.

    Raises InvalidCall if ``output`` has another shape or dtype than the Case's output, InvalidCase for a
    cache write. If the kernel raises for the Case, the status is "rejected".
    """
    began = time.perf_counter()
    if case.spec.writes_cache:
        refuse("op", "an attention op to be diagnosed", case.op)
    defects = tuple(defects)
    lab = lab or Lab()
    if output is None:
        rerun = rerun or _on_cpu(lab.output)
        try:
            output = rerun(case)
        except KernelRejected as rejection:
            return _rejected(lab, case, str(rejection))
    output, lab = output.cpu(), _cpu_lab(lab, case)
    examination = _examine(lab, case, output, defects)
    diagnosis = examination.diagnosis
    if rerun is not None and diagnosis.is_wrong:
        diagnosis = _with_reruns(lab, case, output, examination, rerun, defects)
    distinction = None
    if propose and diagnosis.status == "ambiguous":
        distinction = _distinguish(case, examination.problem, diagnosis)
    return dataclasses.replace(
        diagnosis,
        tolerance=case.tolerance,
        distinction=distinction,
        seconds=time.perf_counter() - began,
    )


def diagnose_call(
    call: KernelCall,
    target: Target,
    kernels: Iterable[str],
    *,
    output: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
) -> Diagnosis:
    """Diagnose the output of a call without a Case, such as a captured one.

    The context is assumed to be correct in the cache, and new tokens to be the arguments ``key`` and
    ``value``. ``output`` defaults to the call's own; ``before`` is the output buffer before the call, or
    None if unknown. Raises InvalidCall if ``output`` has another shape or dtype than the call's.
    """
    began = time.perf_counter()
    output = call.output if output is None else output
    _check_output(output, call.output)
    kernels = tuple(kernels)
    problem = dataclasses.replace(Problem.of_call(call, target, kernels), before=before)
    violations = find_violations(call, target, kernels)
    evidence = collect_evidence(problem, output, locate(problem, output), violations)
    diagnosis = conclude(evidence, defects)
    return dataclasses.replace(diagnosis, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Examination:
    """A diagnosis and the problem that it belongs to."""

    problem: Problem
    diagnosis: Diagnosis


def _examine(lab: Lab, case: Case, output: torch.Tensor, defects: Iterable[Defect]) -> _Examination:
    """Diagnose one output of a Case without running anything."""
    call = lab.call(case)
    _check_output(output, call.output)
    problem = Problem.of_case(case, lab.batch(case), call, call.output)
    violations = find_violations(call, problem.target, problem.kernels, lab.cache(case).provenance)
    locations = locate(problem, output, case.query_heads, lab.reference(case))
    evidence = collect_evidence(problem, output, locations, violations, case.query_heads)
    return _Examination(problem=problem, diagnosis=conclude(evidence, defects))


def _with_reruns(
    lab: Lab,
    case: Case,
    output: torch.Tensor,
    first: _Examination,
    rerun: Rerun,
    defects: Iterable[Defect],
) -> Diagnosis:
    """Return the first diagnosis, refined by what reruns show."""
    diagnosis = _with_finite_contents(lab, case, first, rerun, defects)  # its cache is reused below
    dependence = find_dependence(rerun, case, output)
    return dataclasses.replace(
        diagnosis,
        pattern=first.diagnosis.pattern,
        unwritten=dependence.unwritten.tolist(),
        unwritten_by="reruns" if len(dependence.unwritten) else "",
        slot_dependent=dependence.on_slots.tolist(),
    )


def _with_finite_contents(
    lab: Lab, case: Case, first: _Examination, rerun: Rerun, defects: Iterable[Defect]
) -> Diagnosis:
    """Run the Case with finite garbage in unwritten slots and rows, and diagnose that output.

    NaN shows where unwritten memory is used, but not how; finite garbage also has values. If the output
    with garbage is correct, the remaining explanations are those that garbage does not show.
    """
    empty_slots = "garbage" if case.empty_slots == "nan" else case.empty_slots
    finite = case.replace(empty_slots=empty_slots, output_init="recycled")
    if finite == case:
        return first.diagnosis
    second = _examine(lab, finite, rerun(finite), defects)
    if second.diagnosis.is_wrong:
        return second.diagnosis
    explanations = [
        candidate
        for candidate in first.diagnosis.explanations
        if _is_hidden(second.problem, candidate.defect)
    ]
    cause = select_cause(explanations)
    return dataclasses.replace(
        first.diagnosis,
        status=status_of(cause, explanations, first.diagnosis.pattern),
        cause=cause,
        explanations=explanations,
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


def _distinguish(case: Case, problem: Problem, diagnosis: Diagnosis) -> Distinction:
    """Search for a Case that distinguishes the first two explanations."""
    first, second = diagnosis.explanations[:2]
    rows = _rows_of(problem, first), _rows_of(problem, second)
    return find_distinction(case, first.defect, second.defect, rows=rows)


def _rows_of(problem: Problem, candidate: Candidate) -> str:
    """Return a candidate's scope as "all", "decode" or "prefill", which other Cases have too."""
    if candidate.scope is None or candidate.scope.rows == "all":
        return "all"
    is_decode = {problem.is_decode(seq) for seq in candidate.scope.sequences}
    if len(is_decode) > 1:
        return "all"
    return "decode" if is_decode == {True} else "prefill"


def _on_cpu(run: Rerun) -> Rerun:
    """Return ``run`` with its output copied to the CPU."""
    return lambda case: run(case).cpu()


def _cpu_lab(lab: Lab, case: Case) -> Lab:
    """Return a Lab with its tensors on the CPU, where candidates are computed."""
    return lab if lab.where(case) == "cpu" else Lab(source=lab.source, device="cpu")


def _rejected(lab: Lab, case: Case, rejection: str) -> Diagnosis:
    """Return the diagnosis of a Case that its kernel rejects, with the violations that explain it."""
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return Diagnosis(status="rejected", rejection=rejection, violations=violations)


def _check_output(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise InvalidCall if an output has another shape or dtype than the call's."""
    if output.shape != expected.shape:
        raise InvalidCall(
            f"output must have shape {tuple(expected.shape)}, got {tuple(output.shape)}"
        )
    if output.dtype != expected.dtype:
        raise InvalidCall(f"output must have dtype {expected.dtype}, got {output.dtype}")
