"""The reference of Cases with an op argument: attention in float64 under any mask, for small Cases.

Scores of all heads, rows and keys of a sequence are in memory at once. So are the weights from which the
rounding bound follows (:mod:`attnlab.lab.rounding`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.case.ops import PREFILL
from attnlab.contracts.contract import Target
from attnlab.lab.reference import Reference, stored_tokens
from attnlab.lab.rounding import Int4Rounding, Rounding
from attnlab.tensors.batch import Batch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_visibility import visibility_of
from attnlab.tensors.formats import FORMATS, int4_scale
from attnlab.tensors.quantised import (
    OUTPUT_SCALE,
    QUERY_SCALE,
    decoded_numbers,
    latent_size,
    narrow_size,
    stored_numbers,
)

# Wrong reads of a cache in another format, by name: what a diagnosis of an op argument compares.
#
# A read changes what is stored for the tokens of one sequence, keys and values, before it is decoded.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredHalf:
    """What is stored for the keys or the values of a sequence.

    ``numbers``: [seq_len, num_kv_heads, size] in the format; ``scale``: [seq_len, num_kv_heads] float32, or
    None without a scale per token and head.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None = None


_NO_MASK: dict[str, Any] = {"mask": CAUSAL, **dict.fromkeys(MASK_DATA)}


def wrong_masks(case: Case) -> dict[str, Case]:
    """Return the Cases that the op runs if it ignores the Case's mask, or its window, by name."""
    if case.mask == CAUSAL:
        return {}
    found = {"mask_ignored": case.replace(**_NO_MASK)}
    if case.sliding_window:
        found["mask_and_window_ignored"] = case.replace(**_NO_MASK, sliding_window=0)
    if case.mask == "ranges_in_window":
        found["window_within_ranges_ignored"] = case.replace(mask="ranges")
    return found


Halves = tuple[StoredHalf, StoredHalf]
Read = Callable[[Case, StoredHalf, StoredHalf], Halves]


def wrong_reads(case: Case) -> Mapping[str, Read]:
    """Return the wrong reads that the Case's op argument may have."""
    if case.op_argument == "diffkv":
        return {"values_one_element_early": _early_values}
    if case.argument.cache is None:
        return {}
    return _NIBBLES | _SCALES if case.argument.is_packed else _SCALES | _POWERS


def _of_slot(move: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., StoredHalf]:
    """Return the change that reads the scale of another slot of the block, NaN if nothing is stored there."""

    def change(case: Case, half: StoredHalf) -> StoredHalf:
        size, at = case.block_size, torch.arange(len(half.numbers))
        source = at // size * size + move(at % size, size)
        return _with_scale(half, source)

    return change


def _with_scale(half: StoredHalf, source: torch.Tensor) -> StoredHalf:
    """Return the half with the scale of the token ``source`` [seq_len] in place of each token's own."""
    assert half.scale is not None
    inside = source < len(half.scale)
    scale = half.scale[source.clamp(max=len(half.scale) - 1)].clone()
    scale[~inside] = float("nan")
    return replace(half, scale=scale)


def _next_head(case: Case, half: StoredHalf) -> StoredHalf:
    assert half.scale is not None
    return replace(half, scale=half.scale.roll(-1, dims=1))


def _first_token(case: Case, half: StoredHalf) -> StoredHalf:
    return _with_scale(half, torch.zeros(len(half.numbers), dtype=torch.int64))


def _power(exponent: int) -> Callable[[Case, StoredHalf], StoredHalf]:
    """Return the change that applies a scale ``exponent`` times."""

    def change(case: Case, half: StoredHalf) -> StoredHalf:
        assert half.scale is not None
        return replace(half, scale=half.scale**exponent)

    return change


