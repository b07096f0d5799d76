"""What a kernel read: whose slots of the cache, and what nobody had written.

Made from what the checked device saw (origin rocm, ``checked``); a hardware run cannot tell.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.cache import NOBODY, Provenance
from attnlab.hip.findings import Findings, Unwritten

KINDS = (
    "own",
    "own future",
    "own unwritten",
    "unwritten tail",
    "other sequence",
    "never mapped",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead:
    """How many slots of a cache tensor a sequence's blocks read, by kind.

    - "own": a position below seq_len that the sequence wrote; "own future": one at or behind seq_len;
    - "own unwritten": the slot of a position below seq_len that nobody wrote; "unwritten tail": a slot
      of the sequence's blocks behind seq_len, empty;
    - "other sequence": a slot that another one wrote, or of its blocks; "never mapped": of a block that
      is in nobody's row of the block table.
    """

    tensor: str
    seq: int
    counts: dict[str, int]

    def __str__(self) -> str:
        """Say it in one line, kinds that do not occur left out."""
        parts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        return f"sequence {self.seq} reads {self.tensor}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a run on the checked device read."""

    slots: tuple[SlotsRead, ...]
    unwritten: tuple[Unwritten, ...]

    def lines(self) -> list[str]:
        """Return the report as sentences."""
        return [str(one) for one in (*self.slots, *self.unwritten)]

    def total(self, kind: str, seq: int | None = None) -> int:
        """Return the slots of a kind that all sequences, or one, read in the two caches."""
        return sum(one.counts[kind] for one in self.slots if seq in (None, one.seq))


def report(findings: Findings, provenance: Provenance, seq_lens: torch.Tensor) -> MemoryReport:
    """Return what the attention kernel's blocks of each sequence read from the caches."""
    slots = []
    for (kernel, tensor), by_seq in sorted(findings.reads.items()):
        if tensor not in ("key_cache", "value_cache") or "reduce" in kernel:
            continue
        for seq, elements in sorted(by_seq.items()):
            kinds = kinds_of(seq, provenance, seq_lens.tolist())
            read = slots_of(elements)
            counts = {kind: int((read & (kinds == i)).sum()) for i, kind in enumerate(KINDS)}
            slots.append(SlotsRead(tensor=tensor, seq=seq, counts=counts))
    return MemoryReport(slots=tuple(slots), unwritten=findings.unwritten)


def slots_of(elements: torch.Tensor) -> torch.Tensor:
    """Return in which slots any element is set, [num_blocks, block_size] bool.

    ``elements``: of the shape of the key cache, [num_blocks, num_kv_heads, chunks, block_size, x], or
    of the value cache, [num_blocks, num_kv_heads, head_size, block_size].
    """
    return elements.any(4).any(2).any(1) if elements.dim() == 5 else elements.any(2).any(1)


def kinds_of(seq: int, provenance: Provenance, seq_lens: list[int]) -> torch.Tensor:
    """Return what each slot is to a sequence, an index into KINDS, [num_blocks, block_size]."""
    num_blocks, block_size = provenance.seq.shape
    position = torch.full((num_blocks, block_size), -1)  # in this sequence, by its block table
    table = provenance.block_table[seq]
    position[table] = torch.arange(len(table) * block_size).view(len(table), block_size)
    mapped = torch.zeros(num_blocks, dtype=torch.bool)
    mapped[provenance.block_table.flatten()] = True
    own, nobody = provenance.seq == seq, provenance.seq == NOBODY
    future = provenance.pos >= seq_lens[seq]
    kinds = torch.full((num_blocks, block_size), KINDS.index("other sequence"))
    kinds[own & ~future] = KINDS.index("own")
    kinds[own & future] = KINDS.index("own future")
    mine = nobody & (position >= 0)
    kinds[mine & (position < seq_lens[seq])] = KINDS.index("own unwritten")
    kinds[mine & (position >= seq_lens[seq])] = KINDS.index("unwritten tail")
    kinds[~mapped[:, None] & nobody] = KINDS.index("never mapped")
    return kinds


def to_dict(memory: MemoryReport | None) -> dict[str, Any] | None:
    """Return a report as JSON-able values."""
    if memory is None:
        return None
    return {
        "slots": [{"tensor": s.tensor, "seq": s.seq, "counts": s.counts} for s in memory.slots],
        "unwritten": [str(one) for one in memory.unwritten],
    }
