"""Check one Case: run it, and return the faults and observations of the kernels."""

import ast
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from attnlab.case.case import Case
from attnlab.case.errors import (
    AttnLabError,
    DeviceLost,
    InvalidCase,
    KernelFailed,
    KernelRejected,
    OutOfMemory,
    Unavailable,
    Unsupported,
)
from attnlab.case.fields import runs_triton
from attnlab.case.masks import CAUSAL, DATA_OF_LENGTHS, MASK_DATA
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import DECODE_FWD, OPS, PREFILL, WRAPPER
from attnlab.case.shown import json_value
from attnlab.checker.case_run import (
    OBSERVED,
    CaseRun,
    allowed_reads,
    confirmed,
    evidence_fields,
    evidence_label,
    kernels_of,
    lab_of,
    never_reads_empty_slots,
    observations,
    read_counts,
    release_memory,
    remembering,
    run_case,
    sharing_runs,
    source_digest,
    versions,
)
from attnlab.checker.coverage import relative_points
from attnlab.checker.finding import BEYOND, HORIZON, UNNAMED, Finding
from attnlab.contracts.contract import Target
from attnlab.defects.masks import MASK_IGNORED
from attnlab.defects.reads import argument_defects
from attnlab.diagnosis.decision import NEVER_WRITTEN, examine
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import PLAIN_VALUES, find_unwritten, keeping
from attnlab.diagnosis.written_cache import diagnose_write
from attnlab.horizon.deployment import PRESETS, Deployment
from attnlab.horizon.survey import Row, Survey, survey
from attnlab.kernels.backend import Backend
from attnlab.kernels.binding import scratch_full_of
from attnlab.kernels.control import controlled, rows_agree, rows_equal
from attnlab.kernels.triton.coverage import measuring
from attnlab.kernels.vllm.features import unchanged_sources
from attnlab.lab.lab import Lab
from attnlab.lab.result import LSE, PADDING, ErrorMap
from attnlab.linear.run import SourceRunner
from attnlab.linear.state_case import STATE_OPS, StateCase
from attnlab.linear.state_check import tried
from attnlab.tasks.task import Job
from attnlab.tensors.case_call import data_of_lengths, data_of_seq

# Fields of the memory layout: the plain value, and the diagnosis if the plain value gives a correct result.
_LAYOUTS = (
    ("kv_layout", "contiguous", "strides ignored"),
    ("pad_batch", 0, "padding not left out"),
)
# Fields whose values hide what a rule reads, or what separates two rules, with the values that do not.
_HIDING = {"freed": ("kept",), "distribution": PLAIN_VALUES}
# The kind and the diagnosis of a wrong side output.
_SIDE_FINDINGS = {
    LSE: ("wrong_lse", "logarithm of the sum"),
    PADDING: ("wrong_output", "both parts empty"),
}
_SMALL_BLOCKS = "; correct with small block numbers"
NOT_DETERMINISTIC = "not_deterministic"
OUT_OF_BOUNDS, INT32_WRAP = "out_of_bounds", "int32_wrap"  # kinds that one run shows
_NO_OWNER = "slot without owner"
_FAR = "offset beyond 2^31 elements"
_FP8_CACHE, _SCALES = "FP8 cache", ("a scale", "scales")


def check_case(
    lab: Lab,
    backend: Backend,
    case: Case,
    on_run: Callable[[Case, CaseRun], None] = lambda case, run: None,
    names: bool = True,
) -> list[Finding]:
    """Return the faults and observations of a Case.

    ``names``: look for what explains a wrong output; without, :func:`named` does it later.

    The Case runs with NaN in the empty slots and, if that output is correct, once more with finite
    garbage in them; both outputs must have the same bits. The second run is left out if the first one was
    traced and read no empty slot, or if the op gets no cache. ``on_run`` is called with the first run.
    Raises Unavailable if the backend does not have the op.
    """
    try:
        run = run_case(lab, backend, case, trace_reads=True)
    except (KernelRejected, KernelFailed) as error:
        if backend.missing_scales(case):
            raise Unsupported(f"the kernel rejects a case: {error}") from error
        return [_finding(case, "fails", str(error), re.sub(r"\d+", "#", str(error))[:60])]
    on_run(case, run)
    findings = [*observations(case, run.memory), *wrong_accesses(case, run)]
    wrong = _check_output(lab, backend, case, run)
    if names and wrong is not None:
        wrong = named(lab, backend, wrong)
    return [*findings, *([wrong] if wrong is not None else _check_side_outputs(lab, case, run))]


