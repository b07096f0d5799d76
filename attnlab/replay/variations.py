"""Variations of a call: other batches, splits, sizes, places, foreign contents. None may change the result.

Some of them may change its bits, because sums are added in another order. Others may not change any bit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.replay.parts import KeptSequence, whole, with_sequences
from attnlab.tensors.call import KernelCall

_ALONE = 16  # sequences that are run alone, evenly spaced
_SPLITS = (1, 4, 32)
_FINITE = 3.0  # a number in foreign slots
_BUFFER = 7.0  # a number in the output buffer
_ELEMENT = 0x35  # a byte in foreign slots of an FP8 cache; a finite number in every format


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariedCall:
    """One or more calls that together give rows of the first call's output.

    - ``kind``: "repeat" (the same call), "batch", "splits", "size" (maxima, padding), "place" (other blocks
      of the cache), or "foreign" (contents that the call must neither read nor keep).
    - ``calls``: each with the rows [n] int64 of the first call that it computes.
    """

    name: str
    kind: str
    calls: tuple[tuple[KernelCall, torch.Tensor], ...]


def varied_calls(call: KernelCall, release: str, *, pads: bool) -> Iterator[VariedCall]:
    """Yield the variations of a call that its op permits in a release; ``pads``: the backend can pad."""
    rows = torch.arange(call.query.shape[0])

    def one(name: str, kind: str, **changes: Any) -> VariedCall:
        changed = dataclasses.replace(call, **changes)
        return VariedCall(name=name, kind=kind, calls=((changed, rows),))

    yield one("identical run", "repeat")
    yield from _batches(call)
    if call.spec.num_splits is not None and release in call.spec.split_releases:
        for splits in _SPLITS:
            if splits != call.num_splits:
                yield one(f"{splits} splits", "splits", num_splits=splits)
        if call.spec.min_splits == 0 and call.num_splits != 0:
            yield one("without splits", "splits", num_splits=0)
    yield one("twice the max_seq_len", "size", max_seq_len=2 * call.max_seq_len)
    if pads and not call.padding:
        yield one("3 padding tokens", "size", padding=3)
    yield one("other blocks", "place", **_other_blocks(call))
    yield one("other numbers in foreign slots", "foreign", **_other_slots(call))
    yield one("another output buffer", "foreign", before=torch.full_like(call.buffer, _BUFFER))


def _batches(call: KernelCall) -> Iterator[VariedCall]:
    """Yield each sequence alone, and the sequences in reverse order."""
    every, starts = whole(call), call.query_start_loc.tolist()

    def run(kept: list[KeptSequence]) -> tuple[KernelCall, torch.Tensor]:
        part = with_sequences(call, kept)
        maxima = {name: getattr(call, name) for name in ("max_query_len", "max_seq_len")}
        rows = torch.cat([torch.arange(starts[one.seq], starts[one.seq + 1]) for one in kept])
        return dataclasses.replace(part, **maxima), rows

    full = [one for one in every if one.last]
    if len(every) < 2 or not full:
        return
    step = -(-len(full) // _ALONE)
    alone = tuple(run([one]) for one in full[::step])
    yield VariedCall(name="each sequence alone", kind="batch", calls=alone)
    yield VariedCall(name="sequences reversed", kind="batch", calls=(run(every[::-1]),))


def _other_blocks(call: KernelCall) -> dict[str, Any]:
    """Return the cache with its blocks in reverse order, and the block table that names them there."""
    count = call.key_cache.shape[0]
    table = call.block_table
    inside = (table >= 0) & (table < count)
    changes: dict[str, Any] = {
        "block_table": torch.where(inside, count - 1 - table, table),
        "key_cache": _reversed(call.key_cache),
        "value_cache": _reversed(call.value_cache),
    }
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        if isinstance(scale, torch.Tensor) and scale.dim() == 3:
            changes[name] = scale.flip(0)
    return changes


def _reversed(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache with its blocks reversed, in the same order of dimensions."""
    copy = cache.clone()
    copy.copy_(cache.flip(0))
    return copy


def _other_slots(call: KernelCall) -> dict[str, Any]:
    """Return the cache with other finite numbers in the slots that belong to no sequence of the call."""
    owned = torch.zeros(call.key_cache.shape[0], call.block_size, dtype=torch.bool)
    for row, seq_len in zip(call.block_table.long(), call.seq_lens.tolist(), strict=True):
        positions = torch.arange(seq_len)
        owned[row[positions // call.block_size], positions % call.block_size] = True
    changes: dict[str, Any] = {}
    for name, cache in (("key_cache", call.key_cache), ("value_cache", call.value_cache)):
        copy = cache.clone()
        fill = _ELEMENT if cache.dtype == torch.uint8 else _FINITE
        copy.movedim(3, 1)[~owned] = fill
        changes[name] = copy
    return changes
