"""Visits: the slots of the tiles that the program of a row visits, seen or not.

A program computes a block of rows of one sequence. It visits whole tiles, up to a bound that is common to its
rows, and hides from each row what it must not see. Slots past the last key hold zeros.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import ROCM_DECODE
from attnlab.defects.edit import TILES, Defect
from attnlab.defects.scores import equal_parts
from attnlab.lab.problem import (
    AttentionInputs,
    Predicted,
    Problem,
    RowSlice,
    sample_rows,
    softmax,
)

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
        for size, pruned in product(_ROW_BLOCKS, prunes):
            text = f"with tiles of {size} keys and rows"
            slots = partial(_slots_of_rows, size, pruned)
            yield Visits(text + _OF_WINDOWS[pruned], slots, prunes=pruned)
    elif call.op == UNIFIED:
        for size, pruned in product(_tiles(problem), prunes):
            text = f"with tiles of {size}{_OF_WINDOWS[pruned]}"
            yield Visits(text, partial(_slots_of_pairs, size, pruned), prunes=pruned)
        for most, pruned in product(BATCHES_OF_SEGMENTS, prunes):
            text = f"with tiles of 32, of 16 {of_batches(most)}{_OF_WINDOWS[pruned]}"
            yield Visits(text, partial(_slots_by_batch, most, pruned), prunes=pruned)
    elif call.sliding_window or not call.spec.splits_decodes:
        yield from _visits_of_loops(problem)


def _visits_of_loops(problem: Problem) -> Iterator[Visits]:
    """Yield the ways of a loop over the cached keys, and of one over the new ones."""
    seqs = problem.computed_seqs()
    has_new = any(problem.cached_len(seq) < problem.seq_len(seq) for seq in seqs)
    if any(map(problem.cached_len, seqs)):
        for size in _tiles(problem):
            loop = 0 if has_new else None
            yield Visits(f"with tiles of {size}", partial(_cached_slots, size), loop)
    for size in _ROW_BLOCKS if has_new else ():
        yield Visits(f"with blocks of {size} rows", partial(_new_slots, size), 1)


def _tiles(problem: Problem) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*TILES, problem.call.block_size)))


def _cached_slots(tile: int, problem: Problem, row_slice: RowSlice) -> VisitedSlots:
    """Return all tiles of the cached keys."""
    cached = torch.full((len(row_slice.tokens), 1), problem.cached_len(row_slice.seq))
    block = problem.ctx_len(row_slice.seq) + row_slice.tokens[:, None]
    return VisitedSlots(torch.zeros_like(cached), cached, _whole(cached, tile), block, tile)


def _new_slots(rows: int, problem: Problem, row_slice: RowSlice) -> VisitedSlots:
    """Return the new tokens up to the end of the block of rows, which may be past the last token."""
    length, cached = problem.seq_len(row_slice.seq), problem.cached_len(row_slice.seq)
    block = row_slice.tokens[:, None] // rows * rows
    if cached == length:  # this sequence has no loop over new tokens
        end = torch.full_like(block, length)
        return VisitedSlots(end, end, end, end)
    stop = cached + block + rows
    first = torch.full_like(stop, cached)
    return VisitedSlots(first, stop.clamp(max=length), stop, cached + block)


def _slots_of_rows(size: int, prunes: bool, problem: Problem, row_slice: RowSlice) -> VisitedSlots:
    """Return the tiles up to the end of the block of rows; both have ``size`` tokens."""
    length = problem.seq_len(row_slice.seq)
    block = row_slice.tokens[:, None] // size * size
    stop = _whole((block + size).clamp(max=length), size)
    first = _start(problem, block - 1, size) if prunes else torch.zeros_like(block)
    return VisitedSlots(first, stop.clamp(max=length), stop, block, size)


def _slots_of_pairs(tile: int, prunes: bool, problem: Problem, row_slice: RowSlice) -> VisitedSlots:
    """Return the tiles up to the last row of a block; a block is 16 pairs of a row and a query head."""
    length, heads = problem.seq_len(row_slice.seq), problem.call.num_queries_per_kv
    pairs = max(_LEAST_PAIRS, 1 << (heads - 1).bit_length())
    rows = pairs // heads
    block = problem.ctx_len(row_slice.seq) + row_slice.tokens[:, None] // rows * rows
    loaded = (block + (pairs - 1) // heads + 1).clamp(max=length)
    first = _start(problem, block, tile) if prunes else torch.zeros_like(block)
    return VisitedSlots(first, loaded, _whole(loaded, tile), block, tile)


def _slots_by_batch(most: int, prunes: bool, problem: Problem, row_slice: RowSlice) -> VisitedSlots:
    """Return tiles of 16 in batches with short queries, of 32 in others."""
    return _slots_of_pairs(16 if has_segments(problem, most) else 32, prunes, problem, row_slice)


def _start(problem: Problem, block: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the start of the tile with the oldest key in the window of a block's first row."""
    oldest = block - problem.call.sliding_window + 1
    return (oldest // tile * tile).clamp(min=0)


def _whole(length: torch.Tensor, tile: int) -> torch.Tensor:
    return (length + tile - 1) // tile * tile


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
        yield Division(f"tiles of {size}", partial(_loops, size), two_loops, visited=visited)
    if two_loops:  # of context_attention_fwd
        text = "tiles of 64 and blocks of 128 rows"
        visited = partial(_new_slots, 128)
        yield Division(text, partial(_loops, 64), two_loops, visited=visited, repeats=True)
        for cached_size, size in product(_CACHED_TILES, _NEW_TILES):
            text = f"tiles of {cached_size} in the context and of {size} in the new tokens"
            parts = partial(_loops, cached_size, new_size=size)
            yield Division(text, parts, visited=partial(_new_slots, size))
    if call.op == UNIFIED:
        count = _SEGMENTS if call.num_splits is None else call.num_splits
        for size in sizes if count > 1 else ():
            text = f"up to {count} segments of tiles of {size}"
            parts = partial(_splits, count, size, size)
            yield Division(text, parts, merge="at once", slots=count, text_of_parts=text)
        for most in BATCHES_OF_SEGMENTS if count > 1 else ():
            text = f"tiles of 32, or {count} segments of tiles of 16 {of_batches(most)}"
            yield Division(
                text,
                partial(_by_batch, count, most),
                merge="at once",
                slots=count,
                text_of_parts=text,
                visited=partial(_slots_by_batch, most, False),
            )
    for count in call.spec.split_counts(call.num_splits) if call.spec.splits_decodes else ():
        text_of_parts = f"{count} splits"
        for size in dict.fromkeys((*_SPLIT_TILES, *sizes)) if count > 1 else ():
            yield Division(
                f"{count} splits with tiles of {size}",
                partial(_splits, count, size, call.spec.split_step or call.block_size),
                merge="running",
                slots=count,
                text_of_parts=text_of_parts,
            )
            text_of_parts = ""
    if call.spec.partition_size or ROCM_DECODE in problem.kernels:
        size, text = problem.partition_size, f"partitions of {problem.partition_size}"
        parts = partial(_splits, 0, size, size)
        yield Division(text, parts, merge="at once", text_of_parts=text)


def with_tiles_to(parts: Parts, stop: int) -> Parts:
    """Return the parts with tiles without keys, from the end of the last part up to a slot."""
    first, last, slots, loop = parts[-1][-1]
    size = last + slots - first
    begins = range(first + size, stop, size)
    return [*parts[:-1], [*parts[-1], *((begin, begin, 0, loop) for begin in begins)]]


def _visited(problem: Problem, size: int) -> VisitedOf | None:
    """Return what the rows of an op's prefills visit in tiles of a size."""
    if problem.call.op == UNIFIED:
        return partial(_slots_of_pairs, size, False)
    if not problem.call.spec.context:
        return partial(_slots_of_rows, size, False)
    has_new = any(problem.cached_len(seq) < problem.seq_len(seq) for seq in problem.computed_seqs())
    return partial(_new_slots, size) if has_new else None


def _loops(size: int, problem: Problem, seq: int, new_size: int | None = None) -> Parts:
    """Return one part: a loop over the cached keys, then one over the new ones, by default in equal tiles."""
    cached, length = problem.cached_len(seq), problem.seq_len(seq)
    return [[*_tiles_of(0, cached, size, 0), *_tiles_of(cached, length, new_size or size, 1)]]


def _by_batch(count: int, most: int, problem: Problem, seq: int) -> Parts:
    """Return segments of tiles of 16 in batches with short queries, and one part of tiles of 32 in others."""
    if has_segments(problem, most):
        return _splits(count, 16, 16, problem, seq)
    return _loops(32, problem, seq)


def _splits(count: int, size: int, multiple: int, problem: Problem, seq: int) -> Parts:
    """Return at most ``count`` parts of equally many keys, a multiple of ``multiple``; 0 for parts of so many
    keys."""
    length = problem.seq_len(seq)
    starts = equal_parts(length, count, multiple)
    return [[*_tiles_of(start, min(start + starts.step, length), size, 0)] for start in starts]


def _tiles_of(start: int, stop: int, size: int, loop: int) -> Iterator[Tile]:
    for first in range(start, stop, size):
        last = min(first + size, stop)
        yield first, last, first + size - last, loop


# Rules about masks: slots that a row must not see count, because a kernel visits whole tiles, or keys that
# it must see do not, because a kernel leaves out a tile or masks all rows of a block alike.
#
# A slot counts with the score of its key, or with a constant. A slot past the last key has a key and a value
# of zeros, so it adds to the sum alone.

FAMILY = "masks"
_MISSING = {
    "tile": "keys of the last tile of a block of rows do not count if the tile is not full",
    "block": "keys after the first row of a block of rows do not count",
    "window": "keys of the tile in which the window begins do not count if part of it is before the window",
    "window of last": "the window of all rows of a block is that of its last row",
}
_LOWEST = -1e4  # what some kernels write in place of -inf
_NEAR = 5e-3  # how near a measured score is to a plain one that the source may have


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLaw:
    """Which hidden slots count, and with which score.

    - ``later``: those after a row's own key: "none", "next" (the first of them) or "all".
    - ``before``: those before the window. ``padding``: those past the last key.
    - ``score``: None for the score of the slot's key, or a constant; with ``scaled``, in units of the softmax
      scale. ``seen``: keys that the row sees have the constant, too.
    - ``no_values``: values of slots before the window of a program's first row are 0.
    - ``up_to_row``: slots past the last key count only up to the number of the row's own position.
    - ``within_sequence``: slots past the last key that the block loads count only up to the sequence's end.
    - ``of_window``: slots past the last key count only before a row's window. ``both_loops``: hidden keys of
      the loop over the new tokens count, too.
    - ``missing``: which keys do not count: a key of ``_MISSING``, or "none".
    - ``window_of_first``: slots before a row's window count only if the first row of the block sees them.
    """

    later: str = "none"
    before: bool = False
    padding: bool = False
    score: float | None = None
    scaled: bool = False
    seen: bool = False
    no_values: bool = False
    up_to_row: bool = False
    within_sequence: bool = False
    of_window: bool = False
    both_loops: bool = False
    missing: str = "none"
    window_of_first: bool = False

    @property
    def is_of_rows(self) -> bool:
        """Answer whether the blocks of rows matter and the tiles of keys do not."""
        return self.window_of_first or self.missing in ("block", "window of last")

    def inputs(
        self, problem: Problem, inputs: AttentionInputs, slots: VisitedSlots
    ) -> AttentionInputs:
        """Return the inputs of attention in which the slots count."""
        keys, at = torch.arange(inputs.key.shape[0]), inputs.position[:, None]
        visited = (keys >= slots.first) & ((keys < slots.loaded) | self.both_loops)
        if self.window_of_first:
            visited &= slots.block - keys < problem.call.sliding_window
        counted = visited & ~inputs.visible & self._counts(keys, at)
        constant = visited if self.seen else counted
        score = self.score
        if score is not None and self.scaled:
            score *= inputs.sm_scale
        padding = self._padding_scores(inputs, slots, problem.call.sliding_window, score)
        is_missing = self._is_missing(keys, at, slots, problem.call.sliding_window)
        visible = (inputs.visible | counted) & ~is_missing
        sees_none = (
            ~visible.any(-1, keepdim=True) if self.missing != "none" else visible[:, :1] & False
        )
        empty = torch.zeros_like(counted)
        if self.no_values:
            empty = counted & (slots.block - keys >= problem.call.sliding_window)

        def weigh(scores: torch.Tensor) -> torch.Tensor:
            if score is not None:
                scores = scores.masked_fill(constant, score)
            every = torch.cat([scores, padding.to(scores.dtype)], -1)
            found = softmax(every, inputs.sinks)[..., : scores.shape[-1]]
            return found.masked_fill(empty | sees_none, 0.0)

        return dataclasses.replace(inputs, visible=visible, weigh=weigh)

    def _is_missing(
        self, keys: torch.Tensor, at: torch.Tensor, slots: VisitedSlots, window: int
    ) -> torch.Tensor:
        """Return which keys do not count although rows must see them, [rows, keys] bool."""
        if self.missing == "tile":
            return keys >= slots.loaded // slots.tile * slots.tile
        if self.missing == "window":
            return keys // slots.tile * slots.tile <= at - window
        if self.missing == "window of last":
            return keys < slots.loaded - window
        return (keys > slots.block) & (self.missing == "block")

    def _counts(self, keys: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return which keys count if they are hidden, [rows, keys] bool."""
        later = {"none": keys < 0, "next": keys == at + 1, "all": keys > at}[self.later]
        return later | ((keys <= at) & self.before)

    def _padding_scores(
        self, inputs: AttentionInputs, slots: VisitedSlots, window: int, score: float | None
    ) -> torch.Tensor:
        """Return the scores of the slots past the last key, [heads, rows, slots], -inf where none counts.

        ``score``: the constant, or None.
        """
        most = int((slots.stop - slots.loaded).max()) if self.padding else 0
        slot = slots.loaded + torch.arange(most)
        scores = torch.zeros(inputs.query.shape[1], *slot.shape, dtype=torch.float64)
        if score is not None:
            scores = scores + score
        elif inputs.alibi_slopes is not None:
            scores = inputs.alibi_slopes[:, None, None] * (slot - inputs.position[:, None])
        counts = slot < slots.stop
        if self.later == "next":
            counts &= slot == inputs.position[:, None] + 1
        elif self.within_sequence:
            counts &= slot < inputs.key.shape[0]
        elif self.of_window:
            counts &= slot <= inputs.position[:, None] - window
        elif self.up_to_row:
            counts &= slot <= inputs.position[:, None]
        return scores.masked_fill(~counts, -torch.inf)


def mask_defects(problem: Problem, output: torch.Tensor | None = None) -> list[Defect]:
    """Return the rules about masks that a call allows, each as a defect.

    ``output``: a wrong output [rows, heads, size], which may show the score of hidden slots.
    """
    if problem.call.spec.merges or not problem.call.visibility.is_plain:
        return []
    found: dict[str, Defect] = {}
    samples = [] if output is None else list(_samples(problem, output))
    for visited in visits(problem):
        laws = list(_laws(problem, visited))
        for law in (*laws, *_measured(problem, visited, laws, samples)):
            where = "" if law.is_of_rows else f"{visited.text}, "
            loop = "in both loops, " if law.both_loops else LOOPS[visited.loop]
            text = f"{loop}{where}{_text(law)}"
            compute = partial(_counted, law, visited)
            defect = Defect(family=FAMILY, name=text, text=text, compute=compute)
            found.setdefault(text, defect)
    return list(found.values())


_FEWEST_PAIRS = 4  # of a row and a head, in which a score is measured
_LEAST_PART = 1e-2  # of a row's weights that hidden slots have in these
_ALIKE = 0.05  # by how much most of the factors exp(score) of these pairs may differ
_HUGE = 60.0  # a score so large that the weights of all other slots are 0


_Sample = tuple[RowSlice, torch.Tensor, torch.Tensor]  # rows with their output, and the right one


def _samples(problem: Problem, output: torch.Tensor) -> Iterator[_Sample]:
    """Yield a few rows of each sequence with what an output has for them."""
    for row_slice in sample_rows(problem):
        rows = problem.row_starts()[row_slice.seq] + row_slice.tokens
        given = output[rows][:, row_slice.heads].double()
        yield row_slice, given, problem.correct(row_slice).output


def _measured(
    problem: Problem, visited: Visits, laws: Iterable[MaskLaw], samples: Sequence[_Sample]
) -> Iterator[MaskLaw]:
    """Yield laws with the one score that an output shows, alone and in units of the softmax scale."""
    if not samples:
        return
    scale = problem.attention_inputs(samples[0][0]).sm_scale
    constant = (dataclasses.replace(law, score=0.0) for law in laws if law.score is not None)
    for law in dict.fromkeys(one for one in constant if not one.seen):
        score = _measured_score(problem, visited, law, samples)
        if score is not None and all(abs(score - one) > _NEAR for one in _scores(problem)):
            yield dataclasses.replace(law, score=_plain(score))
            yield dataclasses.replace(law, score=_plain(score / scale), scaled=True)


def _measured_score(
    problem: Problem, visited: Visits, law: MaskLaw, samples: Sequence[_Sample]
) -> float | None:
    """Return the score of hidden slots under a law, or None if the wrong rows of an output show no one.

    The output of a row is between the right one and that of the hidden slots alone: how near to the second
    is proportional to exp(score).
    """
    shown, wanted = [], []
    for row_slice, given, right in samples:
        at_0, alone = (
            _counted(dataclasses.replace(law, score=one), visited, problem, row_slice).output
            for one in (0.0, _HUGE)
        )
        shown.append(_odds(given, right, alone))
        wanted.append(_odds(at_0, right, alone))
    odds, odds_at_0 = torch.cat(shown), torch.cat(wanted)
    is_clear = (odds > _LEAST_PART) & (odds_at_0 > _LEAST_PART) & odds.isfinite()
    odds, odds_at_0 = odds[is_clear], odds_at_0[is_clear]
    factors = odds / odds_at_0
    if len(factors) < _FEWEST_PAIRS:
        return None
    is_alike = (factors / factors.median() - 1).abs() < _ALIKE
    if is_alike.double().mean() < 1 - _ALIKE:
        return None
    factor = (odds * odds_at_0)[is_alike].sum() / odds_at_0[is_alike].square().sum()
    return math.log(float(factor))


def _odds(output: torch.Tensor, right: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """Return the weight of hidden slots in outputs, as a multiple of that of all others, by row and head.

    All are [rows, heads, size]; ``alone``: the output of the hidden slots.
    """
    to = alone - output
    return ((output - right) * to).sum(-1).flatten() / to.square().sum(-1).flatten()


def _plain(score: float) -> float:
    """Return the multiple of 0.5, or of 0.5 in base 2, that a score is near to, or the score."""
    for base in (1.0, math.log(2)):
        near = round(2 * score / base) / 2 * base
        if abs(score - near) < _NEAR:
            return near
    return score


def _counted(law: MaskLaw, visited: Visits, problem: Problem, row_slice: RowSlice) -> Predicted:
    """Return the output of some rows under a law for the slots that a kernel visits."""
    inputs, slots = problem.attention_inputs(row_slice), visited.slots(problem, row_slice)
    return problem.predict(law.inputs(problem, inputs, slots))


def _laws(problem: Problem, visited: Visits) -> Iterator[MaskLaw]:
    """Yield the laws that can change a call, those with the fewest slots first."""
    is_biased = problem.call.alibi_slopes is not None
    if problem.call.spec.splits_decodes:  # other tiles begin and end with its parts
        yield MaskLaw(missing="window")
        return
    if not visited.prunes:
        if visited.loop == 0 or max(map(problem.query_len, problem.computed_seqs())) == 1:
            padding = MaskLaw(padding=True)  # without biases, a rule of the softmax
            later = [padding, dataclasses.replace(padding, up_to_row=True)] if is_biased else []
        else:
            later = [
                MaskLaw(later="next", padding=True),
                MaskLaw(later="all"),
                MaskLaw(later="all", padding=True),
                MaskLaw(padding=True),
            ]
        yield from later
        for law, score in product(later, _scores(problem)):
            if law.later != "none" or is_biased or score:
                yield dataclasses.replace(law, score=score)
        yield MaskLaw(later="all", before=True, padding=True, score=_LOWEST, seen=True)
        if problem.call.op == UNIFIED:
            yield MaskLaw(later="all", padding=True, within_sequence=True)
            yield from (MaskLaw(missing="tile"), MaskLaw(missing="block"))
    if problem.call.sliding_window:
        yield from _window_laws(problem, visited)


def _scores(problem: Problem) -> tuple[float, ...]:
    """Return the constants that hidden slots may have: a soft cap makes its own negative of -inf."""
    return (0.0,) if problem.call.softcap is None else (0.0, -problem.call.softcap)


def _window_laws(problem: Problem, visited: Visits) -> Iterator[MaskLaw]:
    """Yield the laws about keys before the window."""
    is_unified = problem.call.op == UNIFIED
    for law in (MaskLaw(before=True), MaskLaw(before=True, later="all", padding=True)):
        for score in (None, *_scores(problem)):
            yield dataclasses.replace(law, score=score)
            if is_unified:
                yield dataclasses.replace(law, score=score, no_values=True)
    yield MaskLaw(before=True, score=_LOWEST)
    if visited.loop == 0:
        for both, score in product((False, True), (_LOWEST, 0.0)):
            yield MaskLaw(before=True, padding=True, of_window=True, score=score, both_loops=both)
    if not visited.prunes and visited.loop != 1 and problem.call.sliding_window > 1:
        yield MaskLaw(missing="window")
        if is_unified:
            yield MaskLaw(missing="window of last")
            yield MaskLaw(before=True, window_of_first=True)


def _text(law: MaskLaw) -> str:
    """Return a law in words."""
    if law.window_of_first:
        return "the window of all rows of a block is that of its first row"
    if law.seen:
        return f"the scores of all slots are {law.score:g}"
    if law.missing != "none":
        return _MISSING[law.missing]
    parts = []
    if law.later != "none":
        parts.append("the next key" if law.later == "next" else "later keys")
    if law.before:
        parts.append("keys before the window")
    if law.padding:
        row = " up to the row's own position" if law.up_to_row else ""
        row = " of the context that are before the window" if law.of_window else row
        end = " of the block, up to the sequence's end" if law.within_sequence else ""
        parts.append(f"slots past the last key{row}{end}")
    score = "their own scores" if law.score is None else _score_text(law.score, law.scaled)
    values = ", those before the window of the block without values" if law.no_values else ""
    return f"hidden slots of the tiles count with {score}: {' and '.join(parts)}{values}"


def _score_text(score: float, is_scaled: bool) -> str:
    """Return a constant score in words, in base 2 if it is plainer there."""
    in_base_2 = score / math.log(2)
    is_plain = abs(2 * score - round(2 * score)) < 1e-9
    base = "" if is_plain or abs(2 * in_base_2 - round(2 * in_base_2)) > 1e-9 else " in base 2"
    unit = " times the softmax scale" if is_scaled else ""
    return f"score {round(in_base_2 if base else score, 3):g}{unit}{base}"