def wrong_accesses(case: Case, run: CaseRun) -> list[Finding]:
    """Return the out-of-bounds access and the int32 overflow of a run, if there are."""
    outside = [_finding(case, OUT_OF_BOUNDS, text, text.split()[0]) for text in run.outside[:1]]
    return [*outside, *(_finding(case, INT32_WRAP, text, INT32_WRAP) for text in run.wraps[:1])]


def is_callers_fault(lab: Lab, case: Case) -> bool:
    """Return whether the Case's call violates a contract, so that a wrong result is the caller's fault.

    A default scale computed from the number of heads does not count: the op chooses it.
    """
    violations = lab.violations(case, lab.call(case))
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
    diagnosis = _located(lab, case, run.output)
    if diagnosis.is_wrong:
        return _stated(
            (lab, backend),
            {case: run.output},
            lambda: _wrong_output(lab, backend, case, run.output, diagnosis),
        )
    if case.spec.cache_layout is None or never_reads_empty_slots(run):
        return None
    garbage = case.replace(empty_slots="garbage")
    output = run_case(lab, backend, garbage).output
    of_garbage = _located(lab, garbage, output)
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
    hiding = {name: plain for name, plain in _HIDING.items() if getattr(case, name) not in plain}
    plainer: list[dict[str, Any]] = [{field: plain[0]} for field, plain in hiding.items()]
    if zeros.first_block:
        plainer.append({"first_block": 0, "num_blocks": None})
    for fields in plainer:
        if found := _wrong_if_plainer(lab, backend, zeros, **fields):
            return found
    seen = _diagnose(lab, zeros, output_of_zeros)
    if not seen.is_wrong:
        text = f"{diagnosis.evidence}; right with zeros in the output buffer"
        return _finding(case, "wrong_output", text, "contents of the output buffer")
    if _follows_scratch(lab, backend, zeros, output_of_zeros):
        return _finding(zeros, "wrong_output", seen.evidence, "unwritten memory")
    text = _with_what_rights_it(lab, backend, zeros, seen.evidence)
    label = f"block {_FAR}" if zeros.first_block else layout
    if label:
        return _finding(zeros, "wrong_output", text, label)
    names = tuple(sorted(one.name for one in seen.explanations))
    return dataclasses.replace(_finding(zeros, "wrong_output", text, UNNAMED), names=names)


def _follows_scratch(lab: Lab, backend: Backend, case: Case, output: torch.Tensor) -> bool:
    """Answer whether each row with NaN changes with the contents of scratch memory, which has NaN."""
    rows = output.isnan().flatten(1).any(1)
    if not bool(rows.any()) or not runs_triton(backend.name):
        return False
    with scratch_full_of(0.0):
        other = run_case(lab, backend, case).output
    return not bool(rows_agree(output, other)[rows].any())


def _with_what_rights_it(lab: Lab, backend: Backend, case: Case, text: str) -> str:
    """Return the evidence of a wrong output with a feature without which it is right, if there is one."""
    if case.alibi and case.sliding_window and _is_correct(lab, backend, case.replace(alibi=False)):
        text = f"{text}; correct without ALiBi"
    return f"{text}{_SMALL_BLOCKS}" if case.first_block else text


def named(lab: Lab, backend: Backend, finding: Finding) -> Finding:
    """Return a finding of a wrong output with what explains it; any other finding as it is."""
    if finding.diagnosis != UNNAMED:
        return finding
    case, text = finding.case, finding.evidence
    output = run_case(lab, backend, case).output

    def name() -> Finding:
        with keeping(backend.fixed_fields(case.op)):
            diagnosis = confirmed(lab, backend, case, _diagnose(lab, case, output))
            label = evidence_label(lab, backend, case, output, diagnosis)
        fields = evidence_fields(lab, case, output, diagnosis, label)
        return dataclasses.replace(_finding(case, "wrong_output", text, label), **fields)

    return _stated((lab, backend), {case: output}, name) or finding


def _unwritten_rows(lab: Lab, backend: Backend, case: Case, output: torch.Tensor) -> list[int]:
    """Return the wrong rows that keep the contents of the output buffer, whatever they are."""
    unwritten = find_unwritten(lambda one: run_case(lab, backend, one).output, case, output)
    if not len(unwritten):
        return []
    wrong = examine(lab, case, output, (), Pattern()).evidence.locations.is_wrong.any(1)
    return [int(row) for row in unwritten[wrong[unwritten]]]


