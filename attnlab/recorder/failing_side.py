"""Which side of a failed comparison is wrong: the kernel, its arguments, the expected value or the tolerance.

The output of the call and the test's expected tensor are both compared with attnlab's reference. A difference
that the rounding bound of the kernel covers is no error.
"""

import dataclasses
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.contracts.call_dispatch import kernels_of
from attnlab.contracts.target import Target
from attnlab.defects.problem import Problem
from attnlab.diagnosis.captured import diagnose_captured, where_it_ran
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.error_location import ErrorLocations, locate
from attnlab.recorder.comparisons import Comparison
from attnlab.recorder.written_side import errors_of_write, half_of
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import has_scaled_output, output_numbers

SIDES = (
    "the kernel",
    "the arguments of the call",
    "the expected value",
    "the kernel and the expected value",
    "the tolerance",
    "neither",
    "unknown",
)
_IN_CACHE = (
    "newest_slot_zero",
    "newest_slot_nan",
    "newest_slot_unwritten",
)  # contents of the cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """What is wrong with a call and its comparison.

    - ``side``: one of SIDES. ``evidence``: one sentence.
    - ``diagnosis``: that of the call's output. ``comparison``: the test's, or None if it compared
      something else.
    - ``expected_rows``: the rows where the expected value is wrong.
    """

    side: str
    evidence: str
    diagnosis: Diagnosis
    comparison: Comparison | None = None
    expected_rows: int = 0


def judge(
    call: KernelCall, comparison: Comparison | None, *, with_itself: bool = False
) -> Judgement:
    """Return which side is wrong. ``comparison.actual`` must be the call's output.

    ``with_itself``: the expected value is the output of another call of the op, so that an error of both is
    one of the kernel. Raises InvalidCall for a call without a reference.
    """
    diagnosis = diagnose_captured(call, Case())
    if comparison is None:
        side = _side_of_output(diagnosis) if diagnosis.is_wrong else "unknown"
        evidence = _of_output(diagnosis)
        if not diagnosis.is_wrong:
            evidence += "; the test compared no output of a recorded call"
        return Judgement(side=side, evidence=evidence, diagnosis=diagnosis)
    off, rows, beyond = _errors_of_expected(call, comparison)
    noun = "slots" if call.spec.writes_cache else "rows"
    expected = "expected value, from another call," if with_itself else "expected value"
    side, evidence = _decide(diagnosis, comparison, off, f"{rows} {noun}", beyond, expected)
    if with_itself and side == "the kernel and the expected value":
        side = _side_of_output(diagnosis)
    return Judgement(
        side=side,
        evidence=evidence,
        diagnosis=diagnosis,
        comparison=comparison,
        expected_rows=rows,
    )


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
    allowed = f"atol {comparison.atol:g}, rtol {comparison.rtol:g}"
    if diagnosis.status == "rejected":
        return _side_of_output(diagnosis), f"the op raised: {diagnosis.rejection}"
    if diagnosis.is_wrong and beyond:
        return (
            "the kernel and the expected value",
            f"{_of_output(diagnosis)}; the {expected} is off by up to {off:.3g} in {rows}",
        )
    if diagnosis.is_wrong:
        return (
            _side_of_output(diagnosis),
            f"{_of_output(diagnosis)}; the {expected} is within {off:.3g} of the exact result",
        )
    if beyond:
        return (
            "the expected value",
            f"{_of_output(diagnosis)}; the {expected} is off by up to {off:.3g} in {rows}",
        )
    if comparison.passed:
        return "neither", f"output and {expected} agree within {allowed}"
    return (
        "the tolerance",
        f"output and {expected} are both exact up to rounding ({off:.3g} in the latter), "
        f"but {allowed} does not allow their difference",
    )


def _of_output(diagnosis: Diagnosis) -> str:
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
    """Return the expected value's largest error, its wrong rows, and whether it exceeds the tolerance."""
    if call.spec.writes_cache:
        target = Target.of(where_it_ran(call, Case()).case)
        return errors_of_write(call, target, comparison)
    numbers = _in_numbers(call, comparison)
    locations = _expected_errors(call, numbers)
    off = float(locations.error.max()) if locations.error.numel() else 0.0
    return off, len(locations.wrong_rows), _beyond_tolerance(call, numbers, locations)


def _expected_errors(call: KernelCall, comparison: Comparison) -> ErrorLocations:
    """Return where the expected value differs from the reference by more than the rounding bound."""
    call = call.cpu()
    return locate(_problem(call), comparison.expected.cpu().reshape(call.output.shape))


def _problem(call: KernelCall) -> Problem:
    ran = where_it_ran(call, Case())
    return Problem.of_call(call, Target.of(ran.case), kernels_of(ran.case, call))


def _beyond_tolerance(call: KernelCall, comparison: Comparison, locations: ErrorLocations) -> bool:
    """Answer whether the expected value is wrong by more than the bound, and by more than the tolerance."""
    size = comparison.expected.cpu().reshape(call.output.shape).abs().nan_to_num(0.0, 0.0, 0.0)
    allowed = comparison.atol + comparison.rtol * size.amax(2).double()
    return bool((locations.is_wrong & (locations.error.double() > allowed)).any())


def _in_numbers(call: KernelCall, comparison: Comparison) -> Comparison:
    """Return the comparison in the unit of the call's correct output."""
    factor = factor_of(call, comparison.actual)
    if factor in (None, 1.0):
        return comparison
    return dataclasses.replace(
        comparison,
        actual=comparison.actual.double() * factor,
        expected=comparison.expected.double() * factor,
        atol=comparison.atol * factor,
    )


def output_matches(call: KernelCall, tensor: torch.Tensor) -> bool:
    """Answer whether a tensor has the numbers of the call's output, in any shape; NaN equals NaN."""
    if call.spec.writes_cache:
        return half_of(call, tensor) is not None
    return factor_of(call, tensor) is not None


def factor_of(call: KernelCall, tensor: torch.Tensor) -> float | None:
    """Return what a tensor is multiplied by to be the numbers of a call's output; None if it is another.

    The output may have any shape. A scaled output may also have another dtype, and may have been multiplied
    by its scale already.
    """
    output = call.output.cpu()
    if tensor.numel() != output.numel():
        return None
    tensor = tensor.cpu().reshape(output.shape)
    if not has_scaled_output(call):
        same = tensor.dtype == output.dtype and torch.equal(*map(_comparable, (tensor, output)))
        return 1.0 if same else None
    scale = 1.0 if call.output_scale is None else call.output_scale
    for factor, numbers in ((scale, output.double()), (1.0, output_numbers(call, output))):
        if torch.equal(*map(_comparable, (tensor.double(), numbers.to(tensor.dtype).double()))):
            return factor
    return None


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(1e9)
