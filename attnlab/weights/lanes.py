"""Lanes: slots that share an element of a run, so that few runs measure the weights of many slots.

A row should read the slots of its own sequence only. Slots at one position of different sequences therefore
share a lane, and the number of runs follows from the longest sequence, not from the size of the cache. A
weight in a slot of another sequence is added to the lane's own weight: it shows as a deviation, and the
slots are then measured one by one.
"""

from dataclasses import dataclass

import torch

from attnlab.tensors.call import KernelCall
from attnlab.weights.setup import AttentionSetup, cache_slots
from attnlab.weights.slot_owner import NONE, SlotOwners


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


def single_lanes(call: KernelCall, slots: int, device: torch.device | str = "cpu") -> Lanes:
    """Return one lane for every slot."""
    return Lanes(of=torch.arange(slots, device=device), cached=cache_slots(call), count=slots)


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
    for kept in (
        ~held & ~setup.is_new,
        held,
    ):  # a slot that holds a token wins over one after the end
        kept = kept & (setup.entry_slot >= 0)
        lane = torch.where(kept, lanes.of[setup.entry_slot.clamp(min=0)], lanes.count)
        own.scatter_(1, lane, setup.entry_slot)
    return own[:, :-1]