def _without_scales(lab: Lab, backend: Backend, case: Case) -> Finding | None:
    """Return the finding of an op that accepts FP8 or int8 tensors without their scales, or None.

    No output that does not depend on the scales can be right with two different ones.
    """
    missing = backend.missing_scales(case)
    if case.k_scale == case.v_scale == 1:
        missing.pop(_FP8_CACHE, None)
    if not missing:
        return None
    zeros = case.replace(empty_slots="zeros")
    if not _output_errors(lab, zeros, run_case(lab, backend, zeros).output).mismatched:
        return None
    what, names = next(iter(missing.items()))
    text = f"the op accepts an {what} and has no argument {' and no '.join(names)}"
    return _finding(zeros, "wrong_output", text, f"{what} without {_SCALES[len(names) > 1]}")


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
    errors = _output_errors(lab, case, run.output)
    if not errors.mismatched:
        return None
    place = errors.places()[0]
    has_owner = place.seq < len(case.lengths.query_lens)
    where = f"sequence {place.seq}, position {place.token}" if has_owner else f"a {_NO_OWNER}"
    text = f"{errors.mismatched} elements differ, first in {where}{_rules_of_write(lab, case, run)}"
    layout = _layout_at_fault(lab, backend, case)
    return _finding(case, "wrong_bytes", text, layout or ("own slot" if has_owner else _NO_OWNER))


def _rules_of_write(lab: Lab, case: Case, run: CaseRun) -> str:
    """Return the rules that reproduce wrong slots, as "; text"; "" if there is none."""
    if case.op_argument != NONE:
        return ""
    call = lab.call(case).cpu()
    pattern = diagnose_write(call, Target.of(case), output=run.output).pattern
    facts = () if pattern is None else pattern.facts[1:]  # after the place
    return "".join(f"; {one.what}" for one in facts)


def _check_argument(lab: Lab, backend: Backend, case: Case, run: CaseRun) -> Finding | None:
    """Return the fault of an output of a Case with an op argument, or None.

    It is diagnosed only if the output is also wrong without the argument.
    """
    has_cache = case.spec.cache_layout is not None
    for empty_slots in (case.empty_slots, "garbage") if has_cache else (case.empty_slots,):
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
    """Return the fault of a wrong output of a Case with an op argument, or with the one that it includes."""
    if case.plainer_argument != NONE:
        plain = case.replace(op_argument=case.plainer_argument)
        with contextlib.suppress(AttnLabError):  # a release may lack it
            of_plain = _output_errors(lab, plain, run_case(lab, backend, plain).output)
            if of_plain.mismatched:
                return _argument_fault(lab, backend, plain, of_plain)
    zeros = case.replace(empty_slots="zeros")
    of_zeros = run_case(lab, backend, zeros).output
    is_leak = not _output_errors(lab, zeros, of_zeros).mismatched
    if not is_leak and (wrong := _wrong_if_plainer(lab, backend, zeros, op_argument=NONE)):
        return wrong
    place = errors.places()[0]
    text = (
        f"{errors.mismatched} elements differ, first in sequence {place.seq}, token {place.token}"
    )
    label = f"op_argument {case.op_argument}"
    if is_leak:
        return _leak_with_argument(lab, backend, case, text, label)
    may_lack_alibi = case.alibi and "alibi" not in case.argument.needs
    if may_lack_alibi and _is_correct(lab, backend, zeros.replace(alibi=False)):
        label = f"{label} with ALiBi"
    defects = MASK_IGNORED, *argument_defects(zeros)
    found = examine(lab, zeros, of_zeros, defects, Pattern()).diagnosis
    names = [one.name.replace("_", " ") for one in found.explanations[:1]]
    return _finding(zeros, "wrong_output", text, ": ".join((label, *names)))


def _leak_with_argument(lab: Lab, backend: Backend, case: Case, text: str, label: str) -> Finding:
    """Return the finding of an output with an op argument that depends on slots that it must not read."""
    if case.freed != "kept" and _is_correct(lab, backend, case.replace(freed="kept")):
        return _finding(case, "reads_freed_blocks", text, f"{case.freed} blocks")
    if not _is_correct(lab, backend, case.replace(op_argument=NONE)):
        text, label = "without the op argument, too", "empty slots"
    return _finding(case, "reads_unwritten_slots", text, label)


