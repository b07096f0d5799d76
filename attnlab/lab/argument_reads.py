"""Wrong reads of a cache in another format, by name: what a diagnosis of an op argument compares.

A read changes what is stored for the tokens of one sequence, keys and values, before it is decoded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.masks import CAUSAL, MASK_DATA


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
