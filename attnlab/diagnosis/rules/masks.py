"""Rules about masks: slots that a row must not see count, because a kernel visits whole tiles, or keys that
it must see do not, because a kernel leaves out a tile or masks all rows of a block alike.

A slot counts with the score of its key, or with a constant. A slot past the last key has a key and a value of
zeros, so it adds to the sum alone.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from attnlab.case.ops import UNIFIED
from attnlab.defects.edit import Defect
from attnlab.diagnosis.rules.divisions import LOOPS, VisitedSlots, Visits, visits
from attnlab.lab.problem import AttentionInputs, Predicted, Problem, RowSlice, softmax

FAMILY = "masks"
_MISSING = {
    "tile": "keys of the last tile of a block of rows do not count if the tile is not full",
    "block": "keys after the first row of a block of rows do not count",
    "window": "keys of the tile in which the window begins do not count if part of it is before the window",
    "window of last": "the window of all rows of a block is that of its last row",
}
_LOWEST = -1e4  # what some kernels write in place of -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLaw:
    """Which hidden slots count, and with which score.

    - ``later``: those after a row's own key: "none", "next" (the first of them) or "all".
    - ``before``: those before the window. ``padding``: those past the last key.
    - ``score``: None for the score of the slot's key, or a constant. ``seen``: keys that the row sees have
      the constant, too.
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
        padding = self._padding_scores(inputs, slots, problem.call.sliding_window)
        is_missing = self._is_missing(keys, at, slots, problem.call.sliding_window)
        visible = (inputs.visible | counted) & ~is_missing
        sees_none = (
            ~visible.any(-1, keepdim=True) if self.missing != "none" else visible[:, :1] & False
        )
        empty = torch.zeros_like(counted)
        if self.no_values:
            empty = counted & (slots.block - keys >= problem.call.sliding_window)

        def weigh(scores: torch.Tensor) -> torch.Tensor:
            if self.score is not None:
                scores = scores.masked_fill(constant, self.score)
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
        self, inputs: AttentionInputs, slots: VisitedSlots, window: int
    ) -> torch.Tensor:
        """Return the scores of the slots past the last key, [heads, rows, slots], -inf where none counts."""
        most = int((slots.stop - slots.loaded).max()) if self.padding else 0
        slot = slots.loaded + torch.arange(most)
        scores = torch.zeros(inputs.query.shape[1], *slot.shape, dtype=torch.float64)
        if self.score is not None:
            scores = scores + self.score
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


def mask_defects(problem: Problem) -> list[Defect]:
    """Return the rules about masks that a call allows, each as a defect."""
    if problem.call.spec.merges or not problem.call.visibility.is_plain:
        return []
    found: dict[str, Defect] = {}
    for visited in visits(problem):
        for law in _laws(problem, visited):
            where = "" if law.is_of_rows else f"{visited.text}, "
            loop = "in both loops, " if law.both_loops else LOOPS[visited.loop]
            text = f"{loop}{where}{_text(law)}"
            compute = _Counting(law, visited).compute
            defect = Defect(family=FAMILY, name=text, text=text, compute=compute)
            found.setdefault(text, defect)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Counting:
    """A law for the slots that a kernel visits."""

    law: MaskLaw
    visited: Visits

    def compute(self, problem: Problem, row_slice: RowSlice) -> Predicted:
        """Return the output of some rows under the law."""
        inputs, slots = problem.attention_inputs(row_slice), self.visited.slots(problem, row_slice)
        return problem.predict(self.law.inputs(problem, inputs, slots))


def _laws(problem: Problem, visited: Visits) -> Iterator[MaskLaw]:
    """Yield the laws that can change a call, those with the fewest slots first."""
    is_biased = problem.call.alibi_slopes is not None
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
    score = "their own scores" if law.score is None else f"score {law.score:g}"
    values = ", those before the window of the block without values" if law.no_values else ""
    return f"hidden slots of the tiles count with {score}: {' and '.join(parts)}{values}"
