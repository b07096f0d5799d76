"""AttentionInputs: what some rows of one sequence attend to, and the attention computed from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnlab.lab.rounding import Rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """The inputs of attention for some rows of one sequence.

    - ``query``: [rows, heads, head_size]; ``position``: [rows] int64, positions in the sequence.
    - ``key``, ``value``: [keys, heads, head_size], expanded to one per query head; key j has position j.
    - ``visible``: [rows, keys] bool.
    - ``sm_scale``: the factor of the scores.
    - ``alibi_slopes``: [heads] or None; the bias is the slope times
      (key position + ``alibi_shift`` - row position). ``alibi_shift`` is an int or [rows, 1].
    - ``apply_softcap``: the function applied to the scaled scores before ALiBi, or None; ``softcap``:
      the cap itself, 0 for none.
    - ``sinks``: [heads], one more logit of each row's softmax without a value, or None.
    - ``first_bias``: [heads], added to the score of the key at position 0, or None.
    - ``key_bias``: [keys], added to the score of each key, or None. ``mask_bias``: [rows, n], added to the
      scores of the first n keys, or None (qq_bias).
    - ``weigh``: replaces the softmax of the scores [heads, rows, keys], or None.
    - ``leak``: [rows, keys] bool or None: keys with weight 0 whose values are multiplied by it, so that
      a NaN reaches the output.
    - ``rounding``: what the kernel that computes these rows rounds.
    """

    query: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor
    sm_scale: float
    alibi_slopes: torch.Tensor | None
    rounding: Rounding
    alibi_shift: torch.Tensor | int = 0
    apply_softcap: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    first_bias: torch.Tensor | None = None
    leak: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    mask_bias: torch.Tensor | None = None
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """The predicted ``output`` of some rows, and ``bound``, the largest rounding error of a kernel that
    computes it; both [rows, heads, head_size] float64.

    ``sees_nothing``: [rows] bool or None: rows that see no key. Their output is 0, as most kernels return;
    others return NaN, the quotient of 0 and 0.
    """

    output: torch.Tensor
    bound: torch.Tensor
    sees_nothing: torch.Tensor | None = None


def concatenate(parts: Sequence[Predicted]) -> Predicted:
    """Concatenate the rows of all parts."""
    return Predicted(
        output=torch.cat([part.output for part in parts]),
        bound=torch.cat([part.bound for part in parts]),
        sees_nothing=_concatenated(parts),
    )


def _concatenated(parts: Sequence[Predicted]) -> torch.Tensor:
    """Return which rows of all parts see no key."""
    none = [torch.zeros(len(part.output), dtype=torch.bool) for part in parts]
    return torch.cat(
        [
            n if part.sees_nothing is None else part.sees_nothing
            for part, n in zip(parts, none, strict=True)
        ]
    )


def scores_of(inputs: AttentionInputs) -> torch.Tensor:
    """Return the scores, [heads, rows, keys], -inf where a row does not see a key."""
    scores = inputs.query.transpose(0, 1) @ inputs.key.permute(1, 2, 0) * inputs.sm_scale
    if inputs.apply_softcap is not None:
        scores = inputs.apply_softcap(scores)
    if inputs.alibi_slopes is not None:
        key_position = torch.arange(inputs.key.shape[0]) + inputs.alibi_shift
        distance = key_position - inputs.position[:, None]
        scores += inputs.alibi_slopes[:, None, None] * distance.to(scores.dtype)
    if inputs.first_bias is not None:
        scores[..., 0] += inputs.first_bias[:, None].to(scores.dtype)
    if inputs.key_bias is not None:
        scores += inputs.key_bias.to(scores.dtype)
    if inputs.mask_bias is not None:
        scores[..., : inputs.mask_bias.shape[1]] += inputs.mask_bias.to(scores.dtype)
    return scores.masked_fill_(~inputs.visible, -torch.inf)


def attention(inputs: AttentionInputs, dtype: torch.dtype | None = None) -> Predicted:
    """Compute the attention of some rows; a row that sees no key gives 0.

    With ``dtype``, round as a kernel does: scores and sums in float32, weights and output in ``dtype``.
    """
    scores = scores_of(inputs)
    sees_nothing = ~inputs.visible.any(1)
    exact = weights_of(inputs, scores).masked_fill(sees_nothing[None, :, None], 0.0)
    finite = inputs.value.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
    output = exact @ finite
    bound = inputs.rounding.bound(
        exact.nan_to_num(0.0).abs(), finite, output.nan_to_num(0.0), score_error(inputs)
    )
    if dtype is not None:
        weights = weights_of(inputs, scores.float()).to(dtype).float()
        weights = weights.masked_fill(sees_nothing[None, :, None], 0.0)
        output = (weights @ finite.float()).to(dtype).double()
    if not bool(inputs.value.isfinite().all()):
        output = output.masked_fill(_reached_by_nonfinite(inputs), torch.nan)
    return Predicted(
        output=output.double().transpose(0, 1),
        bound=bound.double().transpose(0, 1),
        sees_nothing=sees_nothing if bool(sees_nothing.any()) else None,
    )


def weights_of(inputs: AttentionInputs, scores: torch.Tensor) -> torch.Tensor:
    """Return the weights of the keys, [heads, rows, keys], from their scores."""
    if inputs.weigh is not None:
        return inputs.weigh(scores)
    return softmax(scores, inputs.sinks)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights, [heads, rows, keys]; ``sinks`` [heads] add to each row's sum of exponentials."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]


def _reached_by_nonfinite(inputs: AttentionInputs) -> torch.Tensor:
    """Return which elements depend on a value that is not finite, [heads, rows, head_size] bool: in rows
    that see the key, or to which it leaks."""
    reach = inputs.visible if inputs.leak is None else inputs.visible | inputs.leak
    nonfinite = (~inputs.value.isfinite()).transpose(0, 1).to(inputs.value.dtype)
    return reach.to(nonfinite.dtype) @ nonfinite > 0


def score_error(inputs: AttentionInputs) -> float:
    """Return the largest rounding error of a score."""
    query = float(inputs.query.norm(dim=2).max()) if inputs.query.numel() else 0.0
    finite = inputs.key.nan_to_num(0.0, 0.0, 0.0)
    key = float(finite.norm(dim=2).max()) if finite.numel() else 0.0
    bias = 0.0
    if inputs.alibi_slopes is not None:
        bias = float(inputs.alibi_slopes.abs().max()) * inputs.key.shape[0]
    if inputs.mask_bias is not None:
        bias += float(inputs.mask_bias.abs().max())
    return inputs.rounding.score_error(
        query, key, inputs.query.shape[2], inputs.sm_scale, bias, inputs.softcap
    )