_CHANGES: dict[str, Callable[[Case, StoredHalf], StoredHalf]] = {
    "previous_slot": _of_slot(lambda at, size: (at - 1) % size),
    "next_slot": _of_slot(lambda at, size: (at + 1) % size),
    "first_slot_of_the_block": _of_slot(lambda at, size: torch.zeros_like(at)),
    "first_token": _first_token,
    "next_kv_head": _next_head,
}


def _both(change: Callable[[Case, StoredHalf], StoredHalf]) -> Read:
    return lambda case, key, value: (change(case, key), change(case, value))


def _keys(change: Callable[[Case, StoredHalf], StoredHalf]) -> Read:
    return lambda case, key, value: (change(case, key), value)


def _values(change: Callable[[Case, StoredHalf], StoredHalf]) -> Read:
    return lambda case, key, value: (key, change(case, value))


def _swapped(case: Case, half: StoredHalf) -> StoredHalf:
    return replace(half, numbers=(half.numbers >> 4) | (half.numbers << 4))


def _early_values(case: Case, key: StoredHalf, value: StoredHalf) -> Halves:
    """Return values that begin with the last element of the key, as they lie in the cache."""
    numbers = torch.cat([key.numbers[..., -1:], value.numbers[..., :-1]], -1)
    return key, replace(value, numbers=numbers)


_SCALES: dict[str, Read] = {
    **{f"{where}_scale": _both(change) for where, change in _CHANGES.items()},
    **{f"{where}_k_scale": _keys(change) for where, change in _CHANGES.items()},
    **{f"{where}_v_scale": _values(change) for where, change in _CHANGES.items()},
    "k_scale_for_values": lambda case, key, value: (key, replace(value, scale=key.scale)),
    "v_scale_for_keys": lambda case, key, value: (replace(key, scale=value.scale), value),
    "k_scale_and_v_scale_exchanged": lambda case, key, value: (
        replace(key, scale=value.scale),
        replace(value, scale=key.scale),
    ),
}
# Of a packed format, a scale also holds a zero point.
_POWERS: dict[str, Read] = {
    name: apply(_power(exponent))
    for what, apply in (("scale", _both), ("k_scale", _keys), ("v_scale", _values))
    for name, exponent in ((f"{what}_not_applied", 0), (f"{what}_applied_twice", 2))
}
_NIBBLES: dict[str, Read] = {
    "nibbles_exchanged": _both(_swapped),
    "k_nibbles_exchanged": _keys(_swapped),
    "v_nibbles_exchanged": _values(_swapped),
}


