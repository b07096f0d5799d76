"""What a kernel read from the cache, counted by the state of each slot, and reads of unwritten scratch.

The reads are recorded by the emulated device (backend rocm) or by Triton's interpreter (backend vllm) if the
Case sets ``trace_reads``. Runs on a GPU record nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.case.lengths import Lengths
from attnlab.contracts.slot_map import NOT_READ, SlotMap
from attnlab.contracts.slot_states import STATES, SlotState, positions_of, slot_states
from attnlab.kernels.rocm.findings import Findings, Unwritten
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.visibility import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRead:
    """The slots of a cache tensor that were read for one sequence.

    - ``seq``: the sequence, or NOBODY for programs that access no row of a query or an output.
    - ``counts``: how many slots of each state were read. Of the emulated device, OWN_FUTURE is a token at
      or after seq_len; of a traced launch, one that no row of the program sees.
    - ``slots``: these slots, each (block, slot), in order.
    """

    tensor: str
    seq: int
    counts: dict[SlotState, int]
    slots: dict[SlotState, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line with the states that occur."""
        parts = [f"{count} {state}" for state, count in self.counts.items() if count]
        reader = "a program without rows" if self.seq == NOBODY else f"sequence {self.seq}"
        return f"{reader} reads {self.tensor}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a run with ``trace_reads`` read.

    ``unwritten``: reads of scratch or shared memory that nothing wrote during the call.
    """

    slots: tuple[SlotsRead, ...]
    unwritten: tuple[Unwritten, ...]

    def lines(self) -> list[str]:
        """Return the report as sentences."""
        return [str(entry) for entry in (*self.slots, *self.unwritten)]

    def total(self, state: SlotState, seq: int | None = None) -> int:
        """Return how many slots of a state were read, for one sequence or for all."""
        return sum(entry.counts[state] for entry in self._of(seq))

    def slot_map(self, provenance: Provenance, seq: int | None = None) -> SlotMap:
        """Return the slots of key or value that were read, for one sequence or for all.

        A slot that several sequences read has the reader to which its state is least permissive.
        """
        states = torch.full(provenance.seq.shape, NOT_READ)
        reader_seq, reader_pos = torch.full_like(states, NOBODY), torch.full_like(states, NOBODY)
        for entry in self._of(seq):
            positions = torch.full_like(states, NOBODY)
            if entry.seq != NOBODY:
                positions = positions_of(provenance, entry.seq)
            for state, places in entry.slots.items():
                for place in places:
                    if state.code > states[place]:
                        states[place] = state.code
                        reader_seq[place], reader_pos[place] = entry.seq, positions[place]
        return SlotMap(
            provenance=provenance, states=states, reader_seq=reader_seq, reader_pos=reader_pos
        )

    def _of(self, seq: int | None) -> Iterator[SlotsRead]:
        return (entry for entry in self.slots if seq in (None, entry.seq))


def report(findings: Findings, provenance: Provenance, seq_lens: torch.Tensor) -> MemoryReport:
    """Return what the attention kernel on the emulated device read from the caches for each sequence.

    ``seq_lens``: [num_seqs], any integer dtype.
    """
    entries = []
    for (kernel, tensor), by_seq in sorted(findings.reads.items()):
        if tensor not in ("key_cache", "value_cache") or "reduce" in kernel:
            continue
        for seq, elements in sorted(by_seq.items()):
            states = slot_states(provenance, seq, int(seq_lens[seq]))
            entries.append(_slots_read(tensor, seq, [(slots_of(elements), states)]))
    return MemoryReport(slots=tuple(entries), unwritten=findings.unwritten)


def traced(
    reads: Mapping[tuple[str, tuple[int, ...]], set[int]],
    provenance: Provenance,
    lengths: Lengths,
    visibility: Visibility,
) -> MemoryReport:
    """Return what the programs of a traced launch read (:mod:`attnlab.kernels.triton.trace`).

    ``reads``: slots, each block × block_size + slot, by tensor and by the rows that a program accesses. A
    program reads for the sequences of these rows. If they belong to several sequences, each slot counts
    for the sequence to which its state is most permissive, by the order of SlotState.
    """
    found: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (tensor, rows), slots in reads.items():
        read = torch.zeros(provenance.seq.shape, dtype=torch.bool)
        read.view(-1)[torch.tensor(sorted(slots))] = True
        visible = _visible(rows, lengths, visibility)
        states = {
            seq: slot_states(provenance, seq, lengths.seq_lens[seq], positions)
            for seq, positions in visible.items()
        }
        if not states:
            unknown = slot_states(provenance, NOBODY, 0)
            found.setdefault((tensor, NOBODY), []).append((read, unknown))
            continue
        best = torch.stack(list(states.values())).amin(0)
        for seq, of_seq in states.items():
            found.setdefault((tensor, seq), []).append((read & (of_seq == best), of_seq))
            read = read & (of_seq != best)
    entries = [_slots_read(tensor, seq, parts) for (tensor, seq), parts in sorted(found.items())]
    return MemoryReport(slots=tuple(entries), unwritten=())


def _visible(rows: tuple[int, ...], lengths: Lengths, visibility: Visibility) -> dict[int, range]:
    """Return the sequences of some rows and, for each, the range of positions that its rows may see."""
    visible: dict[int, range] = {}
    for row in rows:
        seq, token = lengths.locate(row)
        position = lengths.ctx_lens[seq] + token
        mask = visibility.of_seq(seq, lengths.ctx_lens[seq], lengths.seq_lens[seq])
        span = mask.span(position, position)
        before = visible.get(seq, span)
        visible[seq] = range(min(span.start, before.start), max(span.stop, before.stop))
    return visible


def _slots_read(tensor: str, seq: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> SlotsRead:
    """Return the slots of each state that any part reads.

    ``parts``: pairs of [num_blocks, block_size] tensors: which slots were read, and their states.
    """
    slots = {}
    for state in STATES:
        read = torch.stack([read & (states == state.code) for read, states in parts]).any(0)
        slots[state] = tuple((int(block), int(slot)) for block, slot in torch.nonzero(read))
    counts = {state: len(places) for state, places in slots.items()}
    return SlotsRead(tensor=tensor, seq=seq, counts=counts, slots=slots)


def slots_of(elements: torch.Tensor) -> torch.Tensor:
    """Return in which slots any element is set, [num_blocks, block_size] bool.

    ``elements``: of the shape of the key cache, [num_blocks, num_kv_heads, head_size / x, block_size, x],
    or of the value cache, [num_blocks, num_kv_heads, head_size, block_size].
    """
    return elements.any(4).any(2).any(1) if elements.dim() == 5 else elements.any(2).any(1)


def to_dict(memory: MemoryReport | None) -> dict[str, Any] | None:
    """Return a report as JSON-able values."""
    if memory is None:
        return None
    return {
        "slots": [{"tensor": s.tensor, "seq": s.seq, "counts": s.counts} for s in memory.slots],
        "unwritten": [str(entry) for entry in memory.unwritten],
    }