def _wrong_if_plainer(lab: Lab, backend: Backend, case: Case, **fields: Any) -> Finding | None:
    """Return the fault of the output of a Case with plainer values of fields, or None."""
    plain = case.replace(**fields)
    output = run_case(lab, backend, plain).output
    diagnosis = _located(lab, plain, output)
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
    return not _located(lab, case, run.output).is_wrong


def _located(lab: Lab, case: Case, output: torch.Tensor) -> Diagnosis:
    """Return whether an output is wrong, and where: the diagnosis without candidates and patterns."""
    found = examine(lab, case, output, (), Pattern()).diagnosis
    return dataclasses.replace(found, tolerance=case.tolerance)


def _diagnose(lab: Lab, case: Case, output: torch.Tensor) -> Diagnosis:
    """Diagnose an output without a search for a distinguishing case."""
    return diagnose(case, output, lab=lab, propose=False)


def _finding(case: Case, kind: str, evidence: str, diagnosis: str) -> Finding:
    return Finding(op=case.op, kind=kind, case=case, evidence=evidence, diagnosis=diagnosis)


# Shrink a finding: search for a smaller Case that shows the same fault or observation.

MAX_TRIES = 40
_FEWER = "fewer:"  # begins the names of steps to fewer sequences or heads
# The plain value of each feature that a Case may not need, in the order in which they are removed.
_PLAIN = {
    "freed": "kept",
    "first_block": 0,
    "alibi": False,
    "sinks": False,
    "sliding_window": 0,
    "k_scale": 1.0,
    "v_scale": 1.0,
    "kv_layout": "contiguous",
    "pad_batch": 0,
    "block_size": 16,
    "max_blocks_per_seq": None,
}


def shrink(lab: Lab, backend: Backend, finding: Finding) -> Finding:
    """Return the same finding at a smaller Case.

    The search is greedy: it takes the first smaller Case that still shows the finding, and goes on from there
    with the steps that have not failed. Steps to fewer heads and sequences are tried again at once, others
    when no step is left. It stops when none succeeds, or after 40 tries. It does not depend on time, so that
    every machine returns the same Case.
    """
    with remembering(finding):
        failed, is_smaller = set[str](), True
        for _ in range(MAX_TRIES):
            steps = _smaller_cases(finding.case)
            name, case = next((step for step in steps if step[0] not in failed), ("", None))
            if case is None and failed and is_smaller:
                failed, is_smaller = set(), False
                name, case = next(_smaller_cases(finding.case), ("", None))
            if case is None:
                break
            same = _same_finding(lab, backend, finding, case)
            if same is None:
                failed.add(name)
            else:
                failed = {one for one in failed if not one.startswith(_FEWER)}
                finding, is_smaller = same, True
    return finding


def _same_finding(lab: Lab, backend: Backend, finding: Finding, case: Case) -> Finding | None:
    """Return the finding of the same group at another Case, or None.

    An observation of slot reads, a wrong access and an overflow need one run; every other finding needs the
    whole check.
    """
    try:
        if finding.kind in OBSERVED:
            found = [*observations(case, run_case(lab, backend, case, trace_reads=True).memory)]
        elif finding.kind in (OUT_OF_BOUNDS, INT32_WRAP):
            found = wrong_accesses(case, run_case(lab, backend, case))
        else:
            found = check_case(lab, backend, case, names=finding.kind == "wrong_output")
    except AttnLabError:
        return None
    if finding.is_named:
        found = [one for one in found if one.diagnosis == finding.diagnosis]
    return next((one for one in found if one.is_same(finding)), None)


