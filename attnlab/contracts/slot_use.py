"""SlotUse: who wrote each slot of a cache, and who reads it by the contracts of the kernels that run.

Nothing is run: a kernel reads, of each sequence that it serves, the positions that its contract takes from
the cache, through the call's own block table. What a kernel does beyond its contract is not seen here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.case.ops import WRITE
from attnlab.contracts.contract import cached_lens, contract
from attnlab.contracts.dispatch import Target
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.call import KernelCall

UNUSED, SPARE, OWN, UNWRITTEN, FOREIGN = range(5)
USES = (
    "not used",
    "written, not read",
    "read, holds its token",
    "read, nobody wrote",
    "read as another token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot of the cache: where it is, whose it is, who wrote it and who reads it.

    Each of ``owner``, ``writer`` and ``reader`` is (sequence, position), or None for nobody; the owner is
    the one whom the block table meant.
    """

    block: int
    slot: int
    owner: tuple[int, int] | None
    writer: tuple[int, int] | None
    reader: tuple[int, int] | None
    use: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotUse:
    """What becomes of every slot of a cache.

    - ``use``: [num_blocks, block_size] int64, an index into USES.
    - ``reader_seq``, ``reader_pos``: [num_blocks, block_size] int64, the sequence that reads a slot and
      the position that it takes it for, or NOBODY.
    """

    provenance: Provenance
    use: torch.Tensor
    reader_seq: torch.Tensor
    reader_pos: torch.Tensor

    def order(self) -> torch.Tensor:
        """Return every block once: those of sequence 0 in the order of its positions, then of sequence 1,
        …, and last those in no row of the block table; [num_blocks] int64."""
        blocks = self.use.shape[0]
        in_table = torch.tensor(
            list(dict.fromkeys(self.provenance.block_table.flatten().tolist())), dtype=torch.int64
        )
        spare = torch.ones(blocks, dtype=torch.bool)
        spare[in_table] = False
        return torch.cat([in_table, torch.nonzero(spare).flatten()])

    def at(self, block: int, slot: int) -> Slot:
        """Return what is known of one slot."""
        size = self.use.shape[1]
        row = torch.nonzero(self.provenance.block_table == block)
        owner = (int(row[0, 0]), int(row[0, 1]) * size + slot) if len(row) else None
        seqs, positions = self.provenance.seq, self.provenance.pos
        return Slot(
            block=block,
            slot=slot,
            owner=owner,
            writer=_pair(seqs[block, slot], positions[block, slot]),
            reader=_pair(self.reader_seq[block, slot], self.reader_pos[block, slot]),
            use=USES[int(self.use[block, slot])],
        )


def slot_use(
    call: KernelCall, target: Target, kernels: Sequence[str], provenance: Provenance
) -> SlotUse:
    """Return who wrote and who reads each slot; of a slot that two read, the later sequence is kept."""
    reader_seq = torch.full(provenance.seq.shape, NOBODY, dtype=torch.int64)
    reader_pos = reader_seq.clone()
    for name in kernels:
        if name == WRITE:  # reads no slot
            continue
        lens = cached_lens(contract(name, target, call.op), call).tolist()
        for seq, length in enumerate(lens):
            positions = torch.arange(min(length, call.block_table.shape[1] * call.block_size))
            blocks = call.block_table[seq, positions // call.block_size].long()
            reader_seq[blocks, positions % call.block_size] = seq
            reader_pos[blocks, positions % call.block_size] = positions
    written, read = provenance.seq != NOBODY, reader_seq != NOBODY
    own = (provenance.seq == reader_seq) & (provenance.pos == reader_pos)
    use = torch.full(provenance.seq.shape, UNUSED)
    use[written & ~read] = SPARE
    use[read & written] = FOREIGN
    use[read & written & own] = OWN
    use[read & ~written] = UNWRITTEN
    return SlotUse(provenance=provenance, use=use, reader_seq=reader_seq, reader_pos=reader_pos)


def _pair(seq: torch.Tensor, pos: torch.Tensor) -> tuple[int, int] | None:
    return None if int(seq) == NOBODY else (int(seq), int(pos))
