"""Check one Case: run it, and return the faults and observations of the kernels."""

import dataclasses
import re
from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed, KernelRejected
from attnlab.case.op_arguments import NONE
from attnlab.checker.case_run import CaseRun, run_case
from attnlab.checker.evidence import evidence_fields, evidence_label
from attnlab.checker.finding import Finding
from attnlab.checker.slot_reads import never_reads_empty_slots, observations
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violations import find_violations
from attnlab.diagnosis.argument_pattern import argument_names
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.reruns import rows_equal
from attnlab.kernels.backend import Backend
from attnlab.lab.error_map import ErrorMap
from attnlab.lab.lab import Lab
from attnlab.lab.side_outputs import LSE, PADDING

# Fields of the memory layout: the plain value, and the diagnosis if the plain value gives a correct result.
_LAYOUTS = (
    ("kv_layout", "contiguous", "strides ignored"),
    ("pad_batch", 0, "padding not left out"),
)
# The kind and the diagnosis of a wrong side output.
_SIDE_FINDINGS = {
    LSE: ("wrong_lse", "logarithm of the sum"),
    PADDING: ("wrong_output", "both parts empty"),
}
OUT_OF_BOUNDS, INT32_WRAP = "out_of_bounds", "int32_wrap"  # kinds that one run shows
_NO_OWNER = "slot without owner"
_FAR = "offset beyond 2^31 elements"


def check_case(
    lab: Lab,
    backend: Backend,
    case: Case,
    on_run: Callable[[Case, CaseRun], None] = lambda case, run: None,
) -> list[Finding]:
    """Return the faults and observations of a Case.

    The Case runs with NaN in the empty slots and, if that output is correct, once more with finite
    garbage in them; both outputs must have the same bits. The second run is left out if the first one was
    traced and read no empty slot, or if the op gets no cache. ``on_run`` is called with the first run.
    Raises Unavailable if the backend does not have the op.
    """
    try:
        run = run_case(lab, backend, case, trace_reads=True)
    except (KernelRejected, KernelFailed) as error:
        return [_finding(case, "fails", str(error), re.sub(r"\d+", "#", str(error))[:60])]
    on_run(case, run)
    findings = [*observations(case, run.memory), *wrong_accesses(case, run)]
    wrong = _check_output(lab, backend, case, run)
    return [*findings, *([wrong] if wrong is not None else _check_side_outputs(lab, case, run))]


def wrong_accesses(case: Case, run: CaseRun) -> list[Finding]:
    """Return the out-of-bounds access and the int32 overflow of a run, if there are."""
    found = []
    if run.outside:
        source_line = run.outside[0].split()[0]
        found.append(_finding(case, OUT_OF_BOUNDS, run.outside[0], source_line))
    if run.wraps:
        found.append(_finding(case, INT32_WRAP, run.wraps[0], INT32_WRAP))
    return found


def is_callers_fault(lab: Lab, case: Case) -> bool:
    """Return whether the Case's call violates a contract, so that a wrong result is the caller's fault.

    A default scale computed from the number of heads does not count: the op chooses it.
    """
    provenance = lab.cache(case).provenance
    violations = find_violations(lab.call(case), Target.of(case), decide(case).kernels, provenance)
    return any(v.effect != "harmless" and v.kind != "default_scale" for v in violations)


def _check_side_outputs(lab: Lab, case: Case, run: CaseRun) -> list[Finding]:
    """Return the faults of the log-sum-exp and of the rows that pad a batch."""
    return [
        _finding(case, kind, error.text(), diagnosis)
        for error in lab.side_errors(case, run.lse, run.padded)
        for kind, diagnosis in (_SIDE_FINDINGS[error.subject],)
    ]


