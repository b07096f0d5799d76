"""How a path computes its steps: exactly in float64 with bounds, or by ops."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attnlab.mla.mla_case import DECODE, PREFILL, SHARDS, MlaCase
from attnlab.mla.ops import NOT_LAST, DecodeCall, Last, MlaOps, in_pages
from attnlab.mla.partial import Partial, Seen, exact_partial, unit_and_step
from attnlab.tensors.formats import FORMATS

# Merges of partial attentions: exact, with the error that a merge in float32 may make.
#
# Two parts a and b with weights w and 1 − w give w·a + (1 − w)·b, where w depends on the difference of
# their LSE alone. If that is off by d, then w is off by at most w·(1 − w)·(e^d − 1), because the logistic
# function σ has σ(x + d) − σ(x) ≤ σ(x)·(1 − σ(x))·(e^d − 1). So a merge is off by at most the sum of
#
# - w·(error of a) + (1 − w)·(error of b);
# - w·(1 − w)·(e^d − 1)·|b − a|, with d the errors of both LSE plus (|difference| + 8)·2⁻²³ for float32;
# - 8·2⁻²⁴·(w·|a| + (1 − w)·|b|) for the products in float32;
# - the rounding of the result to its dtype.
#
# The merged LSE is off by at most the larger error of the two, plus (|LSE| + 8)·2⁻²³. A combination of n
# ranks multiplies each output by exp(LSE of the rank − LSE of all), rounds it to the dtype and adds the
# results in the dtype: n roundings of the magnitudes.

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
    changes: dict[str, Any] = {}
    for name in ("output", "lse", "output_error", "lse_error"):
        old, new = getattr(target, name), getattr(source, name)
        if old is None or new is None:
            changes[name] = None
        else:
            changes[name] = torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)
    return dataclasses.replace(target, **changes)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (lse - total).exp().nan_to_num(0.0)  # -inf minus -inf: no part has keys


class Arithmetic(Protocol):
    """How a path computes its steps."""

    def partial(self, part: Sequence[Seen]) -> Partial: ...
    def decode(self, call: DecodeCall, part: Sequence[Seen]) -> Partial: ...
    def merge(self, one: Partial, other: Partial, last: Last = NOT_LAST) -> Partial: ...
    def combine(self, parts: list[Partial]) -> Partial: ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Float64, with the bounds of ops.

    ``lse_as_run``: the LSE of ranks may have the rounding of the dtype in which the case has it. By default
    it may not: what a combination of ranks loses by it is an error.
    """

    case: MlaCase
    lse_as_run: bool = False

    def partial(self, part: Sequence[Seen]) -> Partial:
        return exact_partial(self.case, part, self.case.partials == "op")

    def decode(self, call: DecodeCall, part: Sequence[Seen]) -> Partial:
        by_op = self.case.path == DECODE or self.case.partials == "op"
        is_run = self.case.path == DECODE or self.lse_as_run
        return exact_partial(self.case, part, by_op, call.lse_dtype if is_run else torch.float32)

    def merge(self, one: Partial, other: Partial, last: Last = NOT_LAST) -> Partial:
        found = merged(one, other, FORMATS[self.case.dtype].dtype)
        if last.tokens_with_context is not None:
            is_new = torch.arange(len(found.lse)) >= last.tokens_with_context
            found = copied(found, other, is_new)
        if last.output_scale is None or last.divisor is None:
            return found
        return self._as_fp8(found, last.output_scale, last.divisor)

    def _as_fp8(self, found: Partial, scale: float, divisor: float) -> Partial:
        """Add the rounding of an FP8 output; numbers beyond its range are clamped."""
        dtype = FORMATS[self.case.machine.fp8_e4m3].dtype
        unit, step = unit_and_step(dtype)
        limit, factor = float(torch.finfo(dtype).max) * scale, scale / divisor
        error, lse_error = found.errors
        output = found.output * factor
        return Partial(
            output=output.clamp(-limit, limit),
            lse=found.lse,
            output_error=error * factor * (1 + unit) + unit * output.abs() + step * scale,
            lse_error=lse_error,
        )

    def combine(self, parts: list[Partial]) -> Partial:
        return combined(parts, FORMATS[self.case.dtype].dtype)


@dataclass(frozen=True, slots=True)
class Observed:
    """The ops of a backend, on tensors of the case's dtype."""

    case: MlaCase
    ops: MlaOps

    def partial(self, part: Sequence[Seen]) -> Partial:
        case, dtype = self.case, FORMATS[self.case.dtype].dtype
        if case.partials == "exact":
            exact = exact_partial(case, part, by_op=False)
            output, lse = exact.output.to(dtype), exact.lse.float()
        else:
            output, lse = self._by_op(part, dtype)
        if case.path == PREFILL and case.empty_lse == "inf":
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return Partial(output=output, lse=lse)

    def _by_op(self, part: Sequence[Seen], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part by decode_attention_fwd, over keys and values of each sequence in pages."""
        case, tokens = self.case, self.case.lengths.num_tokens
        output = torch.zeros(tokens, case.num_heads, case.value_size, dtype=dtype)
        lse = torch.full((tokens, case.num_heads), -torch.inf)
        few = [one.of_keys() for one in part if one.mask.any()]
        if not few:
            return output, lse
        key, table = in_pages([one.sequence.key.to(dtype) for one in few], case.block_size)
        value, _ = in_pages([one.sequence.value.to(dtype) for one in few], case.block_size)
        rows = torch.cat([torch.arange(tokens)[one.sequence.rows] for one in few])
        counts = torch.tensor([one.sequence.query.shape[0] for one in few])
        call = DecodeCall(
            query=torch.cat([one.sequence.query for one in few]).to(dtype),
            key=key,
            value=value,
            table=table.repeat_interleave(counts, 0),
            lens=torch.cat([one.mask.sum(1) for one in few]).int(),
            num_splits=4,
            scale=case.scale,
            k_scale=1.0,
            is_mla=False,
        )
        output[rows], lse[rows] = self.ops.decode(call)
        return output, lse

    def decode(self, call: DecodeCall, part: Sequence[Seen]) -> Partial:
        if self.case.partials == "exact" and self.case.path == SHARDS:
            exact = exact_partial(self.case, part, by_op=False)
            pair = exact.output.to(call.query.dtype), exact.lse.to(call.lse_dtype)
        else:
            pair = self.ops.decode(call)
        return Partial(output=pair[0], lse=pair[1].float())

    def merge(self, one: Partial, other: Partial, last: Last = NOT_LAST) -> Partial:
        scale, dtype = last.output_scale, one.output.dtype
        if scale is not None:
            dtype = FORMATS[self.case.machine.fp8_e4m3].dtype
        parts = (one.output, one.lse), (other.output, other.lse)
        output, lse = self.ops.merge(*parts, dtype, last)
        return Partial(output=output if scale is None else output.float() * scale, lse=lse)

    def combine(self, parts: list[Partial]) -> Partial:
        outputs = torch.stack([one.output for one in parts])
        output, lse = self.ops.combine(outputs, torch.stack([one.lse for one in parts]))
        return Partial(output=output, lse=lse.float())
