"""Codes: values that turn an output into weights.

The slots of lane j (:mod:`attnlab.weights.codes`) have the value 1 in element j mod head_size during run
j // head_size, and 0 otherwise. 0 and 1 are exact in float16, bfloat16 and FP8. Another run has random signed
powers of two in every element: its output follows from the weights if every value comes from its own slot,
head and element, and if the output is linear in V.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from attnlab.contracts.contract import Target
from attnlab.kernels.model import format_of
from attnlab.tensors.cache import interleaved
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import coarse
from attnlab.weights.setup import AttentionSetup, cache_slots, has_new_slots, table_slots


def num_slots(call: KernelCall) -> int:
    """Return the number of slots of a call: of the cache, and new tokens that are read from arguments."""
    return cache_slots(call) + (call.query.shape[0] if has_new_slots(call) else 0)


def one_hot(
    lanes: torch.Tensor, width: int, num_heads: int, head_size: int
) -> Iterator[torch.Tensor]:
    """Yield the values of each run, [N, num_heads, head_size] int8.

    ``lanes``: [N], the lane of each slot. The slot is 1 in the element of its lane, in one run. ``width``:
    the number of elements that are used. The values are on the device of the lanes.
    """
    slots = torch.arange(len(lanes), device=lanes.device)
    for first in range(0, int(lanes.max()) + 1, width):
        shape = (len(lanes), num_heads, head_size)
        codes = torch.zeros(shape, dtype=torch.int8, device=lanes.device)
        here = (lanes >= first) & (lanes < first + width)
        codes[slots[here], :, lanes[here] - first] = 1
        yield codes


def random_codes(shape: tuple[int, ...]) -> torch.Tensor:
    """Return ±1, ±2 or ±4 for every slot, head and element, int8."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-prod(shape) // 8),), generator=generator)
    numbers = words.view(torch.int8)[: prod(shape)].view(shape)
    magnitudes = torch.ones_like(numbers) << (numbers & 127) % 3
    return torch.where(numbers < 0, -magnitudes, magnitudes)


def values_shape(call: KernelCall) -> tuple[int, int, int]:
    """Return the shape of the values of all slots, [N, num_kv_heads, head_size]."""
    return num_slots(call), call.key.shape[1], call.query.shape[2]


def with_values(call: KernelCall, target: Target, codes: torch.Tensor) -> KernelCall:
    """Return the call with these values and an output buffer of NaN.

    ``codes``: [N, num_kv_heads, head_size] int8; an element of the cache holds the number itself, so that the
    kernel multiplies it by ``call.v_scale`` if the cache is FP8.
    """
    old = cache_slots(call)
    blocks, kv_heads, head_size, block_size = call.value_cache.shape
    format = format_of(call, target)
    plain = codes[:old].view(blocks, block_size, kv_heads, head_size).permute(0, 2, 3, 1)
    numbers = plain.float() if format.is_fp8 else plain
    stored = numbers.to(format.dtype).contiguous().view(format.storage)
    if call.interleave_v:
        stored = interleaved(stored)
    value_cache, value = _like(call.value_cache, stored), call.value
    if has_new_slots(call):
        value = _like(call.value, codes[old:].to(call.value.dtype))
    output = torch.full_like(call.buffer, float("nan"))
    return dataclasses.replace(call, value_cache=value_cache, value=value, output=output)


