"""SlotState: what a cache slot is to the sequence that reads it; and which slots a kernel reads.

Contracts, traced reads, findings and plots all use this vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from attnlab.case.case import Lengths
from attnlab.case.ops import ENCODER, PREFILL, WRITE, fill_read
from attnlab.contracts.contract import ENCODER_TILE, PREFILL_TILE, Contract, Target, contract
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import mask_of


def default_scale(call: KernelCall, target: Target) -> float:
    """Return the scale that the op uses if sm_scale is not passed."""
    _, num_heads, head_size = call.query.shape
    by_heads = contract(call.op, target, call.op).default_scale == "num_heads"
    return 1.0 / math.sqrt(num_heads if by_heads else head_size)


def as_read(contract: Contract, call: KernelCall, name: str) -> torch.Tensor:
    """Return an index tensor as the kernel reads it: int64, in the tensor's own shape.

    If the kernel reinterprets int64 as int32, each number becomes two, low half first: 0, 880, 1290 is
    read as 0, 0, 880, 0, 1290, 0. The kernel reads as many numbers as it expects: 0, 0, 880.
    """
    tensor: torch.Tensor = getattr(call, name)
    if tensor.dtype == torch.int64 and contract.on_int64.get(name) == "reinterpret":
        return tensor.contiguous().view(torch.int32).flatten()[: tensor.numel()].long()
    return tensor.long()


def served(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return which sequences the kernel works on, [num_seqs] bool, by the lengths that it reads."""
    query_lens = as_read(contract, call, "query_start_loc").diff()
    if contract.serves == "all":
        return query_lens > 0
    return query_lens == 1 if contract.serves == "decode" else query_lens > 1


def written_rows(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return which output rows the kernel writes, [num_tokens] bool.

    The grids of the prefill kernels cover max_query_len rows per sequence, in whole tiles.
    """
    rows = torch.zeros(call.query.shape[0] + 1, dtype=torch.int64)
    starts = as_read(contract, call, "query_start_loc")
    lens = starts.diff()
    if contract.name in (PREFILL, ENCODER):
        lens = lens.clamp(max=grid_rows(contract, call))
    on = served(contract, call)
    begins = starts[:-1][on].clamp(0, call.query.shape[0])
    ends = (starts[:-1] + lens)[on].clamp(0, call.query.shape[0])
    rows.index_add_(0, begins, torch.ones_like(begins))
    rows.index_add_(0, ends, -torch.ones_like(ends))
    return rows.cumsum(0)[:-1] > 0


def grid_rows(contract: Contract, call: KernelCall) -> int:
    """Return the rows of a sequence that the grid of a prefill kernel covers: max_query_len, in tiles."""
    tile = PREFILL_TILE
    if contract.name == ENCODER:
        is_small = call.query.dtype == torch.float32 or call.query.shape[2] >= 512
        tile = 64 if call.origin.platform == "cpu" else ENCODER_TILE
        tile = 32 if is_small else tile
    return -(-call.max_query_len // tile) * tile


def runs_of(rows: torch.Tensor) -> list[slice]:
    """Return the runs of consecutive rows in a mask [n] bool, in order."""
    edges = torch.nonzero(torch.nn.functional.pad(rows.int(), (1, 1)).diff()).flatten().tolist()
    return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def unwritten_rows(contracts: Iterable[Contract], call: KernelCall) -> torch.Tensor:
    """Return which output rows no kernel writes, [num_tokens] bool."""
    written = torch.zeros(call.query.shape[0], dtype=torch.bool)
    for each in contracts:
        written |= written_rows(each, call)
    return ~written


def cached_lens(contract: Contract, call: KernelCall) -> torch.Tensor:
    """Return the number of positions per sequence whose keys and values come from the cache, [num_seqs].

    Positions before a sliding window count here; the kernel does not need them.
    """
    query_lens = as_read(contract, call, "query_start_loc").diff()
    ctx_lens = as_read(contract, call, "seq_lens") - query_lens
    lengths = Lengths(query_lens=tuple(query_lens.tolist()), ctx_lens=tuple(ctx_lens.tolist()))
    cached = torch.tensor(
        lengths.cached_lens(fill_read(contract.new_tokens_from)), device=query_lens.device
    )
    return torch.where(served(contract, call), cached, 0)


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
EMPTY = (SlotState.FREED, SlotState.UNWRITTEN, SlotState.UNWRITTEN_TAIL, SlotState.NEVER_MAPPED)
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
    for one in contracts:
        if one.name == WRITE:  # it reads no slot
            continue
        counts, reads = _reads(one, call, provenance)
        if all_own or reads.states.any():  # state 0 is OWN
            names = ("positions", "blocks", "slots", "states")
            parts = (getattr(reads, name).split(counts.tolist()) for name in names)
            found += [
                dataclasses.replace(reads, seq=seq, **dict(zip(names, tensors, strict=True)))
                for seq, tensors in enumerate(zip(*parts, strict=True))
            ]
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
