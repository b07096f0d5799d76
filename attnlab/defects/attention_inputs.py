"""Sight: what some rows of one sequence are computed from, and what comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnlab.lab.rounding import Rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """What some rows of one sequence see.

    - ``query``: [rows, heads, head_size]; ``position``: [rows] int64.
    - ``key``, ``value``: [keys, heads, head_size], one for each query head; key j stands at position j.
    - ``visible``: [rows, keys] bool.
    - ``scale``: of the scores; ``slopes``: [heads], times (key position + ``shift`` - position), or None;
      ``shift`` is a number, or one for each row, [rows, 1].
    - ``cap``: what becomes of a scaled score before ALiBi, or None; ``softcap``: the soft cap's size.
    - ``sinks``: [heads], a logit that each row counts and that belongs to no key, or None.
    - ``first_bias``: [heads], added to the scores of the key at position 0, or None.
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
    shift: torch.Tensor | int = 0
    cap: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    first_bias: torch.Tensor | None = None
    leak: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """What some rows give: ``output`` and ``noise``, the most by which a kernel that computes this may
    be off; both [rows, heads, head_size] float64."""

    output: torch.Tensor
    noise: torch.Tensor


def join(parts: Sequence[Predicted]) -> Predicted:
    """Return the rows of all parts as one."""
    return Predicted(
        output=torch.cat([part.output for part in parts]),
        noise=torch.cat([part.noise for part in parts]),
    )


def scores_of(sight: AttentionInputs) -> torch.Tensor:
    """Return the scores, [heads, rows, keys], -inf where a row does not see a key."""
    scores = sight.query.transpose(0, 1) @ sight.key.permute(1, 2, 0) * sight.scale
    if sight.cap is not None:
        scores = sight.cap(scores)
    if sight.slopes is not None:
        away = torch.arange(sight.key.shape[0]) + sight.shift - sight.position[:, None]
        scores += sight.slopes[:, None, None] * away.to(scores.dtype)
    if sight.first_bias is not None:
        scores[..., 0] += sight.first_bias[:, None].to(scores.dtype)
    return scores.masked_fill_(~sight.visible, -torch.inf)


def mix(sight: AttentionInputs, like: torch.dtype | None = None) -> Predicted:
    """Return the attention of a sight; a row that sees no key gives NaN.

    With ``like`` it is computed as a kernel does: scores and sums in float32, weights and output
    rounded to that dtype.
    """
    scores = scores_of(sight)
    exact = softmax(scores, sight.sinks)
    finite = sight.value.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
    output = exact @ finite
    noise = sight.rounding.bound(
        exact.nan_to_num(0.0), finite, output.nan_to_num(0.0), score_error(sight)
    )
    if like is not None:
        weights = softmax(scores.float(), sight.sinks).to(like).float()
        output = (weights @ finite.float()).to(like).double()
    if not bool(sight.value.isfinite().all()):
        output = output.masked_fill(_hit(sight), torch.nan)
    return Predicted(output=output.double().transpose(0, 1), noise=noise.double().transpose(0, 1))


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return weights, [heads, rows, keys]; of each row's sum a sink of its head, [heads], takes its
    share."""
    if sinks is None:
        return scores.softmax(-1)
    nothing = sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])
    return torch.cat([scores, nothing], -1).softmax(-1)[..., :-1]


def _hit(sight: AttentionInputs) -> torch.Tensor:
    """Return which elements a value that is not finite reaches, [heads, rows, head_size] bool: those of
    rows that see it, or where it leaks."""
    reach = sight.visible if sight.leak is None else sight.visible | sight.leak
    odd = (~sight.value.isfinite()).transpose(0, 1).to(sight.value.dtype)
    return reach.to(odd.dtype) @ odd > 0


def score_error(sight: AttentionInputs) -> float:
    """Return by how much a score may be off."""
    query = float(sight.query.norm(dim=2).max()) if sight.query.numel() else 0.0
    finite = sight.key.nan_to_num(0.0, 0.0, 0.0)
    key = float(finite.norm(dim=2).max()) if finite.numel() else 0.0
    bias = 0.0
    if sight.slopes is not None:
        bias = float(sight.slopes.abs().max()) * sight.key.shape[0]
    return sight.rounding.score_error(
        query, key, sight.query.shape[2], sight.scale, bias, sight.softcap
    )