_FP8_UNIT, _FP8_STEP = 2.0**-4, 2.0**-10  # of e4m3: half the spacing at 1, half the smallest number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """One sequence, in float64.

    - ``rows``: its rows of the output. ``query``: [num_heads, query_len, head_size]; ``key``, ``value``:
      [num_heads, seq_len, head_size]; ``weights``: [num_heads, query_len, seq_len].
    - ``bias``: the largest magnitude that was added to a score.
    - ``ranges``: of INT4, 15 times the scale of each key and value, each [num_heads, seq_len].
    """

    rows: slice
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    bias: float
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None


def reference_with_argument(case: Case, batch: Batch, read: Read | None = None) -> Reference:
    """Return the right result of a Case with an op argument, without the log-sum-exp.

    It is computed on the CPU, and lies on the batch's device. ``read``: a wrong read of the cache, for the
    result that it gives.
    """
    dtype = torch.float64 if case.reference_dtype == "float64" else torch.float32
    output = torch.empty(batch.query.shape, dtype=dtype)
    for one in _sequences(case, batch.cpu(), read):
        output[one.rows] = (one.weights @ one.value).transpose(0, 1).to(dtype)
    output[_unwritten(case)] = 0.0
    return Reference(output=output.to(batch.query.device), lse=None)


def bound_with_argument(
    case: Case,
    batch: Batch,
    call: KernelCall,
    kernels: Sequence[str],
    *,
    is_native: bool = False,
) -> torch.Tensor:
    """Return by how much each element may be off, [num_tokens, num_heads, head_size] float32.

    It is computed on the CPU, and lies on the batch's device. ``is_native``: the kernels ran on a GPU, not
    under Triton's interpreter.
    """
    bound = torch.empty(batch.query.shape)
    for one in _sequences(case, batch.cpu()):
        rounding = _rounding(case, call, kernels, one)
        size = float(one.query.norm(dim=2).max()), float(one.key.norm(dim=2).max())
        error = rounding.score_error(
            *size, case.head_size, _scale(case), one.bias, case.softcap or 0.0
        )
        output = one.weights @ one.value
        if one.ranges is None:
            found = rounding.bound(one.weights, one.value, output, error)
        else:
            keys, values = one.ranges
            int4 = Int4Rounding.of(rounding, is_native)
            error += int4.score_error(*size, float(keys.max()), case.head_size, _scale(case))
            found = int4.bound(one.weights, one.value, values, error)
        if case.op_argument == "fp8_output":
            found = found * (1 + _FP8_UNIT) + output.abs() * _FP8_UNIT + _FP8_STEP * OUTPUT_SCALE
        bound[one.rows] = found.transpose(0, 1).float()
    bound[_unwritten(case)] = 0.0
    return bound.to(batch.query.device)


def _rounding(case: Case, call: KernelCall, kernels: Sequence[str], one: _Sequence) -> Rounding:
    """Return what the kernels round for a sequence."""
    is_prefill = PREFILL in kernels and (one.query.shape[1] > 1 or len(kernels) == 1)
    serving = (PREFILL,) if is_prefill else tuple(name for name in kernels if name != PREFILL)
    return argument_rounding(case, Rounding.of(call, Target.of(case), serving))


def argument_rounding(case: Case, rounding: Rounding) -> Rounding:
    """Return what kernels round with a Case's op argument; ``rounding``: what they round without it."""
    if case.op_argument == "fp8_query":  # weights times 256 are rounded to FP8
        terms = 1 + round(_FP8_UNIT / rounding.unit)
        return dataclasses.replace(rounding, terms=terms, step=_FP8_STEP / 128)
    if case.argument.cache and not case.argument.is_packed:  # weights times a scale are rounded
        return dataclasses.replace(rounding, step=rounding.step * 448)
    return rounding


def _sequences(case: Case, batch: Batch, read: Read | None = None) -> Iterator[_Sequence]:
    rows, tokens = batch.token_start_loc, batch.kv_start_loc
    for seq, cached in enumerate(batch.lengths.cached_lens(case.spec.fill_read)):
        here, own = slice(rows[seq], rows[seq + 1]), slice(tokens[seq], tokens[seq + 1])
        query = query_as_read(case, batch.query[here]).double().transpose(0, 1)
        key, value = (
            one.double().transpose(0, 1).repeat_interleave(case.num_queries_per_kv, 0)
            for one in _stored(case, batch.key[own], batch.value[own], cached, read)
        )
        found = _attended(case, batch, seq, here, query, key, value)
        if case.argument.is_packed:
            ranges = (_range(case, batch.key[own]), _range(case, batch.value[own]))
            found = dataclasses.replace(found, ranges=ranges)
        yield found


def _range(case: Case, tokens: torch.Tensor) -> torch.Tensor:
    """Return 15 times the scale of each token and query head of INT4, [num_heads, seq_len] float64."""
    scales = 15 * int4_scale(stored_numbers(case, tokens)[1])
    return scales.T.repeat_interleave(case.num_queries_per_kv, 0)


