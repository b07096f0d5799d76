"""What a kernel read: whose slots of the cache, and what nobody had written.

Made with a Case's ``checked`` from what the emulated device saw (backend rocm), or Triton's interpreter
(backend vllm); a hardware run cannot tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.lengths import Lengths
from attnlab.kernels.rocm.findings import Findings, Unwritten
from attnlab.tensors.cache import NOBODY, Provenance

KINDS = (
    "own",
    "own future",
    "outside window",
    "own unwritten",
    "unwritten tail",
    "other sequence",
    "never mapped",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead:
    """How many slots of a cache tensor the programs, or a GPU's blocks, of a sequence read, by kind.

    - "own": a token of the sequence that the rows at work may see; "own future": one behind the last of
      these rows (of the emulated device: at or behind seq_len); "outside window": one before the window
      of each;
    - "own unwritten": the slot of a position below seq_len that nobody wrote; "unwritten tail": a slot
      of the sequence's blocks behind seq_len, empty;
    - "other sequence": a slot that another one wrote, or of its blocks; "never mapped": of a block that
      is in nobody's row of the block table.

    ``slots``: the slots behind the counts, each (block, slot), in order. ``seq`` NOBODY: programs that
    touched no row, so that nobody knows for whom they read.
    """

    tensor: str
    seq: int
    counts: dict[str, int]
    slots: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say it in one line, kinds that do not occur left out."""
        parts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        who = "a program without rows" if self.seq == NOBODY else f"sequence {self.seq}"
        return f"{who} reads {self.tensor}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a checked run read."""

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
            slots.append(_slots_read(tensor, seq, [(slots_of(elements), kinds)]))
    return MemoryReport(slots=tuple(slots), unwritten=findings.unwritten)


def traced(
    reads: Mapping[tuple[str, tuple[int, ...]], set[int]],
    provenance: Provenance,
    lengths: Lengths,
    sliding_window: int,
) -> MemoryReport:
    """Return what the programs of a traced launch read (:mod:`attnlab.kernels.triton.trace`).

    A program reads for the sequence of the rows that it touched. Where these are several sequences', a
    slot counts for the one to which it is least strange, by the order of KINDS.
    """
    found: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (tensor, rows), slots in reads.items():
        read = torch.zeros(provenance.seq.shape, dtype=torch.bool)
        read.view(-1)[torch.tensor(sorted(slots))] = True
        seen = _seen(rows, lengths, sliding_window)
        kinds = {seq: kinds_of(seq, provenance, lengths.seq_lens, seen[seq]) for seq in seen}
        least = torch.stack(list(kinds.values())).amin(0) if kinds else None
        for seq, own in kinds.items():
            found.setdefault((tensor, seq), []).append((read & (own == least), own))
            read &= own != least
        if least is None:
            kinds_by_nobody = kinds_of(NOBODY, provenance, lengths.seq_lens)
            found.setdefault((tensor, NOBODY), []).append((read, kinds_by_nobody))
    made = [_slots_read(tensor, seq, parts) for (tensor, seq), parts in sorted(found.items())]
    return MemoryReport(slots=tuple(made), unwritten=())


def _seen(rows: tuple[int, ...], lengths: Lengths, sliding_window: int) -> dict[int, range]:
    """Return the sequences of some rows, and the positions from the first to the last that any of these
    rows may see."""
    seen: dict[int, range] = {}
    for row in rows:
        seq, token = lengths.locate(row)
        last = lengths.ctx_lens[seq] + token
        first = max(0, last - sliding_window + 1) if sliding_window else 0
        before = seen.get(seq, range(first, last + 1))
        seen[seq] = range(min(first, before.start), max(last + 1, before.stop))
    return seen


def _slots_read(tensor: str, seq: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> SlotsRead:
    """Return the slots of each kind that any part reads; a part is what was read, and what it is."""
    slots = {}
    for i, kind in enumerate(KINDS):
        read = torch.stack([read & (kinds == i) for read, kinds in parts]).any(0)
        slots[kind] = tuple((int(block), int(slot)) for block, slot in torch.nonzero(read))
    counts = {kind: len(places) for kind, places in slots.items()}
    return SlotsRead(tensor=tensor, seq=seq, counts=counts, slots=slots)


def slots_of(elements: torch.Tensor) -> torch.Tensor:
    """Return in which slots any element is set, [num_blocks, block_size] bool.

    ``elements``: of the shape of the key cache, [num_blocks, num_kv_heads, chunks, block_size, x], or
    of the value cache, [num_blocks, num_kv_heads, head_size, block_size].
    """
    return elements.any(4).any(2).any(1) if elements.dim() == 5 else elements.any(2).any(1)


def kinds_of(
    seq: int, provenance: Provenance, seq_lens: Sequence[int], sees: range | None = None
) -> torch.Tensor:
    """Return what each slot is to a sequence, an index into KINDS, [num_blocks, block_size].

    ``sees``: the positions that the rows at work may see; all below seq_len where none are given.
    ``seq`` NOBODY is a stranger to every slot that somebody wrote.
    """
    num_blocks, block_size = provenance.seq.shape
    position = torch.full((num_blocks, block_size), -1)  # in this sequence, by its block table
    seq_len = 0 if seq == NOBODY else seq_lens[seq]
    if seq != NOBODY:
        table = provenance.block_table[seq]
        position[table] = torch.arange(len(table) * block_size).view(len(table), block_size)
    mapped = torch.zeros(num_blocks, dtype=torch.bool)
    mapped[provenance.block_table.flatten()] = True
    nobody = provenance.seq == NOBODY
    own = (provenance.seq == seq) & ~nobody
    sees = sees or range(seq_len)
    kinds = torch.full((num_blocks, block_size), KINDS.index("other sequence"))
    kinds[own] = KINDS.index("own")
    kinds[own & (provenance.pos >= sees.stop)] = KINDS.index("own future")
    kinds[own & (provenance.pos < sees.start)] = KINDS.index("outside window")
    mine = nobody & (position >= 0)
    kinds[mine & (position < seq_len)] = KINDS.index("own unwritten")
    kinds[mine & (position < sees.start)] = KINDS.index("outside window")
    kinds[mine & (position >= seq_len)] = KINDS.index("unwritten tail")
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