def _smaller_cases(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield Cases that are smaller or plainer by one step, the largest steps first, with the step's name."""
    for name, step in (*_fewer(case), *_plainer(case), *_shorter(case)):
        try:
            smaller = case.replace(**{"num_blocks": None, **step})
            yield name, smaller.replace(num_blocks=smaller.total_blocks + 1)
        except InvalidCase:
            continue


def _fewer(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield steps to one sequence, one KV head, one query head."""
    query_lens, ctx_lens = case.lengths.query_lens, case.lengths.ctx_lens
    if len(query_lens) > 1:
        for i in range(len(query_lens)):
            one = {"query_lens": query_lens[i : i + 1], "ctx_lens": ctx_lens[i : i + 1]}
            yield f"{_FEWER} {i}", {**one, **data_of_seq(case, i)}
    if case.num_kv_heads > 1:
        yield f"{_FEWER} KV heads", {"num_heads": case.num_queries_per_kv}
    if case.num_queries_per_kv > 1:
        yield f"{_FEWER} heads", {"num_heads": 1, "num_queries_per_kv": 1}


def _plainer(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield steps that remove one feature."""
    for field, plain in _PLAIN.items():
        if getattr(case, field) != plain:
            yield field, {field: plain}
    if case.mask != CAUSAL:
        yield "mask", {"mask": CAUSAL, **dict.fromkeys(MASK_DATA)}
        if case.sliding_window > 1:
            yield "half a window", {"sliding_window": case.sliding_window // 2}
    if case.softcap is not None:
        yield "softcap", {"softcap": None}
    if case.kv_cache_dtype != "auto":
        yield "kv_cache_dtype", {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    if case.head_size > 32:
        yield "head_size", {"head_size": 32}


def _shorter(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield steps that shorten a single sequence: half of its new tokens, half of its context, or one less.

    The data of a mask follow from the new lengths, if they were not given; otherwise, and as a second try,
    they are cut.
    """
    if len(case.lengths.query_lens) > 1:
        return
    query_len, ctx_len = case.lengths.query_lens[0], case.lengths.ctx_lens[0]
    lens = {
        "half of the new tokens": (query_len // 2, ctx_len),
        "half of the context": (query_len, ctx_len // 2),
        "one less of the context": (query_len, ctx_len - 1),
    }
    if case.mask != CAUSAL:  # a fault of a mask often needs the first and the last row of a range
        lens["one new token less"] = (query_len - 1, ctx_len)
    is_given = any(getattr(case, name) is not None for name in DATA_OF_LENGTHS)
    seen = {(query_len, ctx_len)}
    for name, shorter in lens.items():
        if shorter[0] < 1 or shorter[1] < 0 or shorter in seen:
            continue
        seen.add(shorter)
        step = {"query_lens": shorter[:1], "ctx_lens": shorter[1:]}
        data = data_of_lengths(case, *shorter)
        if not is_given or not data:
            yield name, step
        if data:
            yield f"{name}, data cut", {**step, **data}


# The job of a check: run a case, or shrink a finding, in a worker that keeps what cases share.

Verdict = dict[str, Any]
_KEPT = 12  # products of a kind that a worker keeps: the runs of a small case differ in few fields


@dataclass(frozen=True, kw_only=True)
class CheckJob(Job):
    """Checks cases of one or more libraries.

    ``libraries``: the backends by name. A payload has the name of its ``library``, and either a ``case``, the
    ``findings`` of a set of cases to name, or a ``finding`` to shrink. ``coverage``: record which points of
    the kernels a case reaches.
    """

    libraries: dict[str, Backend]
    device: str = "cpu"
    coverage: bool = False

    def open(self) -> "_State":
        """Return the state of a worker. Raises Unavailable if the kernels cannot be loaded."""
        from attnlab.kernels.triton import interpreter

        torch.set_num_threads(1)  # the other cores have workers of their own
        interpreter.limit_processes(1)
        return _State(libraries=self.libraries)

    def run(self, state: "_State", payload: dict[str, Any]) -> Verdict:
        with unchanged_sources(), sharing_runs():
            return self._run(state, payload)

    def _run(self, state: "_State", payload: dict[str, Any]) -> Verdict:
        backend, lab = state.library(payload["library"])
        verdict: Verdict
        if "finding" in payload:
            small = shrink(lab, backend, Finding.from_verdict(payload["finding"]))
            verdict = {"finding": small.to_verdict()}
        elif "findings" in payload:
            verdict = {"findings": [one.to_verdict() for one in _named(lab, backend, payload)]}
        elif "horizon" in payload:
            case, of_addresses = Case.from_dict(payload["case"]), "addresses" in payload
            verdict = horizon_verdict(backend, case, payload["horizon"], of_addresses)
        elif payload["case"].get("op") in STATE_OPS:
            verdict = state_verdict(backend, StateCase.from_dict(payload["case"]))
        else:
            case, names = Case.from_dict(payload["case"]), not payload.get(UNNAMED)
            with measuring() if self.coverage else nullcontext() as measured:
                verdict = case_verdict(lab, backend, case, names)
            if measured is not None:
                verdict["points"] = relative_points(backend, measured.points)
                verdict["arguments"] = {n: sorted(facts) for n, facts in measured.arguments.items()}
        return cast(Verdict, json_value(verdict))

    def identity(self) -> dict[str, str]:
        libraries = self.libraries.items()
        return {
            **versions(),
            **{f"source {name}".strip(): source_digest(backend) for name, backend in libraries},
        }

    def free_bytes(self, state: "_State") -> int | None:
        if self.device != "cuda":
            return None
        release_memory()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


@dataclass(slots=True)
class _State:
    """The library that a worker has used last; its Lab keeps batches, caches and references."""

    libraries: dict[str, Backend]
    _name: str | None = None
    _lab: Lab = dataclasses.field(default_factory=Lab, repr=False)

    def library(self, name: str) -> tuple[Backend, Lab]:
        """Return a library's backend and its Lab."""
        backend = self.libraries[name]
        if name != self._name:
            self._name, self._lab = name, lab_of(backend, "cpu", keep=_KEPT)
        return backend, self._lab


def _named(lab: Lab, backend: Backend, payload: dict[str, Any]) -> list[Finding]:
    """Return the findings of a payload with what explains them; one that cannot run again as it is."""
    found = [Finding.from_verdict(fields) for fields in payload["findings"]]
    with remembering():
        for i, finding in enumerate(found):
            with suppress(Unsupported, KernelFailed):
                found[i] = named(lab, backend, finding)
    return found


def case_verdict(lab: Lab, backend: Backend, case: Case, names: bool = True) -> Verdict:
    """Check a Case and return its verdict; ``names``: those of :func:`check_case`.

    - ``ran``: whether it counts as run; ``findings``: as :meth:`Finding.to_verdict` returns them.
    - ``unsupported``: a limit that the kernel or the release states, or "".
    - ``not_run``: why the case could not run on this machine, or "".
    - ``reads``: the number of slots read, by state, and ``allowed``: the states that the contracts allow;
      None if the reads were not traced. ``kernels``: the names of the kernels that were launched.
    """
    verdict = _verdict(reads=None, allowed=None, kernels=[])

    def count(case: Case, run: CaseRun) -> None:
        verdict["kernels"] = kernels_of(run.launches)
        if run.memory is not None:
            verdict.update(reads=read_counts(run.memory), allowed=allowed_reads(case))

    try:
        backend.check_features(case)
        if is_callers_fault(lab, case):
            return verdict
        findings = check_case(lab, backend, case, count, names)
    except (DeviceLost, OutOfMemory):
        raise
    except (Unsupported, InvalidCase) as error:  # InvalidCase: a field that this release's op lacks
        return {**verdict, "unsupported": str(error)}
    except AttnLabError as error:
        return {**verdict, "not_run": str(error)}
    return {**verdict, "ran": True, "findings": [one.to_verdict() for one in findings]}


def _verdict(**fields: Any) -> Verdict:
    """Return the verdict of a case that has not run, and some fields."""
    return {"ran": False, "findings": [], "unsupported": "", "not_run": "", **fields}


def state_verdict(backend: Backend, case: StateCase) -> Verdict:
    """Run a case of linear attention and return its verdict, with the keys of ``case_verdict``."""
    source = backend.op_source
    assert source is not None
    found = tried(case, SourceRunner(source=source, platform=case.platform))
    if isinstance(found, KernelFailed):
        kind, text = "fails", str(found)
        diagnosis = re.sub(r":\d+: ", ":#: ", text)
    elif isinstance(found, AttnLabError):
        key = "not_run" if isinstance(found, Unavailable) else "unsupported"
        return _verdict(**{key: str(found)})
    else:
        kind, text, diagnosis = found.kind, found.evidence, "unexplained"
    one = _finding(cast(Case, case), kind, text, diagnosis)
    return _verdict(ran=True, findings=[one.to_verdict()] if kind else [])


GPU_MEMORY = 288  # GB, as in _WORDS of a finding
COST_S = 1.5  # of an op, in the units of costs.json
# The model whose sizes the other arguments have. vLLM runs its Triton decode for latent caches only.
_MODELS = {DECODE_FWD: "DeepSeek-V2-Lite"}
_MODEL = "Llama-3.1-8B"
# Sizes that grow with the load of a server; the others are decided by the model.
_SIZES = ("tokens", "seqs", "blocks", "ctx_len")
_WORDS = {
    "tokens": "tokens of a step",
    "seqs": "sequences of a step",
    "blocks": "blocks",
    "ctx_len": "tokens of a sequence",
}


def has_horizons(backend: Backend) -> bool:
    """Answer whether the launches of a backend's kernels are described: those of vLLM, on the interpreter."""
    return backend.name == "vllm" and backend.is_interpreted


@functools.cache
def deployment_of(op: str) -> Deployment:
    """Return the largest load of an op's model: all free memory is cache.

    A sequence has a block of its own. A step has at most half as many new tokens as the cache has slots,
    which leaves half of the free memory to the activations.
    """
    model = PRESETS[_MODELS.get(op, _MODEL)]
    slots = model.cache_tokens(GPU_MEMORY)
    return dataclasses.replace(
        model, gpu_memory=GPU_MEMORY, batched_tokens=slots // 2, seqs=slots // model.block_size
    )


def ops_with_files(op: str, ops: Sequence[str]) -> list[str]:
    """Return the ops whose files hold the kernels of an op, if ``ops`` are checked."""
    return [op, PREFILL] if op == WRAPPER and PREFILL not in ops else [op]


def horizon_verdict(
    backend: Backend, case: Case, ops: Sequence[str], of_addresses: bool = False
) -> dict[str, Any]:
    """Return the verdict of the horizons of a Case's op, with the keys of ``case_verdict``.

    ``ops``: those of :func:`ops_with_files`. ``of_addresses``: a finding for each address and size, not for
    each kernel and size.
    """
    source = backend.op_source
    assert source is not None
    verdict = _verdict(reads=None, allowed=None, kernels=[], points={}, arguments={})
    try:
        found = survey(
            source.root,
            files=[source.op_file(OPS[op].module) for op in ops],
            deployment=deployment_of(case.op),
            is_assuming=False,
            sizes=_SIZES,
        )
    except AttnLabError as error:
        return {**verdict, "unsupported": f"int32 horizons: {error}"}
    findings = [one.to_verdict() for one in _findings(found, case, of_addresses)]
    reasons = [f"int32 horizon of {one.kernel}: {one.why}" for one in found.not_run]
    return {**verdict, "ran": True, "findings": findings, "unsupported": "; ".join(reasons)}


def _findings(found: Survey, case: Case, of_addresses: bool) -> Iterator[Finding]:
    """Yield a finding or an observation for each kernel, or address, and size, at its smallest value."""
    nearest: dict[tuple[str, str, str], list[Row]] = {}
    for row in found.rows:
        address = _address(row) if of_addresses else ""
        nearest.setdefault((row.kernel.kernel, address, row.statement.size), []).append(row)
    for (kernel, address, _), rows in nearest.items():
        first = min(rows, key=lambda row: row.statement.wrong_at or 0)
        one = _of_horizon(first, sum(1 + row.also for row in rows) - 1, case, found.deployment)
        if address:
            words = _WORDS[first.statement.size]
            text = f"{kernel}: the int32 address {address} overflows with many {words}"
            one = dataclasses.replace(one, diagnosis=text, description=text)
        yield one


def _address(row: Row) -> str:
    """Return the pointer of the access that is wrong, as it is in the source."""
    assert row.statement.access is not None
    text = row.statement.access.site.text
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else text


def _of_horizon(row: Row, more: int, case: Case, deployment: Deployment | None) -> Finding:
    assert deployment is not None
    one, words = row.statement, _WORDS[row.statement.size]
    assert one.access is not None
    fits = f"{row.limits[one.size]:,} fit with {deployment.name} on one GPU of {GPU_MEMORY} GB"
    place = f"{one.access.site.place} {one.effect}"
    others = f"; further expressions: {more}" if more else ""
    return Finding(
        op=case.op,
        kind=HORIZON if row.is_reached else BEYOND,
        case=case,
        evidence=f"with {one.wrong_at:,} {words} ({fits}), {place}: {one.site.text} of line "
        f"{one.site.line} overflows int32{others}",
        diagnosis=f"{row.kernel.kernel}: {one.wrong_at:,} {words}",
        horizon=(
            *("--kernel", row.kernel.kernel, "--described", "--deployment", deployment.name),
            *("--gpu-memory", str(GPU_MEMORY)),
            *("--batched-tokens", str(deployment.batched_tokens), "--seqs", str(deployment.seqs)),
        ),
    )
