"""SlotMap: for every slot of a cache, who wrote it, who reads it, and what it is to its reader."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnlab.contracts.contract import Contract
from attnlab.contracts.slot_states import STATES, SlotState, contract_reads
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.call import KernelCall

NOT_READ = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot of the cache.

    ``owner``, ``writer`` and ``reader`` are (sequence, position), or None. The owner is the sequence whose
    row of the block table, as it was meant, has the block. ``state`` is None for a slot that is not read.
    """

    block: int
    slot: int
    owner: tuple[int, int] | None
    writer: tuple[int, int] | None
    reader: tuple[int, int] | None
    state: SlotState | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotMap:
    """For every slot of a cache, who wrote it, who reads it, and what it is to its reader.

    - ``states``: [num_blocks, block_size] int64, indices into STATES, or NOT_READ.
    - ``reader_seq``, ``reader_pos``: [num_blocks, block_size] int64, the sequence that reads a slot and
      the position that it takes the slot for, or NOBODY.
    """

    provenance: Provenance
    states: torch.Tensor
    reader_seq: torch.Tensor
    reader_pos: torch.Tensor

    @property
    def is_read(self) -> torch.Tensor:
        """Return which slots are read, [num_blocks, block_size] bool."""
        return self.states != NOT_READ

    def counts(self) -> dict[SlotState, int]:
        """Return how many slots that are read have each state; states that do not occur are left out."""
        numbers = {state: int((self.states == state.code).sum()) for state in STATES}
        return {state: number for state, number in numbers.items() if number}

    def order(self) -> torch.Tensor:
        """Return every block once, [num_blocks] int64.

        The blocks of sequence 0 come first, in the order of its positions, then those of sequence 1, and
        so on. Blocks in no row of the block table come last.
        """
        num_blocks = self.states.shape[0]
        in_table = torch.tensor(
            list(dict.fromkeys(self.provenance.block_table.flatten().tolist())), dtype=torch.int64
        )
        spare = torch.ones(num_blocks, dtype=torch.bool)
        spare[in_table] = False
        return torch.cat([in_table, torch.nonzero(spare).flatten()])

    def at(self, block: int, slot: int) -> Slot:
        """Return what is known of one slot."""
        block_size = self.states.shape[1]
        rows = torch.nonzero(self.provenance.block_table == block)
        owner = (int(rows[0, 0]), int(rows[0, 1]) * block_size + slot) if len(rows) else None
        code = int(self.states[block, slot])
        return Slot(
            block=block,
            slot=slot,
            owner=owner,
            writer=_pair(self.provenance.seq[block, slot], self.provenance.pos[block, slot]),
            reader=_pair(self.reader_seq[block, slot], self.reader_pos[block, slot]),
            state=None if code == NOT_READ else STATES[code],
        )


def slot_map(call: KernelCall, contracts: Iterable[Contract], provenance: Provenance) -> SlotMap:
    """Return the slots that the kernels read by their contracts.

    A slot that several sequences read has the reader to which its state is least permissive. So all
    states are OWN exactly if the call violates no contract by a slot.
    """
    shape, block_size = provenance.seq.shape, provenance.seq.shape[1]
    states = torch.full((provenance.seq.numel(),), NOT_READ)
    reader_seq = torch.full_like(states, NOBODY)
    reader_pos = torch.full_like(states, NOBODY)
    for read in contract_reads(contracts, call, provenance):
        flat = read.blocks * block_size + read.slots
        worse = read.states > states[flat]
        states.scatter_reduce_(0, flat, read.states, "amax")
        kept = flat[worse]
        reader_seq[kept] = read.seq
        reader_pos[kept] = read.positions[worse]
    return SlotMap(
        provenance=provenance,
        states=states.view(shape),
        reader_seq=reader_seq.view(shape),
        reader_pos=reader_pos.view(shape),
    )


def _pair(seq: torch.Tensor, pos: torch.Tensor) -> tuple[int, int] | None:
    return None if int(seq) == NOBODY else (int(seq), int(pos))
