"""Division: how a kernel may divide the keys of a sequence, into parts and tiles.

Each part has its own maximum, sum and accumulator, which a merge combines. Within a part, tiles are added one
after the other.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnlab.case.ops import DECODE_FWD, ENCODER, UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.contracts.target import ROCM_DECODE
from attnlab.defects.problem import Problem
from attnlab.defects.softmax import TILES
from attnlab.diagnosis.visited_slots import (
    BATCHES_OF_SEGMENTS,
    VisitedOf,
    has_segments,
    new_slots,
    of_batches,
    slots_by_batch,
    slots_of_pairs,
    slots_of_rows,
)

Tile = tuple[int, int, int, int]  # first key, last key + 1, slots of the tile after them, loop
Parts = list[list[Tile]]
LOOPS = {None: "", 0: "in the loop over the context, ", 1: "in the loop over the new tokens, "}
# Of unified_attention and decode_attention_fwd, if a call does not state them.
_SEGMENTS, _SPLITS = 16, 4
_SPLIT_TILES = (8,)  # of decode_attention_fwd on ROCm, in addition to TILES
# Of the two loops of context_attention_fwd, where they differ.
_CACHED_TILES, _NEW_TILES = (16, 32), (64, 128)


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide the keys.

    - ``text``: in words. ``has_loops``: context and new tokens are read in two loops, 0 and 1.
    - ``parts``: returns the parts of a sequence with keys, each as its tiles in their order.
    - ``merge``: how parts are combined: "" (there is one), "at once" or "running"; ``slots``: for how many
      parts there is scratch memory, 0 if that is not known.
    - ``visited``: returns the slots that each row's program visits, up to which the tiles of the last part
      continue; None if they end with the sequence. A tile without a key that a row sees still rescales.
      ``repeats``: another division has the same tiles, and other visited slots.
    """

    text: str
    parts: Callable[[Problem, int], Parts]
    has_loops: bool = False
    merge: str = ""
    slots: int = 0
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
            yield Division(text, _segments(count, size), merge="at once", slots=count)
        for most in BATCHES_OF_SEGMENTS if count > 1 else ():
            text = f"tiles of 32, or {count} segments of tiles of 16 {of_batches(most)}"
            visited = slots_by_batch(most, prunes=False)
            yield Division(
                text, _by_batch(count, most), merge="at once", slots=count, visited=visited
            )
    if call.op == DECODE_FWD:
        count = _SPLITS if call.num_splits is None else call.num_splits
        for size in dict.fromkeys((*_SPLIT_TILES, *sizes)) if count > 1 else ():
            text = f"{count} splits with tiles of {size}"
            yield Division(text, _splits(count, size), merge="running", slots=count)
    if ROCM_DECODE in problem.kernels:
        text = f"partitions of {PARTITION_SIZE}"
        yield Division(text, _segments(0, PARTITION_SIZE), merge="at once")


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
    if problem.call.op == ENCODER:
        return slots_of_rows(size, prunes=False)
    has_new = any(problem.cached_len(seq) < problem.seq_len(seq) for seq in problem.computed_seqs())
    return new_slots(size) if has_new else None


def _loops(size: int, new_size: int | None = None) -> Callable[[Problem, int], Parts]:
    """Return one part: a loop over the cached keys, then one over the new ones, by default in equal tiles."""

    def parts(problem: Problem, seq: int) -> Parts:
        cached, length = problem.cached_len(seq), problem.seq_len(seq)
        tiles = _tiles(0, cached, size, 0), _tiles(cached, length, new_size or size, 1)
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


def _splits(count: int, size: int) -> Callable[[Problem, int], Parts]:
    """Return ``count`` parts of equally many keys."""

    def parts(problem: Problem, seq: int) -> Parts:
        length = problem.seq_len(seq)
        return _cut(length, -(-length // count), size)

    return parts


def _cut(length: int, step: int, size: int) -> Parts:
    return [
        list(_tiles(start, min(start + step, length), size, 0)) for start in range(0, length, step)
    ]


def _tiles(start: int, stop: int, size: int, loop: int) -> Iterator[Tile]:
    for first in range(start, stop, size):
        last = min(first + size, stop)
        yield first, last, first + size - last, loop
