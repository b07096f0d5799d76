"""Which side of a failed comparison is wrong: the kernel, its arguments, the expected value or the test.

The output of the call and the test's expected tensor are both compared with attnlab's reference. A difference
that the rounding bound of the kernel covers is no error. If a recorded call made the expected tensor, that
call is compared with its own reference.
"""

from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.defects.problem import Problem
from attnlab.diagnosis.captured import diagnose_captured, where_it_ran
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.error_location import locate
from attnlab.recorder.comparisons import Comparison
from attnlab.recorder.matches import Match, match_of
from attnlab.recorder.written_side import errors_of_write
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import in_numbers

SIDES = (
    "the kernel",
    "the arguments of the call",
    "the expected value",
    "the kernel and the expected value",
    "the tolerance",
    "the test's dtypes",
    "the test's arguments",
    "neither",
    "unknown",
)
_IN_CACHE = (
    "newest_slot_zero",
    "newest_slot_nan",
    "newest_slot_unwritten",
)  # contents of the cache
# Arguments that two calls may differ in, and what a difference is called.
_ARGUMENTS = (
    "softcap", "sliding_window", "window_right", "causal", "alibi_slopes", "sinks", "k_scale", "v_scale",
    "q_scale", "output_scale", "mm_prefix_range", "chunk_lookback", "qq_bias", "rswa_prefix_lens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """What is wrong with a call and its comparison.

    - ``side``: one of SIDES. ``evidence``: one sentence.
    - ``diagnosis``: that of the call's output. ``comparison``: the test's, or None if it compared
      something else.
    - ``expected_rows``: the rows where the expected value is wrong.
    - ``read_as``: how arguments of another form were read.
    """

    side: str
    evidence: str
    diagnosis: Diagnosis
    comparison: Comparison | None = None
    expected_rows: int = 0
    read_as: tuple[str, ...] = ()


def judge(
    call: KernelCall, comparison: Comparison | None, *, maker: KernelCall | None = None
) -> Judgement:
    """Return which side is wrong. ``comparison.actual`` must be the call's output, or a part of it.

    ``maker``: the recorded call whose output the expected value is, if there is one. If both calls are right,
    and their arguments differ, the test compares two different things. Raises InvalidCall for a call without
    a reference.
    """
    diagnosis = diagnose_captured(call, Case())
    if comparison is None or diagnosis.status == "not decided":
        side = _side_of_output(diagnosis) if diagnosis.is_wrong else "unknown"
        evidence = _of_output(diagnosis)
        if comparison is None and diagnosis.status == "nothing wrong":
            evidence += "; no comparison of the test was recognised as one of this output"
        return Judgement(
            side=side,
            evidence=evidence,
            diagnosis=diagnosis,
            comparison=comparison,
            read_as=call.read_as,
        )
    off, rows, beyond = _errors_of_expected(call, comparison)
    other = None if maker is None else _diagnosis(maker)
    if other is not None and other.status in ("rejected", "not decided"):
        other = None
    noun = "slots" if call.spec.writes_cache else "rows"
    expected = "expected value" if maker is None else "expected value, from another call,"
    side, evidence = _decide(diagnosis, comparison, off, f"{rows} {noun}", beyond, expected)
    if other is not None and maker is not None:
        if side == "the kernel and the expected value":
            side = _side_of_output(diagnosis)
        if side == "the expected value" and not other.is_wrong:
            side, evidence = "the test's arguments", _other_arguments(call, maker)
    return Judgement(
        side=side,
        evidence=evidence,
        diagnosis=diagnosis,
        comparison=comparison,
        expected_rows=rows,
        read_as=call.read_as,
    )


def _diagnosis(call: KernelCall) -> Diagnosis | None:
    """Return the diagnosis of a call, or None if it has no reference or no output."""
    try:
        return diagnose_captured(call, Case())
    except AttnLabError:
        return None


def _other_arguments(call: KernelCall, maker: KernelCall) -> str:
    """Return in which arguments two calls differ that are both right."""
    both = "the output and the expected value, from another call, are each exact up to rounding"
    names = [_difference(call, maker, name) for name in _ARGUMENTS]
    scales = [
        one.query.shape[2] ** -0.5 if one.sm_scale is None else one.sm_scale
        for one in (call, maker)
    ]
    if scales[0] != scales[1]:
        names.insert(0, f"sm_scale ({scales[0]:.6g} and {scales[1]:.6g})")
    for name in ("query", "seq_lens", "query_start_loc"):
        names.append(name if _differs(getattr(call, name), getattr(maker, name)) else "")
    found = [name for name in names if name]
    return f"{both}; the calls differ in {', '.join(found) or 'their keys and values'}"


def _difference(call: KernelCall, maker: KernelCall, name: str) -> str:
    one, other = getattr(call, name), getattr(maker, name)
    if not _differs(one, other):
        return ""
    is_tensor = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
    return name if is_tensor else f"{name} ({one} and {other})"


def _differs(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.cpu().double(), other.cpu().double()
        return one.shape != other.shape or not torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return True
    return (one or 0) != (other or 0)


def _decide(
    diagnosis: Diagnosis,
    comparison: Comparison,
    off: float,
    rows: str,
    beyond: bool,
    expected: str,
) -> tuple[str, str]:
    """Return the side and the evidence.

    ``off``: the largest error of the expected value; ``rows``: how many rows or slots are above the bound, in
    words; ``beyond``: whether it exceeds the tolerance somewhere; ``expected``: what to call it.
    """
    if diagnosis.status == "rejected":
        return _side_of_output(diagnosis), f"the op raised: {diagnosis.rejection}"
    output = _of_output(diagnosis)
    if diagnosis.is_wrong and beyond:
        return (
            "the kernel and the expected value",
            f"{output}; the {expected} is off by up to {off:.3g} in {rows}",
        )
    if diagnosis.is_wrong:
        return (
            _side_of_output(diagnosis),
            f"{output}; the {expected} is within {off:.3g} of the exact result",
        )
    if beyond:
        return (
            "the expected value",
            f"{output}; the {expected} is off by up to {off:.3g} in {rows}",
        )
    return _of_right_values(comparison, off, expected)


def _of_right_values(comparison: Comparison, off: float, expected: str) -> tuple[str, str]:
    """Return the side and the evidence if output and expected value are both right."""
    allowed = f"atol {comparison.atol:g}, rtol {comparison.rtol:g}"
    if comparison.passed:
        return "neither", f"output and {expected} agree within {allowed}"
    if not comparison.is_close:
        return (
            "the tolerance",
            f"output and {expected} are both exact up to rounding ({off:.3g} in the latter), "
            f"but {allowed} does not allow their difference",
        )
    kinds = [_dtype(one) for one in (comparison.actual, comparison.expected)]
    if kinds[0] != kinds[1]:
        return (
            "the test's dtypes",
            f"the test compares {kinds[0]} with {kinds[1]}; the values of output and {expected} agree "
            f"within {allowed}",
        )
    reason = f": {comparison.reason}" if comparison.reason else ""
    return "unknown", f"output and {expected} agree within {allowed}; the comparison failed{reason}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_output(diagnosis: Diagnosis) -> str:
    if diagnosis.status == "not decided":
        return "; ".join(diagnosis.sentences()[:2])
    if not diagnosis.is_wrong:
        return "the output is exact up to rounding"
    if diagnosis.status == "rejected":
        return f"the op raised: {diagnosis.rejection}"
    noun = "slots" if diagnosis.pattern.of("slots") else "rows"
    return f"the output is off by up to {diagnosis.largest:.3g} in {diagnosis.wrong_rows} {noun}"


def _side_of_output(diagnosis: Diagnosis) -> str:
    """Return "the arguments of the call" if the call violates a contract, otherwise "the kernel"."""
    violated = any(one.effect != "harmless" for one in diagnosis.violations)
    name = "" if diagnosis.cause is None else diagnosis.cause.name
    if violated or name in _IN_CACHE:
        return "the arguments of the call"
    return "the kernel"


def _errors_of_expected(call: KernelCall, comparison: Comparison) -> tuple[float, int, bool]:
    """Return the expected value's largest error, its wrong rows, and whether it exceeds the tolerance.

    The error beyond what the dtype of the expected value rounds counts.
    """
    if call.spec.writes_cache:
        target = Target.of(where_it_ran(call, Case()).case)
        return errors_of_write(call, target, comparison)
    call = call.cpu()
    match = match_of(call, comparison.actual)
    if match is None:
        return 0.0, 0, False
    expected = match.spread(comparison.expected, _rest(call, match))
    compared = match.cells(call.buffer.shape) > 0
    found = locate(_problem(call), expected)
    error = found.error.double().masked_fill(~compared, 0.0)
    size = expected.abs().nan_to_num(0.0, 0.0, 0.0).amax(2)
    rounding = (
        size * _unit(comparison.expected.dtype) * (not match.is_plain(call, comparison.actual))
    )
    is_wrong = found.is_wrong & compared & (error > rounding)
    allowed = comparison.atol * match.factor + comparison.rtol * size
    beyond = bool((is_wrong & (error > allowed + rounding)).any())
    off = float(error.max()) if error.numel() else 0.0
    return off, int(is_wrong.any(1).sum()), beyond


def _unit(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding to a dtype."""
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def _rest(call: KernelCall, match: Match) -> torch.Tensor:
    """Return numbers of the output's shape where a test compared none: the output, and the correct numbers in
    heads of which it compared a part."""
    rest = in_numbers(call).buffer.double().clone()
    cells = match.cells(rest.shape)
    rows = torch.nonzero(((cells > 0) & (cells < rest.shape[2])).any(1)).flatten()
    if len(rows):
        correct = _problem(call).correct_rows(rows, torch.arange(rest.shape[1]))
        rest[rows] = correct.output.double()
    return rest


def _problem(call: KernelCall) -> Problem:
    ran = where_it_ran(call, Case())
    return Problem.of_call(call, Target.of(ran.case), kernels_of(ran.case, call))
