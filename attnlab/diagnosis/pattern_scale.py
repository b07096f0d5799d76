"""The one scale of the scores that reproduces the wrong cells, if there is one."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from attnlab.defects.attention_inputs import scores_of, softmax
from attnlab.defects.problem import Problem
from attnlab.diagnosis.parts import Part, fits, is_over_determined, num_cells
from attnlab.diagnosis.pattern import Fact

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
        return _fact(what, many, {"scale": 0.0, "ratio": 0.0, "names": ["no scores"]})
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
    return _fact(what, many, {"scale": scale, "ratio": ratio, "names": names})


def _fact(what: str, many: Sequence[Part], values: dict[str, Any]) -> Fact:
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