def with_finite_keys(call: KernelCall, target: Target, empty: torch.Tensor) -> KernelCall:
    """Return the call with drawn keys in the slots ``empty``, [cache slots] bool.

    They have the spread of the other keys, so that a key that must not count gets a visible weight.
    """
    format = format_of(call, target)
    blocks, kv_heads, chunks, block_size, x = call.key_cache.shape
    tokens = call.key_cache.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, chunks, x)
    numbers = format.decode(tokens.contiguous())
    finite = numbers.isfinite()
    empty = empty.to(tokens.device)[:, None, None, None]
    fill = empty | ~finite
    chosen = torch.nonzero(fill.flatten(1).any(1)).flatten()
    if not len(chosen):
        return call
    shape = (len(chosen), kv_heads, chunks, x)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(17)) * _spread(
        numbers, ~fill
    )
    if call.spec.coarse:
        drawn = (2 * drawn).round().clamp(-7, 7) / 2
    tokens = tokens.clone()
    tokens[chosen] = torch.where(
        fill[chosen], format.encode(drawn).to(tokens.device), tokens[chosen]
    )
    key_cache = tokens.view(blocks, block_size, kv_heads, chunks, x).permute(0, 2, 3, 1, 4)
    return dataclasses.replace(call, key_cache=_like(call.key_cache, key_cache))


def _spread(numbers: torch.Tensor, used: torch.Tensor) -> float:
    """Return the standard deviation of the used numbers; 1 if they are too few or all the same."""
    count = int(used.sum())
    if count < 2:
        return 1.0
    mean = float(torch.where(used, numbers, 0.0).sum(dtype=torch.float64)) / count
    squares = torch.where(used, numbers - mean, 0.0).square().sum(dtype=torch.float64)
    return float(squares / (count - 1)) ** 0.5 or 1.0


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the numbers of ``new`` with the strides and the device of ``old``."""
    copy = old.new_empty_strided(old.shape, old.stride())
    return copy.copy_(new)


def with_drawn_keys(call: KernelCall, target: Target) -> KernelCall:
    """Return the call with query and keys of N(0, 1), where its own scores hardly differ."""
    format = format_of(call, target)
    generator = torch.Generator().manual_seed(5)
    scale = call.k_scale if format.is_fp8 else 1.0
    cached = torch.randn(call.key_cache.shape, generator=generator) / scale
    if call.spec.coarse:
        cached = (2 * cached).round().clamp(-7, 7) / 2
    stored = cached.to(format.dtype).view(format.storage)
    query, key = (torch.randn(old.shape, generator=generator) for old in (call.query, call.key))
    if "to_cache" in call.spec.rounding:
        query = coarse(query)
    query, key = _like(call.query, query), _like(call.key, key)
    return dataclasses.replace(call, query=query, key=key, key_cache=_like(call.key_cache, stored))


NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotOwners:
    """The owner of each slot, by the block table and the lengths of the call.

    - ``seq``, ``position``: [N] int64, NONE for a block in no row of the table. A block that several
      sequences share belongs to the first.
    - ``is_tail``: [N] bool, at or after the end of its sequence. ``is_new``: [N] bool, from the arguments.
    """

    seq: torch.Tensor
    position: torch.Tensor
    is_tail: torch.Tensor
    is_new: torch.Tensor

    def take(self, slots: torch.Tensor) -> "SlotOwners":
        """Return the owners of some slots."""
        fields = dataclasses.fields(self)
        return SlotOwners(**{one.name: getattr(self, one.name)[slots] for one in fields})

    def kind(self, slot: int, seq: int, position: int) -> str:
        """Return what a slot is to a row of a sequence at a position, in words."""
        owner, at = int(self.seq[slot]), int(self.position[slot])
        source = "new token, " if bool(self.is_new[slot]) else ""
        if owner == NONE:
            return "in no sequence's blocks"
        if owner != seq:
            return f"of sequence {owner}"
        if bool(self.is_tail[slot]):
            return "after the end of its sequence"
        return f"{source}{'after' if at > position else 'at or before'} the row's own position"


def slot_owners(call: KernelCall) -> SlotOwners:
    """Return the owners of the slots of a call."""
    table = table_slots(call)
    starts, seq_lens = call.query_start_loc.long().cpu(), call.seq_lens.long().cpu()
    old, tokens = cache_slots(call), call.query.shape[0] if has_new_slots(call) else 0
    seq = torch.full((old + tokens,), NONE)
    position = torch.full_like(seq, NONE)
    at = torch.arange(table.shape[1])
    for one in reversed(range(len(table))):
        inside = table[one] >= 0
        slots = table[one, inside]
        used = (at < seq_lens[one])[inside]
        for take in (~used, used):  # a slot that holds a token wins over a tail
            free = take if bool(take.all()) else take & ((seq[slots] == NONE) | used)
            seq[slots[free]], position[slots[free]] = one, at[inside][free]
    for one in range(len(table) if tokens else 0):
        rows = torch.arange(int(starts[one]), int(starts[one + 1]))
        seq[old + rows] = one
        position[old + rows] = int(seq_lens[one]) - len(rows) + torch.arange(len(rows))
    lengths = torch.cat([seq_lens, seq_lens.new_zeros(1)])[seq]
    return SlotOwners(
        seq=seq,
        position=position,
        is_tail=(seq != NONE) & (position >= lengths),
        is_new=torch.arange(old + tokens) >= old,
    )


def holds_token(call: KernelCall, owners: SlotOwners) -> torch.Tensor:
    """Return which slots of the cache are for a token of a sequence, [cache slots] bool."""
    old = cache_slots(call)
    return (owners.seq[:old] != NONE) & ~owners.is_tail[:old]


# Lanes: slots that share an element of a run, so that few runs measure the weights of many slots.
#
# A row should read the slots of its own sequence only. Slots at one position of different sequences
# therefore share a lane, and the number of runs follows from the longest sequence, not from the size of the
# cache. A weight in a slot of another sequence is added to the lane's own weight: it shows as a deviation,
# and the slots are then measured one by one.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """The lane of each slot.

    - ``of``: [N] int64, first those of the cache, then those of new tokens. ``cached``: the number of lanes
      of the cache, ``count``: of all.
    """

    of: torch.Tensor
    cached: int
    count: int

    def fold(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the sums of weights [R, H, N] over the slots of each lane, [R, H, count]."""
        folded = weights.new_zeros(*weights.shape[:2], self.count)
        return folded.index_add_(2, self.of, weights)

    @property
    def is_one_to_one(self) -> bool:
        """Answer whether every lane has at most one slot."""
        return len(self.of) == self.count


