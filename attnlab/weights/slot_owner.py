"""SlotOwners: which sequence and position each slot of an X-ray belongs to."""

from dataclasses import dataclass

import torch

from attnlab.tensors.call import KernelCall
from attnlab.weights.setup import cache_slots, has_new_slots

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
        parts = (self.seq, self.position, self.is_tail, self.is_new)
        seq, position, is_tail, is_new = (one[slots] for one in parts)
        return SlotOwners(seq=seq, position=position, is_tail=is_tail, is_new=is_new)

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
    table, size = call.block_table.long().cpu(), call.block_size
    starts, seq_lens = call.query_start_loc.long().cpu(), call.seq_lens.long().cpu()
    old, tokens = cache_slots(call), call.query.shape[0] if has_new_slots(call) else 0
    seq = torch.full((old + tokens,), NONE)
    position = torch.full_like(seq, NONE)
    at = torch.arange(table.shape[1] * size)
    for one in reversed(range(len(table))):
        blocks = table[one, at // size]
        inside = (blocks >= 0) & (blocks < call.value_cache.shape[0])
        slots = (blocks * size + at % size)[inside]
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