def _attended(
    case: Case,
    batch: Batch,
    seq: int,
    rows: slice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> _Sequence:
    """Return a sequence with its weights."""
    query_len, seq_len = query.shape[1], key.shape[1]
    scores = query @ key.transpose(1, 2) * _scale(case)
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    at, keys = torch.arange(seq_len - query_len, seq_len)[:, None], torch.arange(seq_len)
    mask = visibility_of(case).of_seq(seq, seq_len - query_len, seq_len)
    added = _bias(case, batch, at, keys, mask.bias(at[:, 0]))
    scores = (scores + added).masked_fill(~mask.visible(at[:, 0]), -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if batch.sinks is not None and case.op_argument != "sinks_of_key_0":
        total = total.logaddexp(batch.sinks.double()[:, None, None])
    return _Sequence(
        rows=rows,
        query=query,
        key=key,
        value=value,
        weights=(scores - total).exp(),
        bias=float(added.abs().max()),
    )


def _scale(case: Case) -> float:
    return case.head_size**-0.5 if case.sm_scale is None else case.sm_scale


def query_as_read(case: Case, query: torch.Tensor) -> torch.Tensor:
    """Return the query as the op reads it, or tokens that are passed as the query is."""
    if case.op_argument != "fp8_query":
        return query
    format = FORMATS[case.machine.fp8_e4m3]
    return format.decode(format.encode(query, QUERY_SCALE), QUERY_SCALE)


def _stored(
    case: Case, key: torch.Tensor, value: torch.Tensor, cached: int, read: Read | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value of a sequence as the op reads them; ``read``: a wrong read, or None."""
    name = case.op_argument
    if name == "latent_cache":
        key = stored_tokens(case, key, cached, case.k_scale)
        value = key.clone()
        value[..., latent_size(case) :] = 0.0
        return key, value
    cached = len(key) if name == "cached_new_tokens" else cached
    halves = (
        _half(case, key, cached, case.k_scale),
        _half(case, value, cached, case.v_scale),
    )
    keys, values = halves if read is None else read(case, *halves)
    key, value = _decoded(case, keys), _decoded(case, values)
    if name == "diffkv":
        value = value.clone()
        value[..., narrow_size(case) :] = 0.0
    return key, value


def _half(case: Case, tokens: torch.Tensor, cached: int, scale: float) -> StoredHalf:
    """Return what is stored for keys or values [seq_len, num_kv_heads, head_size]."""
    if case.spec.cache_layout is None:
        return StoredHalf(numbers=query_as_read(case, tokens))
    if case.argument.cache is None:
        return StoredHalf(numbers=stored_tokens(case, tokens, cached, scale))
    stored, scales = stored_numbers(case, tokens)
    return StoredHalf(numbers=stored, scale=scales)


def _decoded(case: Case, half: StoredHalf) -> torch.Tensor:
    """Return the tokens that are stored, [seq_len, num_kv_heads, head_size]."""
    if half.scale is None:
        return half.numbers
    return decoded_numbers(case, half.numbers, half.scale)


def _bias(
    case: Case, batch: Batch, at: torch.Tensor, keys: torch.Tensor, of_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return what is added to the scores, [num_heads or 1, rows, keys] float64.

    ``at``: [rows, 1], positions of the rows; ``keys``: [keys], all positions; ``of_mask``: [rows, keys].
    """
    added = torch.zeros(1, len(at), len(keys), dtype=torch.float64)
    if batch.alibi_slopes is not None:
        distance = (keys - at).double()
        if case.op_argument == "alibi_sqrt":
            distance = -(-distance).clamp(min=0).sqrt()
        added = batch.alibi_slopes.double()[:, None, None] * distance
    if batch.sinks is not None and case.op_argument == "sinks_of_key_0":
        added = batch.sinks.double()[:, None, None] * (keys == 0)
    return added if of_mask is None else added + of_mask.double()


def _unwritten(case: Case) -> torch.Tensor:
    """Return which rows the op leaves unwritten, [num_tokens] bool."""
    lengths: Lengths = case.lengths
    if case.op_argument != "skip_decode":
        return torch.zeros(lengths.num_tokens, dtype=torch.bool)
    return torch.cat([torch.full((n,), n == 1) for n in lengths.query_lens])
