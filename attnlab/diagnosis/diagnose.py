"""diagnose and diagnose_call: find the defect that explains an output. The package describes the method."""

import contextlib
import dataclasses
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.fields import refuse
from attnlab.case.op_arguments import NONE
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import Violations, find_violations
from attnlab.defects import DEFECTS, Defect
from attnlab.defects.reads import argument_defects
from attnlab.diagnosis.access_check import (
    with_accesses,
    with_bad_lines,
    with_outside_reads,
    without_unfounded_rule,
)
from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.cells import ErrorLocations, locate
from attnlab.diagnosis.claims import KernelLocation
from attnlab.diagnosis.confirmation import with_features
from attnlab.diagnosis.decision import (
    check_output,
    collect_evidence,
    conclude,
    examine,
    with_run_faults,
    without_guess,
)
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.distinction import Distinction, find_distinction
from attnlab.diagnosis.location.lines import locate_lines
from attnlab.diagnosis.location.repair_check import with_repair
from attnlab.diagnosis.location.trials import FULL, Limit
from attnlab.diagnosis.refinement import Kernel, kernel_of, with_reruns
from attnlab.diagnosis.reruns import Rerun, keeping
from attnlab.diagnosis.side_claim import confirmed_side_claims, side_claims
from attnlab.kernels.control import Control, controlled, repeated, rows_equal
from attnlab.kernels.triton.run_log import limiting_reruns
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem
from attnlab.lab.result import Result
from attnlab.tensors.call import KernelCall
from attnlab.tensors.comparison import same_numbers
from attnlab.tensors.quantised import output_numbers

_MOST_ANNOUNCED = 320  # characters of what is announced
# Processor time of a further run of a kernel, at least, and in units of that of the first run.
_LEAST_RERUN_S, _RERUN_SLACK = 20.0, 20.0


def diagnose(
    case: Case,
    output: torch.Tensor | None = None,
    *,
    lab: Lab | None = None,
    rerun: Rerun | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
    propose: bool = True,
    limit: Limit | None = FULL,
) -> Diagnosis:
    """Diagnose an output of the Case.

    - ``output``: [num_tokens, num_heads, head_size] of any backend; None runs the Case in the lab.
    - ``rerun``: runs a changed Case on the backend that produced ``output``. It finds unwritten rows and
      rows that read unwritten slots. It is the lab if ``output`` is None; otherwise None reruns nothing.
    - ``defects``: the candidates.
    - ``propose``: if the output is ambiguous, search for a Case that distinguishes the first two
      explanations.
    - ``limit``: of the search for the source lines of a fault, if ``output`` is None; None does not search.

    Raises InvalidCall if ``output`` has another shape or dtype than the Case's output, InvalidCase for a
    cache write. If the kernel raises for the Case, the status is "rejected".
    """
    began = time.perf_counter()
    if case.spec.writes_cache:
        refuse("op", "an attention op to be diagnosed", case.op)
    defects, lab = (*defects, *argument_defects(case)), lab or Lab()
    ran, kernel = None, None if rerun is None else Kernel(run=repeated(rerun))
    started, rerun_s = time.process_time(), math.inf
    if output is None:
        ran = lab.run(case)
        rerun_s = max(_LEAST_RERUN_S, _RERUN_SLACK * (time.process_time() - started))
        if ran.status == "rejected":
            return _rejected(lab, case, str(ran.error))
        output, kernel = ran.output, kernel or kernel_of(lab, case)
    flags = lab.backend(case).flags
    own, output, lab = lab, output.cpu(), _cpu_lab(lab, case)
    examination = examine(lab, case, output, defects)
    diagnosis = examination.diagnosis
    diagnose_in = partial(diagnose, lab=own, defects=defects, propose=propose, limit=limit)
    plain = _without_argument(case, diagnosis, None if ran is None else diagnose_in)
    if plain is not None:
        return plain
    with (
        controlled() as control,
        limiting_reruns(rerun_s),
        keeping(own.backend(case).fixed_fields),
        announcing(own) as announce,
    ):
        announce(_measured(diagnosis))
        if kernel is not None:
            kernel.check_repeats(control, case, output, diagnosis)
        if ran is not None:
            diagnosis = with_outside_reads(lab, case, diagnosis, ran, own.run)
        outside_rows = diagnosis.outside_rows
        if kernel is not None and diagnosis.is_wrong and not diagnosis.bad_lines:
            diagnosis = with_reruns(lab, case, output, examination, kernel, defects)
        if ran is not None:
            diagnosis = dataclasses.replace(diagnosis, outside_rows=outside_rows)
            diagnosis = _with_runs(lab, own, case, ran, diagnosis, limit, announce)
    diagnosis = if_stable(diagnosis, examination.diagnosis, control)
    distinction = _distinguish(case, examination.problem, diagnosis, flags) if propose else None
    return dataclasses.replace(
        diagnosis,
        tolerance=case.tolerance,
        distinction=distinction,
        seconds=time.perf_counter() - began,
    )


