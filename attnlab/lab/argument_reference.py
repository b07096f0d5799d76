"""Op arguments of Cases in numbers: what the op reads, and what it rounds.

A cache with a scale per token and head, a query in FP8 or values that are a part of the keys are the same
attention over other numbers. :func:`in_numbers` returns these, so that the reference, the defects and the
rules of a Case with an op argument are those of a plain one (:class:`attnlab.lab.problem.Problem`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.lab.reference import Rounding
from attnlab.tensors.cache import MOST_COPIED, Batch, interleaved
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.quantised import (
    OUTPUT_SCALE,
    QUERY_SCALE,
    Formats,
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


Halves = tuple[StoredHalf, StoredHalf]
Read = Callable[[Case, StoredHalf, StoredHalf], Halves]


def wrong_reads(case: Case) -> Mapping[str, Read]:
    """Return the wrong reads that the Case's op argument may have."""
    if case.op_argument == "diffkv":
        return {"values_one_element_early": _early_values}
    if case.argument.cache is None:
        return {}
    return _NIBBLES | _SCALES if case.argument.is_packed else _SCALES | _POWERS


def _of_slot(
    move: Callable[[torch.Tensor, int], torch.Tensor], case: Case, half: StoredHalf
) -> StoredHalf:
    """Return the half with the scale of another slot of the block, NaN if nothing is stored there."""
    size, at = case.block_size, torch.arange(len(half.numbers))
    return _with_scale(half, at // size * size + move(at % size, size))


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


def _power(exponent: int, case: Case, half: StoredHalf) -> StoredHalf:
    """Return the half as if its scale was applied ``exponent`` times."""
    assert half.scale is not None
    return replace(half, scale=half.scale**exponent)


_Change = Callable[[Case, StoredHalf], StoredHalf]
_CHANGES: dict[str, _Change] = {
    "previous_slot": partial(_of_slot, lambda at, size: (at - 1) % size),
    "next_slot": partial(_of_slot, lambda at, size: (at + 1) % size),
    "first_slot_of_the_block": partial(_of_slot, lambda at, size: torch.zeros_like(at)),
    "first_token": _first_token,
    "next_kv_head": _next_head,
}


_SIDES = ("", "k_", "v_")


def _of_side(side: str, change: _Change, case: Case, key: StoredHalf, value: StoredHalf) -> Halves:
    """Return changed keys and values, or keys ("k_") or values ("v_") alone."""
    changed = key if side == "v_" else change(case, key)
    return changed, value if side == "k_" else change(case, value)


def _swapped(case: Case, half: StoredHalf) -> StoredHalf:
    return replace(half, numbers=(half.numbers >> 4) | (half.numbers << 4))


def _early_values(case: Case, key: StoredHalf, value: StoredHalf) -> Halves:
    """Return values that begin with the last element of the key, as they lie in the cache."""
    numbers = torch.cat([key.numbers[..., -1:], value.numbers[..., :-1]], -1)
    return key, replace(value, numbers=numbers)


_SCALES: dict[str, Read] = {
    **{
        f"{where}_{side}scale": partial(_of_side, side, change)
        for side in _SIDES
        for where, change in _CHANGES.items()
    },
    "k_scale_for_values": lambda case, key, value: (key, replace(value, scale=key.scale)),
    "v_scale_for_keys": lambda case, key, value: (replace(key, scale=value.scale), value),
    "k_scale_and_v_scale_exchanged": lambda case, key, value: (
        replace(key, scale=value.scale),
        replace(value, scale=key.scale),
    ),
}
# Of a packed format, a scale also holds a zero point.
_POWERS: dict[str, Read] = {
    f"{side}scale_{how}": partial(_of_side, side, partial(_power, exponent))
    for side in _SIDES
    for how, exponent in (("not_applied", 0), ("applied_twice", 2))
}
_NIBBLES: dict[str, Read] = {
    f"{side}nibbles_exchanged": partial(_of_side, side, _swapped) for side in _SIDES
}


_FP8_UNIT, _FP8_STEP = 2.0**-4, 2.0**-10  # of e4m3: half the spacing at 1, half the smallest number


def argument_rounding(case: Case, rounding: Rounding) -> Rounding:
    """Return what kernels round with a Case's op argument; ``rounding``: what they round without it."""
    if case.op_argument == "fp8_query":  # weights times 256 are rounded to FP8
        terms = 1 + round(_FP8_UNIT / rounding.unit)
        return replace(rounding, terms=terms, step=_FP8_STEP / 128)
    if case.argument.cache and not case.argument.is_packed:  # weights times a scale are rounded
        return replace(rounding, step=rounding.step * 448)
    return rounding


def argument_formats(case: Case, call: KernelCall) -> Formats:
    """Return how the op of a Case with an op argument stores its query and output."""
    e4m3 = case.machine.fp8_e4m3
    if case.op_argument == "fp8_output":
        call = replace(call, output_scale=OUTPUT_SCALE)
    return Formats.of_scaled(call, e4m3) or Formats.of(call, e4m3)


def query_as_read(case: Case, query: torch.Tensor) -> torch.Tensor:
    """Return the query as the op reads it, or tokens that are passed as the query is."""
    if case.op_argument != "fp8_query":
        return query
    format = FORMATS[case.machine.fp8_e4m3]
    return format.decode(format.encode(query, QUERY_SCALE), QUERY_SCALE)


def in_numbers(
    case: Case, batch: Batch, call: KernelCall, read: Read | None = None
) -> tuple[Batch, KernelCall]:
    """Return a Case's batch and call with the numbers that the op reads, on the CPU.

    An FP8 cache with one scale stays as it is. ``read``: a wrong read of the batch's keys and values.
    """
    batch, call = batch.cpu(), call.cpu()
    starts = batch.kv_start_loc
    seqs = [slice(*ends) for ends in pairwise(starts)]
    parts = [_as_read(case, batch.key[one], batch.value[one], read) for one in seqs]
    keys, values = (torch.cat(halves) for halves in zip(*parts, strict=True))
    query = query_as_read(case, batch.query)
    new = _as_read(case, call.key, call.value)
    changes: dict[str, Any] = {"query": query, "key": new[0], "value": new[1]}
    if case.op_argument == "latent_cache":
        changes["v_scale"] = call.k_scale
    is_other = case.argument.cache is not None or case.op_argument in ("diffkv", "latent_cache")
    if is_other and call.key_cache.numel() <= MOST_COPIED:  # of a larger one, the batch must do
        changes |= _caches_as_read(case, call)
    return replace(batch, query=query, key=keys, value=values), replace(call, **changes)


def _caches_as_read(case: Case, call: KernelCall) -> dict[str, torch.Tensor]:
    """Return both caches with the numbers that the op reads, in their layouts."""
    blocks, kv_heads, chunks, size, x = call.key_cache.shape
    tokens = call.key_cache.permute(0, 3, 1, 2, 4).flatten(3, 4)
    value = call.value_cache
    plain = interleaved(value, back=True) if call.interleave_v else value
    key, values = _as_read(case, tokens.flatten(0, 1), plain.permute(0, 3, 1, 2).flatten(0, 1))
    key = key.view(blocks, size, kv_heads, chunks, x).permute(0, 2, 3, 1, 4)
    values = values.unflatten(0, (blocks, size)).permute(0, 2, 3, 1).contiguous()
    return {
        "key_cache": key.contiguous(),
        "value_cache": interleaved(values) if call.interleave_v else values,
    }


def _as_read(
    case: Case, key: torch.Tensor, value: torch.Tensor, read: Read | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [n, num_kv_heads, head_size] as the op reads them; ``read``: a wrong read."""
    if case.op_argument == "latent_cache":
        value = key.clone()
        value[..., latent_size(case) :] = 0
        return key, value
    halves = _half(case, key), _half(case, value)
    keys, values = halves if read is None else read(case, *halves)
    key, value = _decoded(case, keys), _decoded(case, values)
    if case.op_argument == "diffkv":
        value = value.clone()
        value[..., narrow_size(case) :] = 0
    return key, value


def _half(case: Case, tokens: torch.Tensor) -> StoredHalf:
    """Return what is stored for keys or values [n, num_kv_heads, head_size]."""
    if case.spec.cache_layout is None:
        return StoredHalf(numbers=query_as_read(case, tokens))
    if case.argument.cache is None:
        return StoredHalf(numbers=tokens)
    stored, scales = stored_numbers(case, tokens)
    return StoredHalf(numbers=stored, scale=scales)


def _decoded(case: Case, half: StoredHalf) -> torch.Tensor:
    """Return the tokens that are stored, [n, num_kv_heads, head_size]."""
    if half.scale is None:
        return half.numbers
    return decoded_numbers(case, half.numbers, half.scale)
