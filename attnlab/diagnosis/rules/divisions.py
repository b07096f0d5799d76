"""Visits: the slots of the tiles that the program of a row visits, seen or not.

A program computes a block of rows of one sequence. It visits whole tiles, up to a bound that is common to its
rows, and hides from each row what it must not see. Slots past the last key hold zeros.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE, ROCM_DECODE
from attnlab.defects.edit import TILES
from attnlab.lab.problem import Problem, RowSlice

_ROW_BLOCKS = (128, 64, 32, 16)  # rows of a program of prefills
_LEAST_PAIRS = 16  # of a row and a query head, in a program of unified_attention
# New tokens of the longest query up to which unified_attention divides sequences: 0.11.2 and 0.33.0.
BATCHES_OF_SEGMENTS = (1, 8)
_OF_WINDOWS = {True: " that windows of the block's rows reach", False: ""}


@dataclass(frozen=True, slots=True, eq=False)
class VisitedSlots:
    """The slots from ``first`` to ``stop`` - 1 that are visited, each [rows, 1] int64, as positions.

    ``loaded``: slots from here on hold no key; their keys and values are 0. ``block``: position of the first
    row of each row's program. ``tile``: slots of a tile that begins at a multiple of it.
    """

    first: torch.Tensor
    loaded: torch.Tensor
    stop: torch.Tensor
    block: torch.Tensor
    tile: int = 1


VisitedOf = Callable[[Problem, RowSlice], VisitedSlots]


@dataclass(frozen=True, slots=True)
class Visits:
    """Which slots programs visit in one loop.

    - ``text``: the tiles and the blocks of rows in words. ``loop``: 0 for the context, 1 for the new tokens,
      None if there is one loop. ``prunes``: tiles before the windows of all rows are left out.
    - ``slots``: returns them for some rows of a sequence.
    """

    text: str
    slots: VisitedOf
    loop: int | None = None
    prunes: bool = False


def visits(problem: Problem) -> Iterator[Visits]:
    """Yield the ways in which the kernels of a call may visit slots."""
    call = problem.call
    prunes = (True, False) if call.sliding_window else (False,)
    if not call.spec.context:
        for size, pruned in itertools.product(_ROW_BLOCKS, prunes):
            text = f"with tiles of {size} keys and rows"
            yield Visits(text + _OF_WINDOWS[pruned], slots_of_rows(size, pruned), prunes=pruned)
    elif call.op == UNIFIED:
        for size, pruned in itertools.product(_tiles(problem), prunes):
            text = f"with tiles of {size}{_OF_WINDOWS[pruned]}"
            yield Visits(text, slots_of_pairs(size, pruned), prunes=pruned)
        for most, pruned in itertools.product(BATCHES_OF_SEGMENTS, prunes):
            text = f"with tiles of 32, of 16 {of_batches(most)}{_OF_WINDOWS[pruned]}"
            yield Visits(text, slots_by_batch(most, pruned), prunes=pruned)
    elif not call.spec.splits_decodes:  # its parts end elsewhere
        yield from _visits_of_loops(problem)


def _visits_of_loops(problem: Problem) -> Iterator[Visits]:
    """Yield the ways of a loop over the cached keys, and of one over the new ones."""
    seqs = problem.computed_seqs()
    has_new = any(problem.cached_len(seq) < problem.seq_len(seq) for seq in seqs)
    if any(map(problem.cached_len, seqs)):
        for size in _tiles(problem):
            yield Visits(f"with tiles of {size}", _cached(size), 0 if has_new else None)
    for size in _ROW_BLOCKS if has_new else ():
        yield Visits(f"with blocks of {size} rows", new_slots(size), 1)


def _tiles(problem: Problem) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*TILES, problem.call.block_size)))


def _cached(tile: int) -> VisitedOf:
    """Return all tiles of the cached keys."""

    def slots(problem: Problem, row_slice: RowSlice) -> VisitedSlots:
        cached = torch.full((len(row_slice.tokens), 1), problem.cached_len(row_slice.seq))
        first = torch.zeros_like(cached)
        block = _position(problem, row_slice)
        return VisitedSlots(first, cached, _whole(cached, tile), block, tile)

    return slots


def new_slots(rows: int) -> VisitedOf:
    """Return the new tokens up to the end of the block of rows, which may be past the last token."""

    def slots(problem: Problem, row_slice: RowSlice) -> VisitedSlots:
        length, cached = problem.seq_len(row_slice.seq), problem.cached_len(row_slice.seq)
        block = row_slice.tokens[:, None] // rows * rows
        if cached == length:  # this sequence has no loop over new tokens
            end = torch.full_like(block, length)
            return VisitedSlots(end, end, end, end)
        stop = cached + block + rows
        first = torch.full_like(stop, cached)
        return VisitedSlots(first, stop.clamp(max=length), stop, cached + block)

    return slots


def slots_of_rows(size: int, prunes: bool) -> VisitedOf:
    """Return the tiles up to the end of the block of rows; both have ``size`` tokens."""

    def slots(problem: Problem, row_slice: RowSlice) -> VisitedSlots:
        length = problem.seq_len(row_slice.seq)
        block = row_slice.tokens[:, None] // size * size
        stop = _whole((block + size).clamp(max=length), size)
        first = _start(problem, block - 1, size) if prunes else torch.zeros_like(block)
        return VisitedSlots(first, stop.clamp(max=length), stop, block, size)

    return slots


def slots_of_pairs(tile: int, prunes: bool) -> VisitedOf:
    """Return the tiles up to the last row of a block; a block is 16 pairs of a row and a query head."""

    def slots(problem: Problem, row_slice: RowSlice) -> VisitedSlots:
        length, heads = problem.seq_len(row_slice.seq), problem.call.num_queries_per_kv
        pairs = max(_LEAST_PAIRS, 1 << (heads - 1).bit_length())
        rows = pairs // heads
        context = length - problem.query_len(row_slice.seq)
        block = context + row_slice.tokens[:, None] // rows * rows
        loaded = (block + (pairs - 1) // heads + 1).clamp(max=length)
        first = _start(problem, block, tile) if prunes else torch.zeros_like(block)
        return VisitedSlots(first, loaded, _whole(loaded, tile), block, tile)

    return slots


def slots_by_batch(most: int, prunes: bool) -> VisitedOf:
    """Return tiles of 16 in batches with short queries, of 32 in others."""

    def slots(problem: Problem, row_slice: RowSlice) -> VisitedSlots:
        tile = 16 if has_segments(problem, most) else 32
        return slots_of_pairs(tile, prunes)(problem, row_slice)

    return slots


def _start(problem: Problem, block: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the start of the tile with the oldest key in the window of a block's first row."""
    oldest = block - problem.call.sliding_window + 1
    return (oldest // tile * tile).clamp(min=0)


def _whole(length: torch.Tensor, tile: int) -> torch.Tensor:
    return (length + tile - 1) // tile * tile


def _position(problem: Problem, row_slice: RowSlice) -> torch.Tensor:
    context = problem.seq_len(row_slice.seq) - problem.query_len(row_slice.seq)
    return context + row_slice.tokens[:, None]


def has_segments(problem: Problem, most: int) -> bool:
    """Answer whether no sequence of a batch has more than ``most`` new tokens."""
    return max(map(problem.query_len, problem.computed_seqs())) <= most


def of_batches(most: int) -> str:
    """Return in which batches sequences are divided, in words."""
    return "for decodes alone" if most == 1 else f"if no query is longer than {most}"


# Division: how a kernel may divide the keys of a sequence, into parts and tiles.
#
# Each part has its own maximum, sum and accumulator, which a merge combines. Within a part, tiles are added
# one after the other.

Tile = tuple[int, int, int, int]  # first key, last key + 1, slots of the tile after them, loop
Parts = list[list[Tile]]
LOOPS = {None: "", 0: "in the loop over the context, ", 1: "in the loop over the new tokens, "}
_SEGMENTS = 16  # of unified_attention, if a call does not state them
_SPLIT_TILES = (8,)  # of decode_attention_fwd on ROCm, in addition to TILES
# Of the two loops of context_attention_fwd, where they differ.
_CACHED_TILES, _NEW_TILES = (16, 32), (64, 128)


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide the keys.

    - ``text``: in words. ``has_loops``: context and new tokens are read in two loops, 0 and 1.
    - ``parts``: returns the parts of a sequence with keys, each as its tiles in their order.
    - ``merge``: how parts are combined: "" (there is one), "at once" or "running"; ``slots``: for how many
      parts there is scratch memory, 0 if that is not known. ``text_of_parts``: the parts in words, without
      tiles that do not change them; "" if another division has the same.
    - ``visited``: returns the slots that each row's program visits, up to which the tiles of the last part
      continue; None if they end with the sequence. A tile without a key that a row sees still rescales.
      ``repeats``: another division has the same tiles, and other visited slots.
    """

    text: str
    parts: Callable[[Problem, int], Parts]
    has_loops: bool = False
    merge: str = ""
    slots: int = 0
    text_of_parts: str = ""
    visited: VisitedOf | None = None
    repeats: bool = False


def divisions(problem: Problem) -> Iterator[Division]:
    """Yield the divisions that the kernels of a call may use."""
    call, cached = problem.call, any(map(problem.cached_len, problem.computed_seqs()))
    two_loops = cached and any(
        0 < problem.cached_len(seq) < problem.seq_len(seq) for seq in problem.computed_seqs()
    )
    sizes = dict.fromkeys((*TILES, call.block_size))
    for size in sizes:
        visited = _visited(problem, size)
        yield Division(f"tiles of {size}", _loops(size), two_loops, visited=visited)
    if two_loops:  # of context_attention_fwd
        text = "tiles of 64 and blocks of 128 rows"
        yield Division(text, _loops(64), two_loops, visited=new_slots(128), repeats=True)
        for cached_size, size in itertools.product(_CACHED_TILES, _NEW_TILES):
            text = f"tiles of {cached_size} in the context and of {size} in the new tokens"
            yield Division(text, _loops(cached_size, size), visited=new_slots(size))
    if call.op == UNIFIED:
        count = _SEGMENTS if call.num_splits is None else call.num_splits
        for size in sizes if count > 1 else ():
            text = f"up to {count} segments of tiles of {size}"
            yield Division(
                text, _segments(count, size), merge="at once", slots=count, text_of_parts=text
            )
        for most in BATCHES_OF_SEGMENTS if count > 1 else ():
            text = f"tiles of 32, or {count} segments of tiles of 16 {of_batches(most)}"
            visited = slots_by_batch(most, prunes=False)
            yield Division(
                text,
                _by_batch(count, most),
                merge="at once",
                slots=count,
                text_of_parts=text,
                visited=visited,
            )
    for count in call.spec.split_counts(call.num_splits) if call.spec.splits_decodes else ():
        text_of_parts = f"{count} splits"
        for size in dict.fromkeys((*_SPLIT_TILES, *sizes)) if count > 1 else ():
            yield Division(
                f"{count} splits with tiles of {size}",
                _splits(count, size, call.spec.split_step or call.block_size),
                merge="running",
                slots=count,
                text_of_parts=text_of_parts,
            )
            text_of_parts = ""
    if ROCM_DECODE in problem.kernels:
        text = f"partitions of {PARTITION_SIZE}"
        yield Division(text, _segments(0, PARTITION_SIZE), merge="at once", text_of_parts=text)


def with_tiles_to(parts: Parts, stop: int) -> Parts:
    """Return the parts with tiles without keys, from the end of the last part up to a slot."""
    first, last, slots, loop = parts[-1][-1]
    size = last + slots - first
    begins = range(first + size, stop, size)
    return [*parts[:-1], [*parts[-1], *((begin, begin, 0, loop) for begin in begins)]]


def _visited(problem: Problem, size: int) -> VisitedOf | None:
    """Return what the rows of an op's prefills visit in tiles of a size."""
    if problem.call.op == UNIFIED:
        return slots_of_pairs(size, prunes=False)
    if not problem.call.spec.context:
        return slots_of_rows(size, prunes=False)
    has_new = any(problem.cached_len(seq) < problem.seq_len(seq) for seq in problem.computed_seqs())
    return new_slots(size) if has_new else None


def _loops(size: int, new_size: int | None = None) -> Callable[[Problem, int], Parts]:
    """Return one part: a loop over the cached keys, then one over the new ones, by default in equal tiles."""

    def parts(problem: Problem, seq: int) -> Parts:
        cached, length = problem.cached_len(seq), problem.seq_len(seq)
        tiles = _tiles_of(0, cached, size, 0), _tiles_of(cached, length, new_size or size, 1)
        return [list(itertools.chain(*tiles))]

    return parts


def _segments(count: int, size: int) -> Callable[[Problem, int], Parts]:
    """Return at most ``count`` parts of equally many tiles; 0 for parts of one tile."""

    def parts(problem: Problem, seq: int) -> Parts:
        length = problem.seq_len(seq)
        step = size if not count else -(-length // (count * size)) * size
        return _cut(length, step, size)

    return parts


def _by_batch(count: int, most: int) -> Callable[[Problem, int], Parts]:
    """Return segments of tiles of 16 in batches with short queries, and one part of tiles of 32 in others."""

    def parts(problem: Problem, seq: int) -> Parts:
        return (_segments(count, 16) if has_segments(problem, most) else _loops(32))(problem, seq)

    return parts


def _splits(count: int, size: int, multiple: int) -> Callable[[Problem, int], Parts]:
    """Return at most ``count`` parts of equally many keys, a multiple of ``multiple``."""

    def parts(problem: Problem, seq: int) -> Parts:
        length = problem.seq_len(seq)
        return _cut(length, -(-length // (count * multiple)) * multiple, size)

    return parts


def _cut(length: int, step: int, size: int) -> Parts:
    return [
        list(_tiles_of(start, min(start + step, length), size, 0))
        for start in range(0, length, step)
    ]


def _tiles_of(start: int, stop: int, size: int, loop: int) -> Iterator[Tile]:
    for first in range(start, stop, size):
        last = min(first + size, stop)
        yield first, last, first + size - last, loop