def shared_lanes(call: KernelCall, owners: SlotOwners) -> Lanes:
    """Return one lane for every position in the cache, and one for every new token of a sequence.

    Slots in no sequence's blocks, and those far after the end of one, are spread over the lanes.
    """
    old, slots = cache_slots(call), len(owners.seq)
    size, starts = call.block_size, call.query_start_loc.long().cpu()
    longest = int(call.seq_lens.max()) if len(call.seq_lens) else 0
    cached = min(max(1, -(-longest // size)) * size, old)
    at = owners.position[:old]
    is_own = (owners.seq[:old] != NONE) & (at < cached)
    lanes = torch.where(is_own, at, torch.arange(old) % cached)
    rows = torch.arange(slots - old)
    if not len(rows):
        return Lanes(of=lanes, cached=cached, count=cached)
    seq = (torch.searchsorted(starts, rows, right=True) - 1).clamp(0, len(starts) - 1)
    index = (rows - starts[seq]).clamp(min=0)
    new = cached + index
    return Lanes(of=torch.cat([lanes, new]), cached=cached, count=cached + int(index.max()) + 1)


def own_slots(setup: AttentionSetup, lanes: Lanes) -> torch.Tensor:
    """Return the slot of each lane that belongs to the row's sequence, [R, lanes]; -1 for none."""
    own = torch.full((len(setup.rows), lanes.count + 1), -1, device=setup.device)
    held = setup.entry_position < setup.seq_len[:, None]
    # A slot that holds a token wins over one after the end.
    for kept in (~held & ~setup.is_new, held):
        kept = kept & (setup.entry_slot >= 0)
        lane = torch.where(kept, lanes.of[setup.entry_slot.clamp(min=0)], lanes.count)
        own.scatter_(1, lane, setup.entry_slot)
    return own[:, :-1]
