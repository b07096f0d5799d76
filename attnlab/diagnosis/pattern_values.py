"""What the wrong numbers are: constants, multiples of the correct output, or the results of other cells.

The tests run from the most to the least specific one, and each cell counts for the first that it passes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from attnlab.diagnosis.cells import (
    CLEAR,
    Cells,
    Part,
    fits,
    is_over_determined,
    limit_of,
    num_cells,
    ratio_of,
)
from attnlab.diagnosis.pattern import Fact, region_text
from attnlab.lab.problem import Problem, scores_of, softmax

_CLEAR = 4.0  # a cell is compared with others if its size exceeds this many rounding bounds
_SHARE = 0.1  # a rule must reproduce this share of the wrong cells that are left
_MOST_FACTORS = 4  # distinct factors that are listed one by one
_SHORT_FORMATS = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")


def value_facts(cells: Cells, dtype: torch.dtype) -> tuple[list[Fact], torch.Tensor]:
    """Return constants, factors and sums that reproduce wrong cells, and the precision of the numbers.

    The second value is the mask of the wrong cells that they do not reproduce, [n] bool.
    """
    left = cells.is_wrong.clone()
    facts: list[Fact] = []
    is_clear = bool((cells.ratio[left] > CLEAR).any())
    rules = (_factor, _added, _reordered) if is_clear else ()  # any rule fits errors near rounding
    for find in (_nonfinite, _constant, *rules):
        for fact, mask in find(cells, left):
            facts.append(fact)
            left &= ~mask
    return [*facts, *_rounded_to_shorter_format(cells, dtype)], left


def _nonfinite(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells with NaN or infinite elements."""
    found = []
    is_nan, is_inf = cells.output.isnan(), cells.output.isinf()
    for name, mask in (("NaN", is_nan), ("infinite", is_inf & ~is_nan.any(1, keepdim=True))):
        whole, part = mask.all(1) & left, mask.any(1) & ~mask.all(1) & left
        for cells_mask, what in (
            (whole, f"all elements are {name}"),
            (part, f"some elements are {name}"),
        ):
            if bool(cells_mask.any()):
                found.append(
                    _fact(
                        "nonfinite",
                        cells,
                        cells_mask,
                        what,
                        accounts=what[0] == "a",
                    )
                )
    return found


