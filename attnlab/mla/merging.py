"""Merges of partial attentions: exact, with the error that a merge in float32 may make.

Two parts a and b with weights w and 1 − w give w·a + (1 − w)·b, where w depends on the difference of their
LSE alone. If that is off by d, then w is off by at most w·(1 − w)·(e^d − 1), because the logistic function σ
has σ(x + d) − σ(x) ≤ σ(x)·(1 − σ(x))·(e^d − 1). So a merge is off by at most the sum of

- w·(error of a) + (1 − w)·(error of b);
- w·(1 − w)·(e^d − 1)·|b − a|, with d the errors of both LSE plus (|difference| + 8)·2⁻²³ for float32;
- 8·2⁻²⁴·(w·|a| + (1 − w)·|b|) for the products in float32;
- the rounding of the result to its dtype.

The merged LSE is off by at most the larger error of the two, plus (|LSE| + 8)·2⁻²³. A combination of n ranks
multiplies each output by exp(LSE of the rank − LSE of all), rounds it to the dtype and adds the results in
the dtype: n roundings of the magnitudes.
"""

from collections.abc import Sequence

import torch

from attnlab.mla.partial import Partial, unit_and_step

_SUMS = 2.0**-23


def merged(first: Partial, second: Partial, dtype: torch.dtype) -> Partial:
    """Return the merge of two exact parts, and by how much an op may be off."""
    lse = torch.logaddexp(first.lse, second.lse)
    weights = [_weight(one.lse, lse) for one in (first, second)]
    (a_error, a_lse), (b_error, b_lse) = first.errors, second.errors
    away = (first.lse - second.lse).abs().nan_to_num(0.0, posinf=0.0)
    shift = (a_lse + b_lse + (away + 8) * _SUMS).clamp(max=80.0)
    moved = (weights[0] * weights[1] * shift.expm1())[..., None] * (
        first.output - second.output
    ).abs()
    w, v = (one[..., None] for one in weights)
    output = w * first.output + v * second.output
    magnitude = w * first.output.abs() + v * second.output.abs()
    unit, step = unit_and_step(dtype)
    error = w * a_error + v * b_error + moved + 4 * _SUMS * magnitude
    lse_error = torch.where(weights[0] > 0, a_lse, 0.0).maximum(
        torch.where(weights[1] > 0, b_lse, 0.0)
    )
    size = lse.masked_fill(lse.isinf(), 0.0).abs()
    return Partial(
        output=output,
        lse=lse,
        output_error=error * (1 + unit) + unit * output.abs() + step,
        lse_error=lse_error + (size + 8) * _SUMS,
    )


def combined(parts: Sequence[Partial], dtype: torch.dtype) -> Partial:
    """Return the combination of the ranks' exact parts, and by how much an op may be off."""
    lse = torch.stack([one.lse for one in parts]).logsumexp(0)
    weights = [_weight(one.lse, lse)[..., None] for one in parts]
    output = sum((w * one.output for w, one in zip(weights, parts, strict=True)), torch.zeros(()))
    largest = torch.stack(
        [torch.where(one.lse == -torch.inf, 0.0, one.errors[1]) for one in parts]
    ).amax(0)
    size = lse.masked_fill(lse.isinf(), 0.0).abs()
    shift = (2 * largest + (size + 8) * 2 * _SUMS).clamp(max=80.0).expm1()[..., None]
    unit, step = unit_and_step(dtype)
    error = torch.zeros_like(parts[0].output)
    for w, one in zip(weights, parts, strict=True):
        magnitude = w * one.output.abs()
        error += w * one.errors[0] + shift * w * (one.output - output).abs()
        error += (len(parts) * unit + 8 * _SUMS * (1 + size[..., None])) * magnitude + len(
            parts
        ) * step
    return Partial(
        output=output,
        lse=lse,
        output_error=error * (1 + unit),
        lse_error=largest + (size + 8) * _SUMS,
    )


def copied(target: Partial, source: Partial, rows: torch.Tensor) -> Partial:
    """Return ``target`` with the rows of ``source`` at ``rows`` [num_tokens] bool."""
    at = rows[:, None]
    pairs = (
        (source.output, target.output, at[..., None]),
        (source.lse, target.lse, at),
        (source.output_error, target.output_error, at[..., None]),
        (source.lse_error, target.lse_error, at),
    )
    found = [None if a is None or b is None else torch.where(c, a, b) for a, b, c in pairs]
    output, lse, output_error, lse_error = found
    assert output is not None
    assert lse is not None
    return Partial(output=output, lse=lse, output_error=output_error, lse_error=lse_error)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (lse - total).exp().nan_to_num(0.0)  # -inf minus -inf: no part has keys
