"""Fits of measured weights: how log weights depend on scores and distances, and sums."""

from dataclasses import dataclass

import torch

from attnlab.weights.plan import Plan

_LEAST = 200.0  # a weight is used if it is so many times the absolute precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A linear fit of the log weight, with a constant per row and head.

    - ``score``: the slope against the expected score, 1 is right; ``score_error``: its standard error.
    - ``distance``: the slopes against the key's distance in addition to ALiBi's expected bias, by head, [H].
    - ``spread``: the standard deviation of the residuals; ``count``: the number of weights in the fit.
    """

    score: float
    score_error: float
    distance: tuple[float, ...]
    spread: float
    count: int


def usable(plan: Plan, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the measured weight of each entry [R, H, E], and whether it is large enough for a fit."""
    setup = plan.setup
    slots = plan.value_slot.clamp(min=0)[:, None].expand(-1, weights.shape[1], -1)
    measured = weights.gather(2, slots)
    floor = setup.fixed[:, None, None] * _LEAST
    seen = (plan.visible == 1) & (plan.value_slot >= 0)
    return measured, seen[:, None] & (measured > floor)


def fit_law(plan: Plan, weights: torch.Tensor, *, with_distance: bool) -> Law | None:
    """Fit the log of the measured weights [R, H, N] of the keys that the plan sees.

    Returns None if there are too few.
    """
    measured, used = usable(plan, weights)
    used &= used.sum(-1, keepdim=True) > 2
    count = int(used.sum())
    if count < 8:
        return None
    bias = plan.logits() - plan.scores() * plan.power
    target = measured.clamp(min=1e-300).log() - bias
    columns = [plan.scores()]
    distance = plan.distance()[:, None].expand_as(target)
    heads = weights.shape[1]
    if with_distance:
        for head in range(heads):
            one = torch.zeros_like(target)
            one[:, head] = distance[:, head]
            columns.append(one)
    design = torch.stack([_centred(column, used) for column in columns], -1)[used]
    values = _centred(target, used)[used]
    if float(design[:, 0].square().mean()) < 1e-12:
        return None
    solution = _least_squares(design, values)
    residual = values - design @ solution
    spread = float(residual.square().mean().sqrt())
    error = spread / float(design[:, 0].square().sum().sqrt())
    return Law(
        score=float(solution[0]),
        score_error=error,
        distance=tuple(solution[1:].tolist()),
        spread=spread,
        count=count,
    )


def _least_squares(design: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the solution [columns] of design [n, columns] × solution = values [n].

    A GPU only sums products, because its solvers refuse columns that depend on each other.
    """
    where = design.device
    if where.type != "cpu":
        design, values = (design.T @ design).cpu(), (design.T @ values).cpu()
    solution: torch.Tensor = torch.linalg.lstsq(design, values[:, None]).solution[:, 0]
    return solution.to(where)


def _centred(values: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return the values minus their mean over the used entries of each row and head."""
    values = torch.where(used, values, 0.0)
    count = used.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(used, values - values.sum(-1, keepdim=True) / count, 0.0)
