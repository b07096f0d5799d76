"""SlotState: what a cache slot is to the sequence that reads it; and which slots a kernel reads.

Contracts, traced reads, findings and plots all use this vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from attnlab.case.ops import WRITE
from attnlab.contracts.contract import Contract
from attnlab.contracts.rows import cached_lens
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.call import KernelCall
from attnlab.tensors.sequence_mask import mask_of


class SlotState(StrEnum):
    """What a cache slot is to the sequence that reads it, from the most to the least permissive state."""

    OWN = "own"
    OWN_FUTURE = "own future"
    OUTSIDE_WINDOW = "outside window"
    FREED = "freed"
    UNWRITTEN = "own unwritten"
    UNWRITTEN_TAIL = "unwritten tail"
    OTHER_POSITION = "other position"
    OTHER_SEQUENCE = "other sequence"
    NEVER_MAPPED = "never mapped"
    UNKNOWN = "unknown"

    @property
    def code(self) -> int:
        """Return the state's index in STATES, which tensors of states hold."""
        return STATES.index(self)

    @property
    def sentence(self) -> str:
        """Return what the state means, in one sentence."""
        return _SENTENCES[self]


STATES = tuple(SlotState)
_Numbers: TypeAlias = torch.Tensor | int
_SENTENCES = {
    SlotState.OWN: "It holds the token that the reader needs.",
    SlotState.OWN_FUTURE: "It holds a token of the sequence after the last visible position.",
    SlotState.OUTSIDE_WINDOW: "It holds a token of the sequence before the sliding window.",
    SlotState.FREED: "It is before the sliding window and holds no token, as in a freed block.",
    SlotState.UNWRITTEN: "It is for a position below seq_len, but holds no token.",
    SlotState.UNWRITTEN_TAIL: "It is after seq_len in a block of the sequence and holds no token.",
    SlotState.OTHER_POSITION: "It holds a token of the sequence at another position.",
    SlotState.OTHER_SEQUENCE: "It belongs to another sequence.",
    SlotState.NEVER_MAPPED: "Its block is in no row of the block table, and it holds no token.",
    SlotState.UNKNOWN: "It is not known which sequence reads it, or what was written to it.",
}
# States of slots that hold no token, and of slots that hold a token that the reader does not expect.
EMPTY = (
    SlotState.FREED,
    SlotState.UNWRITTEN,
    SlotState.UNWRITTEN_TAIL,
    SlotState.NEVER_MAPPED,
)
FOREIGN = (SlotState.OTHER_POSITION, SlotState.OTHER_SEQUENCE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContractReads:
    """The slots that one kernel reads for one sequence; for all sequences if ``seq`` is NOBODY.

    ``positions``, ``blocks``, ``slots``, ``states``: [n] int64, one entry per position that is read: the
    position, the block and the slot in it by the call's block table, and the index of its state in STATES.
    """

    kernel: str
    seq: int
    positions: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor

    def having(self, states: Iterable[SlotState]) -> torch.Tensor:
        """Return the indices of the entries with one of these states, in order."""
        codes = torch.tensor([state.code for state in states])
        return torch.nonzero(torch.isin(self.states, codes)).flatten()


def contract_reads(
    contracts: Iterable[Contract],
    call: KernelCall,
    provenance: Provenance | None,
    *,
    all_own: bool = True,
) -> list[ContractReads]:
    """Return the slots that each kernel reads by its contract for each sequence, and their states.

    A kernel needs the positions that any row of a sequence sees, as far as it takes them from the cache. With
    a causal mask they begin with the sliding window of the first new token. Slots after seq_len, which some
    kernels load and multiply by 0 (Contract.reads_tail), are not included. Without ``provenance``, as for a
    captured call, every state is UNKNOWN. Without ``all_own``, a kernel that reads only slots in state OWN
    is left out.
    """
    found = []
    for contract in contracts:
        if contract.name == WRITE:  # it reads no slot
            continue
        counts, reads = _reads(contract, call, provenance)
        if all_own or reads.states.any():  # state 0 is OWN
            found += _by_sequence(reads, counts)
    return found


def _reads(
    contract: Contract, call: KernelCall, provenance: Provenance | None
) -> tuple[torch.Tensor, ContractReads]:
    """Return how many slots one kernel reads for each sequence, and the reads of all sequences."""
    block_size = call.block_size
    lens = cached_lens(contract, call).cpu().clamp(max=call.block_table.shape[1] * block_size)
    begins, ends = _visible_range(call, lens)
    counts = ends - begins
    seq = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = torch.arange(len(seq)) + (begins - counts.cumsum(0) + counts)[seq]
    if not call.visibility.is_plain:
        seen = _seen(call, lens)[seq, positions]
        seq, positions = seq[seen], positions[seen]
        counts = torch.bincount(seq, minlength=len(counts))
    blocks = call.block_table[seq, positions // block_size].long()
    slots = positions % block_size
    states = torch.full_like(positions, SlotState.UNKNOWN.code)
    if provenance is not None:
        at = blocks * block_size + slots
        writer_seq, writer_pos = provenance.seq.flatten()[at], provenance.pos.flatten()[at]
        if torch.equal(writer_seq, seq.int()) and torch.equal(writer_pos, positions.int()):
            states.fill_(SlotState.OWN.code)  # the usual case; all positions are visible ones
        else:
            states = _states(
                writer_seq,
                writer_pos,
                positions,
                _mapped(provenance)[blocks],
                reader=(seq, call.seq_lens.long()[seq]),
                visible=(begins[seq], ends[seq]),
            )
    reads = ContractReads(
        kernel=contract.name,
        seq=NOBODY,
        positions=positions,
        blocks=blocks,
        slots=slots,
        states=states,
    )
    return counts, reads


def _by_sequence(reads: ContractReads, counts: torch.Tensor) -> list[ContractReads]:
    """Split the reads of all sequences; ``counts`` [num_seqs] is how many each has."""
    tensors = (reads.positions, reads.blocks, reads.slots, reads.states)
    parts = (tensor.split(counts.tolist()) for tensor in tensors)
    return [
        ContractReads(
            kernel=reads.kernel, seq=i, positions=at, blocks=block, slots=slot, states=state
        )
        for i, (at, block, slot, state) in enumerate(zip(*parts, strict=True))
    ]


def _visible_range(call: KernelCall, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first position that any row of each sequence sees, and the one after the last.

    Each [num_seqs] int64; ``lens``: how many tokens of each are in the cache.
    """
    ctx_lens = (call.seq_lens.long() - call.query_lens).cpu()
    if call.visibility.is_plain:
        window = call.sliding_window
        begins = (ctx_lens - window + 1).clamp(min=0) if window else torch.zeros_like(lens)
        return begins, torch.maximum(begins, lens)
    seen = _seen(call, lens)
    begins = seen.int().argmax(1)
    ends = seen.shape[1] - seen.flip(1).int().argmax(1)
    return begins, torch.where(seen.any(1), ends, begins)


def _seen(call: KernelCall, lens: torch.Tensor) -> torch.Tensor:
    """Return which cached positions any row of each sequence sees, [num_seqs, longest] bool."""
    found = torch.zeros(len(lens), max(1, int(lens.max())) if len(lens) else 1, dtype=torch.bool)
    for seq, length in enumerate(lens.tolist()):
        seen = mask_of(call, seq).seen()[:length]
        found[seq, : len(seen)] = seen
    return found


def _mapped(provenance: Provenance) -> torch.Tensor:
    """Return which blocks are in any row of the block table, [num_blocks] bool."""
    mapped = torch.zeros(provenance.seq.shape[0], dtype=torch.bool)
    mapped[provenance.block_table.flatten()] = True
    return mapped


def slot_states(
    provenance: Provenance, seq: int, seq_len: int, visible: range | None = None
) -> torch.Tensor:
    """Return what each slot of a cache is to a sequence, indices into STATES, [num_blocks, block_size].

    ``visible``: the positions that the rows at work may see; all below seq_len if not given. Positions
    come from the block table as it was meant. ``seq`` NOBODY gives UNKNOWN everywhere.
    """
    num_blocks, block_size = provenance.seq.shape
    if seq == NOBODY:
        return torch.full((num_blocks, block_size), SlotState.UNKNOWN.code)
    seen = range(seq_len) if visible is None else visible
    return _states(
        provenance.seq,
        provenance.pos,
        positions_of(provenance, seq),
        _mapped(provenance)[:, None].expand(num_blocks, block_size),
        reader=(seq, seq_len),
        visible=(seen.start, seen.stop),
    )


def positions_of(provenance: Provenance, seq: int) -> torch.Tensor:
    """Return the position of a sequence that each slot is for, [num_blocks, block_size] int64.

    NOBODY: the slot is in none of the sequence's blocks, by the block table as it was meant.
    """
    num_blocks, block_size = provenance.seq.shape
    positions = torch.full((num_blocks, block_size), NOBODY)
    table = provenance.block_table[seq]
    positions[table] = torch.arange(len(table) * block_size).view(len(table), block_size)
    # A recycled block may be in the table twice; the tokens in it say which position is right.
    return torch.where(provenance.seq == seq, provenance.pos.long(), positions)


def _states(
    writer_seq: torch.Tensor,
    writer_pos: torch.Tensor,
    positions: torch.Tensor,
    mapped: torch.Tensor,
    *,
    reader: tuple[_Numbers, _Numbers],
    visible: tuple[_Numbers, _Numbers],
) -> torch.Tensor:
    """Return the state of each slot, an index into STATES; all tensors have one shape.

    ``writer_seq``, ``writer_pos``: whose token a slot holds, or NOBODY. ``positions``: the position that
    the reader takes a slot for, NOBODY if it is in none of its blocks. ``mapped``: whether the block is in
    any row of the block table. ``reader``: the sequence and its seq_len; ``visible``: the first position
    that it may see, and the one after the last; for all slots, or one for each.
    """
    (seq, seq_len), (begin, end) = reader, visible
    states = torch.full(positions.shape, SlotState.OTHER_SEQUENCE.code)
    own = writer_seq == seq
    states.masked_fill_(own, SlotState.OWN.code)
    states.masked_fill_(own & (writer_pos >= end), SlotState.OWN_FUTURE.code)
    states.masked_fill_(own & (writer_pos < begin), SlotState.OUTSIDE_WINDOW.code)
    states.masked_fill_(own & (writer_pos != positions), SlotState.OTHER_POSITION.code)
    empty = writer_seq == NOBODY
    mine = empty & (positions != NOBODY)
    states.masked_fill_(mine, SlotState.UNWRITTEN.code)
    states.masked_fill_(mine & (positions < begin), SlotState.FREED.code)
    states.masked_fill_(mine & (positions >= seq_len), SlotState.UNWRITTEN_TAIL.code)
    states.masked_fill_(empty & ~mapped, SlotState.NEVER_MAPPED.code)
    return states


def readable_states(contracts: Iterable[Contract]) -> set[SlotState]:
    """Return the states of the slots that the kernels may load by their contracts."""
    tail = any(contract.reads_tail != "nothing" for contract in contracts)
    return {SlotState.OWN, SlotState.UNWRITTEN_TAIL} if tail else {SlotState.OWN}