def _constant(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells whose elements are all the same number."""
    output = cells.output
    same = left & output.isfinite().all(1) & (output == output[:, :1]).all(1)
    if output.shape[1] == 1:
        return []
    found = []
    for value in output[same, 0].unique().tolist()[:_MOST_FACTORS]:
        mask = same & (output[:, 0] == value)
        what = "all zeros" if value == 0 else f"every element is {value:.4g}"
        found.append(_fact("zeros" if value == 0 else "constant", cells, mask, what, value=value))
    return found


def _clear(cells: Cells, left: torch.Tensor) -> torch.Tensor:
    """Return which cells are finite and well above their rounding bound."""
    size = cells.correct.abs().amax(1)
    finite = cells.output.isfinite().all(1) & cells.bound.isfinite().all(1)
    return left & finite & (size > _CLEAR * cells.bound.amax(1))


def _factor(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells that are a multiple of the correct output."""
    if cells.output.shape[1] < 4:
        return []
    correct = cells.correct
    output = cells.output.nan_to_num(0.0, 0.0, 0.0)
    squares = correct.square().sum(1).clamp(min=1e-300)
    factor = (output * correct).sum(1) / squares
    bound = cells.bound * factor.abs().clamp(min=1.0)[:, None]
    fits = _clear(cells, left) & _equal(cells, factor[:, None] * correct, bound)
    fits &= factor.abs() * correct.abs().amax(1) > _CLEAR * cells.bound.amax(1)
    if not bool(fits.any()):
        return []
    spread = 3 * bound.norm(dim=1) / squares.sqrt() / correct.shape[1] ** 0.5 + 1e-9
    moves = fits & ((factor - 1).abs() > spread)
    if int(moves.sum()) < _SHARE * int(left.sum()):
        return []
    groups = _grouped(factor, spread, moves)
    if len(groups) <= _MOST_FACTORS:
        return [
            _fact(
                "factor",
                cells,
                mask | (left & _equal(cells, value * correct, bound)),
                f"{_times(value)} the correct output",
                value=value,
            )
            for value, mask in groups
        ]
    low, high = float(factor[fits].min()), float(factor[fits].max())
    what = (
        f"multiples of the correct output, by factors from {low:.3g} to {high:.3g} that differ between "
        "rows or heads"
    )
    return [_fact("factors", cells, fits, what, low=low, high=high)]


def _equal(cells: Cells, expected: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return which cells equal ``expected`` [n, head_size] within ``bound``, [n] bool, and not within what
    covers their error (:func:`attnlab.diagnosis.cells.limit_of`)."""
    limit = limit_of(bound, cells.output, cells.correct, cells.bound)
    return ratio_of(cells.output - expected, limit) <= 1


def _grouped(
    values: torch.Tensor, spread: torch.Tensor, chosen: torch.Tensor
) -> list[tuple[float, torch.Tensor]]:
    """Group the chosen cells by value: a cell joins a group if it is within the cell's ``spread``."""
    groups: list[tuple[float, torch.Tensor]] = []
    left = chosen.clone()
    while bool(left.any()) and len(groups) <= _MOST_FACTORS:
        sharpest = int(torch.where(left, spread, torch.inf).argmin())
        mask = left & ((values - values[sharpest]).abs() <= spread + spread[sharpest])
        weight = spread[mask].clamp(min=1e-300).reciprocal().square()
        groups.append((float((values[mask] * weight).sum() / weight.sum()), mask))
        left &= ~mask
    return groups


def _times(value: float) -> str:
    """Return a factor in words; factors near simple numbers are named."""
    names = {0.5: "half of", 2.0: "twice", -1.0: "the negative of", 0.25: "a quarter of"}
    for number, name in names.items():
        if abs(value - number) < 2e-3 * abs(number):
            return name
    return f"{value:.4g} times"


def _added(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells in which one number was added to every element of the correct output."""
    if cells.output.shape[1] < 4:
        return []
    output = cells.output.nan_to_num(0.0, 0.0, 0.0)
    difference = output - cells.correct
    mean = difference.mean(1)
    # the kernel rounds the shifted number, so half a step of a short format is allowed in addition
    bound = cells.bound + output.abs() * 2.0**-10
    finite = cells.output.isfinite().all(1) & cells.bound.isfinite().all(1)
    equal = left & finite & _equal(cells, cells.correct + mean[:, None], bound)
    equal &= mean.abs() > 2 * bound.amax(1)
    # a head whose correct elements are nearly equal shows no pattern, and contradicts none
    fits = equal & (cells.correct.amax(1) - cells.correct.amin(1) > _CLEAR * bound.amax(1))
    if not bool(fits.any()):
        return []
    groups = _grouped(mean, bound.amax(1), fits)
    if int(fits.sum()) < _SHARE * int(left.sum()):
        return []
    if len(groups) <= _MOST_FACTORS:
        groups = [
            (value, mask | left & _equal(cells, cells.correct + value, bound))
            for value, mask in groups
        ]
        return [
            _fact("added", cells, mask, f"{value:.4g} is added to every element", value=value)
            for value, mask in groups
        ]
    what = "one number is added to all elements of a head; it differs between rows or heads"
    return [_fact("added", cells, equal, what)]


def _reordered(cells: Cells, left: torch.Tensor) -> list[tuple[Fact, torch.Tensor]]:
    """Find cells that hold the correct elements in another order."""
    head_size = cells.output.shape[1]
    if head_size < 8:
        return []
    order, half = torch.arange(head_size), head_size // 2
    orders = (
        {
            "in reverse order": order.flip(0),
            "with the halves exchanged": order.roll(half),
            "one element late": order.roll(1),
            "one element early": order.roll(-1),
            "with even elements before odd ones": torch.cat([order[::2], order[1::2]]),
            "with the halves interleaved": order.view(2, half).T.flatten(),
            "with neighbours exchanged": order.view(-1, 2).flip(1).flatten(),
        }
        if head_size % 2 == 0
        else {"in reverse order": order.flip(0)}
    )
    clear = _clear(cells, left)
    for text, index in orders.items():
        fits = clear & _equal(cells, cells.correct[:, index], cells.bound[:, index])
        if bool(fits.any()):
            what = f"the correct elements of the head, {text}"
            return [_fact("reordered", cells, fits, what)]
    return []


def _rounded_to_shorter_format(cells: Cells, dtype: torch.dtype) -> list[Fact]:
    """Return the fact that every number is one of a format shorter than ``dtype``."""
    wrong = cells.output[cells.is_wrong]
    numbers = wrong[wrong.isfinite() & (wrong != 0)]
    if len(numbers) < 64:
        return []
    for name in _SHORT_FORMATS:
        short = getattr(torch, name)
        if short.itemsize > dtype.itemsize or torch.finfo(short).eps <= torch.finfo(dtype).eps:
            continue  # a longer fraction holds all numbers of the dtype that are in its range
        if bool((numbers.to(short).double() == numbers).all()) and len(numbers.unique()) > 8:
            what = (
                f"the wrong numbers are all {name} numbers, although the output is {str(dtype)[6:]}"
            )
            return [Fact(kind="format", where="", what=what, values={"format": name})]
    return []


def _fact(
    kind: str, cells: Cells, mask: torch.Tensor, what: str, accounts: bool = True, **values: float
) -> tuple[Fact, torch.Tensor]:
    """Return a fact about the cells in ``mask``, and the mask."""
    fact = Fact(
        kind=kind,
        where=region_text(cells, mask),
        what=what,
        values={
            **values,
            "rows": cells.row[mask].unique().tolist()[:1000],
            "heads": cells.head[mask].unique().tolist(),
        },
        accounts_for=int(mask.sum()) if accounts else 0,
    )
    return fact, mask


def size_fact(cells: Cells, has_rule: bool) -> Fact | None:
    """Return how large the errors are; with no rule, whether they are small and everywhere."""
    wrong = cells.select(cells.is_wrong)
    finite = wrong.output.isfinite().all(1)
    if not bool(finite.any()):
        return None
    error = wrong.output[finite] - wrong.correct[finite]
    largest = float(error.abs().max())
    relative = float(error.norm() / wrong.correct[finite].norm().clamp(min=1e-300))
    ratio = float(wrong.ratio[finite].max())
    what = (
        f"the errors are {relative:.2g} of the size of the correct output, at most {ratio:.3g} rounding "
        "bounds"
    )
    is_precision = not has_rule and _is_precision(cells, relative)
    if is_precision:
        seqs = len(wrong.seq.unique()), len(cells.seq.unique())
        what += f"; they are small, in {seqs[0]} of {seqs[1]} sequences"
    values = {"largest": largest, "ratio": ratio, "relative": relative}
    kind = "precision" if is_precision else "size"
    return Fact(kind=kind, where="", what=what, values=values)


def _is_precision(cells: Cells, relative: float) -> bool:
    """Answer whether errors are below 3 % of the output, in half of the sequences, and without direction."""
    seqs, wrong_seqs = cells.seq.unique(), cells.seq[cells.is_wrong].unique()
    error = (cells.output - cells.correct).nan_to_num(0.0, 0.0, 0.0)
    share = float((cells.ratio > 0.5).double().mean())
    mean = float(error.mean().abs() / error.square().mean().sqrt().clamp(min=1e-300))
    return relative < 0.03 and len(wrong_seqs) * 2 >= len(seqs) and share > 0.25 and mean < 0.1


# The one scale of the scores that reproduces the wrong cells, if there is one.

_OCTAVES, _STEPS = 8, 4  # of the search for a scale: 2^-8 to 2^8 times the correct one
_REFINEMENTS = 40
_GOLDEN = (5**0.5 - 1) / 2
_KNOWN = 1.05  # a scale that may be larger or smaller by this factor is not known


def scale_fact(problem: Problem, worst: Sequence[Part], many: Sequence[Part]) -> Fact | None:
    """Find one scale of the scores that fits every wrong cell.

    ``worst``: a few parts, for the search; ``many``: those on which the fit is confirmed.
    """
    if not is_over_determined(many):
        return (
            None  # one key has weight 1 at any scale, and two keys have any weights at some scale
        )
    if all(_fits(problem, part, 0.0) for part in [*worst, *many]):
        what = "every visible key has the same weight: the scores have no effect"
        return _scale_fact(what, many, {"scale": 0.0, "ratio": 0.0, "names": ["no scores"]})
    scale = fitted_scale(worst, problem.sm_scale)
    if not all(_fits(problem, part, scale) for part in [*worst, *many]):
        return None
    if any(all(_fits(problem, part, scale * f) for part in many) for f in (_KNOWN, 1 / _KNOWN)):
        return None
    ratio = scale / problem.sm_scale
    names = _names(problem, scale)
    what = (
        f"a softmax scale of {scale:.4g} fits; the correct scale is {problem.sm_scale:.4g} "
        f"(ratio {ratio:.4g}{''.join(f', {name}' for name in names)})"
    )
    return _scale_fact(what, many, {"scale": scale, "ratio": ratio, "names": names})


def _scale_fact(what: str, many: Sequence[Part], values: dict[str, Any]) -> Fact:
    return Fact(
        kind="softmax_scale",
        where="every wrong row and head",
        what=what,
        values=values,
        accounts_for=num_cells(many),
    )


def fitted_scale(parts: Sequence[Part], correct: float) -> float:
    """Return the scale with the smallest error, by a grid and golden-section search in its logarithm."""

    def loss(exponent: float, some: Sequence[Part], sign: float) -> float:
        return sum(_loss(part, sign * correct * 2.0**exponent) for part in some)

    grid = [i / _STEPS for i in range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1)]
    best, sign = min(
        ((exponent, sign) for exponent in grid for sign in (1.0, -1.0)),
        key=lambda one: loss(one[0], parts[:1], one[1]),
    )
    low, high = best - 1 / _STEPS, best + 1 / _STEPS
    for _ in range(_REFINEMENTS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if loss(left, parts, sign) < loss(right, parts, sign):
            high = right
        else:
            low = left
    return sign * correct * math.exp2((low + high) / 2)


def _loss(part: Part, scale: float) -> float:
    """Return the squared error of the wrong cells under a scale, in units of the rounding bound."""
    inputs = dataclasses.replace(part.inputs, sm_scale=scale)
    weights = softmax(scores_of(inputs), inputs.sinks)
    output = (weights @ part.inputs.value.transpose(0, 1)).transpose(0, 1)
    ratio = ((part.output - output) / part.bound)[part.is_wrong]
    return float(ratio.square().sum().nan_to_num(1e300))


def _fits(problem: Problem, part: Part, scale: float) -> bool:
    predicted = problem.predict(dataclasses.replace(part.inputs, sm_scale=scale))
    return fits(part, part.output - predicted.output, predicted.bound)


def _names(problem: Problem, scale: float) -> list[str]:
    """Return simple expressions that equal the scale to half a percent."""
    head_size, correct = problem.call.query.shape[2], problem.sm_scale
    names = {
        "1 / head_size": 1 / head_size,
        "1 / sqrt(head_size)": head_size**-0.5,
        "1 / sqrt(num_heads)": problem.num_heads**-0.5,
        "no scale": 1.0,
        "twice": 2 * correct,
        "half": correct / 2,
        "log2(e) times": correct * math.log2(math.e),
        "ln(2) times": correct * math.log(2),
        "the scale applied twice": correct**2,
        "the opposite sign": -correct,
    }
    k_scale, v_scale = problem.call.k_scale, problem.call.v_scale
    if not isinstance(k_scale, torch.Tensor) and not isinstance(v_scale, torch.Tensor):
        names |= {
            "k_scale applied once more": correct * k_scale,
            "k_scale not applied": correct / k_scale,
            "v_scale in place of k_scale": correct / k_scale * v_scale,
        }
    return [
        name
        for name, value in names.items()
        if abs(scale - value) < 5e-3 * abs(value) and not math.isclose(value, correct)
    ]