def _measured(diagnosis: Diagnosis) -> str:
    """Return what was measured of a wrong output, or "": no name, which further cases may withdraw."""
    found = [*diagnosis.place_sentences()[:1], *diagnosis.pattern.sentences()]
    return "; ".join(found) if diagnosis.is_wrong else ""


def _confirmed(diagnosis: Diagnosis) -> str:
    """Return the conclusion, if further cases have confirmed one, else what was measured."""
    is_known = diagnosis.status in ("explained", "described")
    return diagnosis.conclusion if is_known else _measured(diagnosis)


@contextlib.contextmanager
def announcing(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Yield a function that puts what is known so far in a line above each step that the lab announces."""
    outer = lab.on_step

    def announce(known: str) -> None:
        if outer is not None and known:
            text = textwrap.shorten(f"so far: {known}", _MOST_ANNOUNCED, placeholder=" …")
            lab.on_step = lambda step=None, *rest, **named: outer(
                f"{text}\n{step}", *rest, **named
            )
            lab.on_step("further runs")

    try:
        yield announce
    finally:
        lab.on_step = outer


def _with_runs(
    lab: Lab,
    own: Lab,
    case: Case,
    ran: Result,
    diagnosis: Diagnosis,
    limit: Limit | None,
    announce: Callable[[str], None],
) -> Diagnosis:
    """Return the diagnosis with what the run and further runs show; ``own`` runs the kernels."""
    diagnosis = without_unfounded_rule(diagnosis)
    diagnosis = with_run_faults(diagnosis, ran.wraps, ran.outside)
    announce(_confirmed(diagnosis))
    diagnosis = with_accesses(lab, case, diagnosis, own.run)
    diagnosis = with_bad_lines(lab, case, diagnosis, own.run)
    diagnosis = _with_side_outputs(lab, own, case, ran, diagnosis)
    announce(_confirmed(diagnosis))
    return _with_location(own, case, diagnosis, limit)


def if_stable(diagnosis: Diagnosis, first: Diagnosis, control: Control) -> Diagnosis:
    """Return a diagnosis by runs, unless equal runs differ; then what ``first`` says of one output.

    Defects may explain that output by chance, and rows that equal the buffer or depend on slots were compared
    with runs that differ anyway.
    """
    if control.found is None:
        return diagnosis
    return dataclasses.replace(
        first,
        status="described",
        instability=control.found,
        cause=None,
        explanations=[],
        unwritten=[],
        unwritten_by="",
    )


def _without_argument(
    case: Case, found: Diagnosis, diagnose_in: Callable[[Case], Diagnosis] | None
) -> Diagnosis | None:
    """Return the diagnosis of a Case without its op argument, with a note, if that is wrong, too."""
    if case.op_argument == NONE or not found.is_wrong or diagnose_in is None:
        return None
    plain = diagnose_in(case.replace(op_argument=NONE))
    if not plain.is_wrong:
        return None
    what = (
        f"what op_argument {case.op_argument} adds: this is about the output without it, wrong, too"
    )
    return dataclasses.replace(plain, unknown=[*plain.unknown, what])


def diagnose_call(
    call: KernelCall,
    target: Target,
    kernels: Iterable[str],
    *,
    output: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    defects: Iterable[Defect] = DEFECTS.values(),
    unknown: Iterable[str] = (),
) -> Diagnosis:
    """Diagnose the output of a call without a Case, such as a captured one.

    The context is assumed to be correct in the cache, and new tokens to be the arguments ``key`` and
    ``value`` if the call has them. ``output`` defaults to the call's own; ``before`` is the output buffer
    before the call, by default the call's own. ``unknown``: what cannot be concluded, for the diagnosis.
    Raises InvalidCall if ``output`` has another shape or dtype than the call's.
    """
    began = time.perf_counter()
    call = call.cpu()
    before = call.before if before is None else before
    output = call.buffer if output is None else output.cpu()
    if call.output is None:
        call = dataclasses.replace(call, output=output)
    check_output(output, call.buffer)
    kernels = tuple(kernels)
    problem = Problem.of_call(call, target, kernels)
    numbers = output_numbers(call, output)
    locations = locate(problem, numbers)
    if before is not None and not _holds_results(before, output, locations):
        problem = dataclasses.replace(problem, before=output_numbers(call, before))
    violations = Violations() if call.is_foreign else find_violations(call, target, kernels)
    evidence = collect_evidence(problem, numbers, locations, violations)
    diagnosis = without_guess(conclude(evidence, defects))
    seconds = time.perf_counter() - began
    return dataclasses.replace(diagnosis, unknown=list(unknown), seconds=seconds)


def _holds_results(before: torch.Tensor, output: torch.Tensor, locations: ErrorLocations) -> bool:
    """Answer whether a buffer had results of the call before it: a right row, or the whole output.

    An earlier call with the same inputs wrote them, in this buffer or in memory that it recycles, or all is
    NaN: unwritten rows cannot be recognised by such a buffer.
    """
    is_right = ~locations.is_wrong.any(1) & (output.float() != 0).flatten(1).any(1)
    if bool((rows_equal(before, output) & is_right).any()):
        return True
    if output.element_size() == 1:
        return torch.equal(before.view(torch.uint8), output.view(torch.uint8))
    return bool(same_numbers(before, output).all())


def _with_location(lab: Lab, case: Case, diagnosis: Diagnosis, limit: Limit | None) -> Diagnosis:
    """Return the diagnosis with the source lines that may hold the fault, and an edit that repairs it.

    If nothing describes the fault, the features that it needs are stated. Models have no source, and a wrong
    call is no fault of the kernel.
    """
    is_callers = any(violation.effect != "harmless" for violation in diagnosis.violations)
    is_wrong = diagnosis.wrong_rows or diagnosis.side_errors
    if limit is None or not is_wrong or is_callers or case.backend == "model":
        return diagnosis
    if lab.on_step is not None:
        lab.on_step("trial edits of the source")
    try:
        location = locate_lines(lab, case, diagnosis.xray, limit)
    except AttnLabError as error:
        location = KernelLocation(why_none=f"the kernels cannot be traced: {error}")
    diagnosis = dataclasses.replace(diagnosis, location=location)
    return with_features(lab, case, with_repair(lab, case, diagnosis, location.repairs))


def _distinguish(
    case: Case, problem: Problem, diagnosis: Diagnosis, flags: tuple[str, ...]
) -> Distinction | None:
    """Search for a Case that distinguishes the first two of several explanations."""
    if len(diagnosis.explanations) < 2 or diagnosis.cause is not None:
        return None
    first, second = diagnosis.explanations[:2]
    rows = _rows_of(problem, first), _rows_of(problem, second)
    found = find_distinction(case, first.defect, second.defect, rows=rows)
    return dataclasses.replace(found, flags=flags)


def _rows_of(problem: Problem, candidate: Candidate) -> str:
    """Return a candidate's scope as "all", "decode" or "prefill", which other Cases have too."""
    if candidate.scope is None or candidate.scope.rows == "all":
        return "all"
    is_decode = {problem.is_decode(seq) for seq in candidate.scope.sequences}
    if len(is_decode) > 1:
        return "all"
    return "decode" if is_decode == {True} else "prefill"


def _with_side_outputs(
    lab: Lab, own: Lab, case: Case, ran: Result, diagnosis: Diagnosis
) -> Diagnosis:
    """Return the diagnosis with wrong log-sum-exps and rows of padding.

    If the output is right, they are what is described. ``lab`` is on the CPU, ``own`` runs the kernels.
    """
    claims = side_claims(lab, case, ran)
    if not claims:
        return diagnosis
    if diagnosis.is_wrong:
        return dataclasses.replace(diagnosis, side_errors=claims)
    confirmed = confirmed_side_claims(lab, case, claims, own.run)
    status = "described" if confirmed else "unexplained"
    return dataclasses.replace(
        diagnosis, status=status, side_errors=confirmed or claims, looked_at=(0, len(ran.output))
    )


def _cpu_lab(lab: Lab, case: Case) -> Lab:
    """Return a Lab with its tensors on the CPU, where candidates are computed."""
    if lab.where(case) == "cpu":
        return lab
    native = lab.is_native_run(case)
    return dataclasses.replace(lab, device="cpu", is_native=native, on_step=None)


def _rejected(lab: Lab, case: Case, rejection: str) -> Diagnosis:
    """Return the diagnosis of a Case that its kernel rejects, with the violations that explain it."""
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return Diagnosis(status="rejected", rejection=rejection, violations=violations)
