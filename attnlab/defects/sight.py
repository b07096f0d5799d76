"""Sight: what some rows of one sequence are computed from, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.noise import Rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """What some rows of one sequence see.

    - ``query``: [rows, heads, head_size]; ``position``: [rows] int64.
    - ``key``, ``value``: [keys, heads, head_size], one for each query head; key j stands at position j.
    - ``visible``: [rows, keys] bool.
    - ``scale``: of the scores; ``slopes``: [heads], times (key position + ``shift`` - position), or None.
    - ``sink``: whether a logit of 0 is counted that belongs to no key.
    - ``leak``: [rows, keys] bool, keys that have no weight but whose values are multiplied by it, or
      None.
    - ``rounding``: what the kernel that serves these rows rounds.
    """

    query: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor
    scale: float
    slopes: torch.Tensor | None
    rounding: Rounding
    shift: int = 0
    sink: bool = False
    leak: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixed:
    """What some rows give: ``output`` and ``noise``, the most by which a kernel that computes this may
    be off; both [rows, heads, head_size] float64."""

    output: torch.Tensor
    noise: torch.Tensor


def join(parts: Sequence[Mixed]) -> Mixed:
    """Return the rows of all parts as one."""
    return Mixed(
        output=torch.cat([part.output for part in parts]),
        noise=torch.cat([part.noise for part in parts]),
    )


def scores_of(sight: Sight) -> torch.Tensor:
    """Return the scores, [heads, rows, keys], -inf where a row does not see a key."""
    scores = sight.query.transpose(0, 1) @ sight.key.permute(1, 2, 0) * sight.scale
    if sight.slopes is not None:
        away = torch.arange(sight.key.shape[0]) + sight.shift - sight.position[:, None]
        scores += sight.slopes[:, None, None] * away.to(scores.dtype)
    return scores.masked_fill_(~sight.visible, -torch.inf)


def mix(sight: Sight, like: torch.dtype | None = None) -> Mixed:
    """Return the attention of a sight; a row that sees no key gives NaN.

    With ``like`` it is computed as a kernel does: scores and sums in float32, weights and output
    rounded to that dtype.
    """
    scores = scores_of(sight)
    if like is not None:
        scores = scores.float()
    weights = softmax(scores, sight.sink)
    value = sight.value.transpose(0, 1)
    if like is not None:
        weights, value = weights.to(like).float(), value.float()
    output, magnitude = weigh(weights, value, sight)
    if like is not None:
        output = output.to(like)
    noise = magnitude * relative(sight) + fixed(sight)
    return Mixed(output=output.double().transpose(0, 1), noise=noise.double().transpose(0, 1))


def softmax(scores: torch.Tensor, sink: bool) -> torch.Tensor:
    """Return weights, [heads, rows, keys]; with a sink one logit of 0 takes its share."""
    if not sink:
        return scores.softmax(-1)
    nothing = torch.zeros_like(scores[..., :1])
    return torch.cat([scores, nothing], -1).softmax(-1)[..., :-1]


def weigh(
    weights: torch.Tensor, value: torch.Tensor, sight: Sight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights × value and weights × |value|, [heads, rows, head_size].

    A value that is not finite counts only for rows that see it, or where it leaks.
    """
    if bool(value.isfinite().all()):
        return weights @ value, weights @ value.abs()
    finite = value.nan_to_num(0.0, 0.0, 0.0)
    output, magnitude = weights @ finite, weights @ finite.abs()
    reach = sight.visible if sight.leak is None else sight.visible | sight.leak
    hit = reach.to(value.dtype) @ (~value.isfinite()).to(value.dtype) > 0
    return output.masked_fill(hit, torch.nan), magnitude


def relative(sight: Sight) -> float:
    """Return the share of the mixed magnitudes that a kernel's output may be off by."""
    finite = sight.key.nan_to_num(0.0, 0.0, 0.0)
    query = float(sight.query.norm(dim=2).max()) if sight.query.numel() else 0.0
    key = float(finite.norm(dim=2).max()) if finite.numel() else 0.0
    bias = 0.0
    if sight.slopes is not None:
        bias = float(sight.slopes.abs().max()) * sight.key.shape[0]
    error = sight.rounding.score_error(query, key, sight.query.shape[2], sight.scale, bias)
    return sight.rounding.relative(sight.key.shape[0], error)


def fixed(sight: Sight) -> float:
    """Return the part of the bound that does not shrink with the values."""
    largest = sight.value.nan_to_num(0.0, 0.0, 0.0).abs()
    return sight.rounding.fixed(len(largest), float(largest.max()) if largest.numel() else 0.0)