def _check_output(lab: Lab, backend: Backend, case: Case, run: CaseRun) -> Finding | None:
    """Return the fault of the output, else the observation that it follows empty slots, else None."""
    if case.spec.writes_cache:
        return _check_cache(lab, backend, case, run)
    if case.op_argument != NONE:
        return _check_argument(lab, backend, case, run)
    diagnosis = _diagnose(lab, case, run.output)
    if diagnosis.is_wrong:
        return _wrong_output(lab, backend, case, run.output, diagnosis)
    if not _gets_cache(case) or never_reads_empty_slots(run):
        return None
    garbage = case.replace(empty_slots="garbage")
    output = run_case(lab, backend, garbage).output
    diagnosis = _diagnose(lab, garbage, output)
    if diagnosis.is_wrong:
        return _leak(lab, backend, garbage, diagnosis)
    rows = torch.nonzero(~rows_equal(run.output, output)).flatten().tolist()
    if not rows:
        return None
    text = f"rows {rows[:8]} change when empty slots hold finite garbage instead of NaN"
    return _finding(case, "follows_empty_slots", text, "finite contents")


def _wrong_output(
    lab: Lab, backend: Backend, case: Case, output: torch.Tensor, diagnosis: Diagnosis
) -> Finding:
    """Return the finding of a wrong output.

    A second run, with zeros in the empty slots and in the output buffer, separates three causes: rows
    that are never written, a wrong computation, and a leak of empty slots into the output.
    """
    zeros = case.replace(empty_slots="zeros", output_init="zeros")
    output_of_zeros = run_case(lab, backend, zeros).output
    layout = _layout_at_fault(lab, backend, zeros)
    unwritten = (output.isnan() & (output_of_zeros == 0)).flatten(1).all(1)
    rows = torch.nonzero(unwritten).flatten()
    if not layout and len(rows) and not (lab.reference(zeros)[rows] == 0).all():
        text = f"rows {rows[:8].tolist()} keep the initial values of the output buffer"
        return _finding(case, "rows_not_written", text, _name(diagnosis))
    diagnosis_of_zeros = _diagnose(lab, zeros, output_of_zeros)
    if not diagnosis_of_zeros.is_wrong:
        return _leak(lab, backend, case, diagnosis)
    text = diagnosis_of_zeros.evidence
    if case.first_block and _is_correct(lab, backend, case.replace(first_block=0, num_blocks=None)):
        text = f"{text}; correct with small block numbers"
        return _finding(zeros, "wrong_output", text, f"block {_FAR}")
    label = layout or evidence_label(lab, backend, zeros, output_of_zeros, diagnosis_of_zeros)
    found = _finding(zeros, "wrong_output", text, label)
    return (
        found
        if layout
        else dataclasses.replace(
            found, **evidence_fields(lab, zeros, output_of_zeros, diagnosis_of_zeros, label)
        )
    )


def _layout_at_fault(lab: Lab, backend: Backend, case: Case) -> str:
    """Return the diagnosis of the layout field whose plain value makes the output correct, else ""."""
    for field, plain, diagnosis in _LAYOUTS:
        if getattr(case, field) != plain and _is_correct(
            lab, backend, case.replace(**{field: plain})
        ):
            return diagnosis
    return ""


def _leak(lab: Lab, backend: Backend, case: Case, diagnosis: Diagnosis) -> Finding:
    """Return the finding of an output that depends on slots that it must not read.

    These are the blocks that the window has freed, if the output is correct when they are kept; else
    they are unwritten slots.
    """
    text = diagnosis.evidence
    if case.freed != "kept" and _is_correct(lab, backend, case.replace(freed="kept")):
        text = f"{text}; correct when these blocks keep their contents"
        return _finding(case, "reads_freed_blocks", text, f"{case.freed} blocks")
    return _finding(case, "reads_unwritten_slots", text, "empty slots")


