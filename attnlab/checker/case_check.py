"""Check one Case: run it, and return the faults and observations of the kernels."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed, KernelRejected
from attnlab.case.op_arguments import NONE
from attnlab.checker.case_run import CaseRun, run_case
from attnlab.checker.evidence import confirmed, evidence_fields, evidence_label
from attnlab.checker.finding import Finding
from attnlab.checker.slot_reads import never_reads_empty_slots, observations
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violations import find_violations
from attnlab.diagnosis.argument_pattern import argument_names
from attnlab.diagnosis.decision import NEVER_WRITTEN
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import find_unwritten
from attnlab.kernels.backend import Backend
from attnlab.kernels.control import controlled, rows_agree, rows_equal
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
NOT_DETERMINISTIC = "not_deterministic"
OUT_OF_BOUNDS, INT32_WRAP = "out_of_bounds", "int32_wrap"  # kinds that one run shows
_NO_OWNER = "slot without owner"
_FAR = "offset beyond 2^31 elements"
_NO_SCALES = "FP8 cache without scales"


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
    if (found := _without_scales(lab, backend, case)) is not None:
        return found
    if case.spec.writes_cache:
        return _check_cache(lab, backend, case, run)
    if case.op_argument != NONE:
        return _check_argument(lab, backend, case, run)
    diagnosis = _diagnose(lab, case, run.output)
    if diagnosis.is_wrong:
        return _stated(
            (lab, backend),
            {case: run.output},
            lambda: _wrong_output(lab, backend, case, run.output, diagnosis),
        )
    if not _gets_cache(case) or never_reads_empty_slots(run):
        return None
    garbage = case.replace(empty_slots="garbage")
    output = run_case(lab, backend, garbage).output
    of_garbage = _diagnose(lab, garbage, output)
    if not of_garbage.is_wrong and bool(rows_equal(run.output, output).all()):
        return None
    return _stated(
        (lab, backend),
        {case: run.output, garbage: output},
        lambda: (
            _leak(lab, backend, garbage, of_garbage)
            if of_garbage.is_wrong
            else _follows(case, run.output, output)
        ),
    )


def _stated(
    kernel: tuple[Lab, Backend],
    compared: Mapping[Case, torch.Tensor],
    find: Callable[[], Finding | None],
) -> Finding | None:
    """Return a finding that rests on the comparison of runs, or that equal runs differ.

    ``compared``: the outputs of the runs that were made so far, by Case; they are made again.
    """
    lab, backend = kernel
    found = None
    with controlled() as control:
        if not backend.is_deterministic:
            for case, output in compared.items():
                control.compare(output, lambda case=case: run_case(lab, backend, case).output)  # type: ignore[misc]
        found = find()
    if control.found is None:
        return found
    case = next(iter(compared))
    return _finding(case, NOT_DETERMINISTIC, control.found.text, "not deterministic")


def _follows(case: Case, output: torch.Tensor, of_garbage: torch.Tensor) -> Finding | None:
    """Return the observation that right rows change with finite numbers in empty slots, or None."""
    rows = torch.nonzero(~rows_agree(output, of_garbage)).flatten().tolist()
    if not rows:
        return None
    text = f"rows {rows[:8]} change when empty slots hold finite garbage instead of NaN"
    return _finding(case, "follows_empty_slots", text, "finite contents")


def _wrong_output(
    lab: Lab, backend: Backend, case: Case, output: torch.Tensor, diagnosis: Diagnosis
) -> Finding:
    """Return the finding of a wrong output.

    Further runs separate three causes, each by a change of one thing: rows that are never written, by other
    contents of the output buffer; a leak of empty slots into the output, by zeros in them; and a wrong
    computation, which is wrong with zeros, too.
    """
    zeros = case.replace(empty_slots="zeros", output_init="zeros")
    layout = _layout_at_fault(lab, backend, zeros)
    rows = [] if layout else _unwritten_rows(lab, backend, case, output)
    if rows:
        text = f"rows {rows[:8]} keep the initial values of the output buffer"
        return _finding(case, "rows_not_written", text, NEVER_WRITTEN)
    if case.empty_slots != "zeros" and _is_correct(lab, backend, case.replace(empty_slots="zeros")):
        return _leak(lab, backend, case, diagnosis)
    output_of_zeros = run_case(lab, backend, zeros).output
    diagnosis_of_zeros = confirmed(lab, backend, zeros, _diagnose(lab, zeros, output_of_zeros))
    if not diagnosis_of_zeros.is_wrong:
        text = f"{diagnosis.evidence}; right with zeros in the output buffer"
        return _finding(case, "wrong_output", text, "contents of the output buffer")
    text = diagnosis_of_zeros.evidence
    if case.alibi and case.sliding_window and _is_correct(lab, backend, zeros.replace(alibi=False)):
        text = f"{text}; correct without ALiBi"
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


def _unwritten_rows(lab: Lab, backend: Backend, case: Case, output: torch.Tensor) -> list[int]:
    """Return the wrong rows that keep the contents of the output buffer, whatever they are."""
    unwritten = find_unwritten(lambda one: run_case(lab, backend, one).output, case, output)
    if not len(unwritten):
        return []
    wrong = examine(lab, case, output, (), Pattern()).evidence.locations.is_wrong.any(1)
    return [int(row) for row in unwritten[wrong[unwritten]]]


def _without_scales(lab: Lab, backend: Backend, case: Case) -> Finding | None:
    """Return the finding of an op that accepts an FP8 cache without its scales, or None.

    No output that does not depend on the scales can be right with two different ones.
    """
    missing = backend.missing_scales(case)
    if not missing or case.k_scale == case.v_scale == 1:
        return None
    zeros = case.replace(empty_slots="zeros")
    if not _output_errors(lab, zeros, run_case(lab, backend, zeros).output).mismatched:
        return None
    text = f"the op accepts an FP8 cache and has no argument {' and no '.join(missing)}"
    return _finding(zeros, "wrong_output", text, _NO_SCALES)


def _layout_at_fault(lab: Lab, backend: Backend, case: Case) -> str:
    """Return the diagnosis of the layout field whose plain value makes the output correct, else ""."""
    for field, plain, diagnosis in _LAYOUTS:
        if getattr(case, field) != plain and _is_correct(
            lab, backend, case.replace(**{field: plain})
        ):
            return diagnosis
    strided = case.argument.strided
    if strided is not None and _is_correct(lab, backend, case.replace(op_argument=strided)):
        return f"{_LAYOUTS[0][2]}: {case.op_argument}"
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
        if errors.mismatched:
            return _stated(
                (lab, backend),
                {case: output},
                functools.partial(_argument_fault, lab, backend, case, errors),
            )
    return None


def _argument_fault(lab: Lab, backend: Backend, case: Case, errors: ErrorMap) -> Finding:
    """Return the fault of a wrong output of a Case with an op argument."""
    zeros = case.replace(empty_slots="zeros")
    of_zeros = run_case(lab, backend, zeros).output
    is_leak = not _output_errors(lab, zeros, of_zeros).mismatched
    if not is_leak and (wrong := _wrong_without_argument(lab, backend, zeros)) is not None:
        return wrong
    place = errors.places()[0]
    text = (
        f"{errors.mismatched} elements differ, first in sequence {place.seq}, token {place.token}"
    )
    label = _FAR if case.argument.is_far else f"op_argument {case.op_argument}"
    if is_leak:
        return _leak_with_argument(lab, backend, case, text, label)
    may_lack_alibi = case.alibi and "alibi" not in case.argument.needs
    if may_lack_alibi and _is_correct(lab, backend, zeros.replace(alibi=False)):
        label = f"{label} with ALiBi"
    reads = argument_names(lab, zeros, of_zeros)
    return _finding(zeros, "wrong_output", text, ": ".join((label, *reads[:1])))


def _leak_with_argument(lab: Lab, backend: Backend, case: Case, text: str, label: str) -> Finding:
    """Return the finding of an output with an op argument that depends on slots that it must not read."""
    if case.freed != "kept" and _is_correct(lab, backend, case.replace(freed="kept")):
        return _finding(case, "reads_freed_blocks", text, f"{case.freed} blocks")
    if not _is_correct(lab, backend, case.replace(op_argument=NONE)):
        text, label = "without the op argument, too", "empty slots"
    return _finding(case, "reads_unwritten_slots", text, label)


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
    if case.spec.writes_cache or case.op_argument != NONE:
        return not _output_errors(lab, case, run.output).mismatched
    return not _diagnose(lab, case, run.output).is_wrong


def _diagnose(lab: Lab, case: Case, output: torch.Tensor) -> Diagnosis:
    """Diagnose an output without a search for a distinguishing case."""
    return diagnose(case, output, lab=lab, propose=False)


def _finding(case: Case, kind: str, evidence: str, diagnosis: str) -> Finding:
    return Finding(op=case.op, kind=kind, case=case, evidence=evidence, diagnosis=diagnosis)