def _check_cache(lab: Lab, backend: Backend, case: Case, run: CaseRun) -> Finding | None:
    """Return the fault of a cache write, or None."""
    errors = _cache_errors(lab, case, run)
    if not errors.mismatched:
        return None
    place = errors.places()[0]
    has_owner = place.seq < len(case.lengths.query_lens)
    where = f"sequence {place.seq}, position {place.token}" if has_owner else f"a {_NO_OWNER}"
    text = f"{errors.mismatched} elements differ, first in {where}"
    layout = _layout_at_fault(lab, backend, case)
    return _finding(case, "wrong_bytes", text, layout or ("own slot" if has_owner else _NO_OWNER))


def _cache_errors(lab: Lab, case: Case, run: CaseRun) -> ErrorMap:
    """Return the errors of the cache that a run wrote."""
    return _output_errors(lab, case, run.output)


def _gets_cache(case: Case) -> bool:
    """Answer whether the op of a Case gets a cache, so that its result may depend on empty slots."""
    return case.spec.cache_layout is not None


def _check_argument(lab: Lab, backend: Backend, case: Case, run: CaseRun) -> Finding | None:
    """Return the fault of an output of a Case with an op argument, or None.

    It is diagnosed only if the output is also wrong without the argument.
    """
    contents = (case.empty_slots, "garbage") if _gets_cache(case) else (case.empty_slots,)
    for empty_slots in contents:
        case = case.replace(empty_slots=empty_slots)
        output = run.output if empty_slots == "nan" else run_case(lab, backend, case).output
        errors = _output_errors(lab, case, output)
        if not errors.mismatched:
            continue
        zeros = case.replace(empty_slots="zeros")
        of_zeros = run_case(lab, backend, zeros).output
        is_leak = not _output_errors(lab, zeros, of_zeros).mismatched
        if is_leak and not _is_correct(lab, backend, case.replace(op_argument=NONE)):
            return _finding(
                case, "reads_unwritten_slots", "without the op argument, too", "empty slots"
            )
        if not is_leak and (wrong := _wrong_without_argument(lab, backend, zeros)) is not None:
            return wrong
        kind = "reads_unwritten_slots" if is_leak else "wrong_output"
        place = errors.places()[0]
        text = f"{errors.mismatched} elements differ, first in sequence {place.seq}, token {place.token}"
        label = _FAR if case.argument.is_far else f"op_argument {case.op_argument}"
        if is_leak:
            return _finding(case, kind, text, label)
        reads = argument_names(lab, zeros, of_zeros)
        return _finding(zeros, kind, text, ": ".join((label, *reads[:1])))
    return None


def _wrong_without_argument(lab: Lab, backend: Backend, case: Case) -> Finding | None:
    """Return the fault of the output of a Case without its op argument, or None."""
    plain = case.replace(op_argument=NONE)
    output = run_case(lab, backend, plain).output
    diagnosis = _diagnose(lab, plain, output)
    return _wrong_output(lab, backend, plain, output, diagnosis) if diagnosis.is_wrong else None


def _output_errors(lab: Lab, case: Case, output: torch.Tensor) -> ErrorMap:
    """Return the errors of an output."""
    call = lab.call(case)
    call.buffer.copy_(output)
    return lab.errors(case, call, lab.reference(case))


def _is_correct(lab: Lab, backend: Backend, case: Case) -> bool:
    """Run a Case and return whether its output is correct up to rounding."""
    run = run_case(lab, backend, case)
    if case.spec.writes_cache:
        return not _cache_errors(lab, case, run).mismatched
    return not _diagnose(lab, case, run.output).is_wrong


def _diagnose(lab: Lab, case: Case, output: torch.Tensor) -> Diagnosis:
    """Diagnose an output without a search for a distinguishing case."""
    return diagnose(case, output, lab=lab, propose=False)


def _name(diagnosis: Diagnosis) -> str:
    """Return the name of the cause, or the status if no cause was found."""
    return diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status


def _finding(case: Case, kind: str, evidence: str, diagnosis: str) -> Finding:
    return Finding(op=case.op, kind=kind, case=case, evidence=evidence, diagnosis=diagnosis)
