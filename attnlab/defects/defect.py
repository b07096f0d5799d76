"""Defect: one way to be wrong, as a transformation of what a row sees."""

from collections.abc import Callable
from dataclasses import dataclass

from attnlab.defects.attention_inputs import AttentionInputs, Predicted
from attnlab.defects.cache_read import CacheRead
from attnlab.defects.problem import Problem, RowSlice

Compute = Callable[[Problem, RowSlice], Predicted]
Applies = Callable[[Problem], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Defect:
    """One way for a kernel, or what feeds it, to be wrong.

    - ``name``, ``family``: unique, and the file it stands in.
    - ``text``: what happens, in a sentence.
    - ``seen_in``: upstream threads where it was seen.
    - ``touches``: which rows it can change: "all", "cached" (rows whose keys come from the cache, in
      part or whole), "decode" or "unwritten".
    - ``links``: kinds of Violation that would cause it.
    - ``compute``: the output of some rows under the defect; rows that it does not touch come out right.
    - ``applies``: whether a call has what the defect is about, a window say.
    - ``harmless``: it changes nothing but rounding.
    """

    name: str
    family: str
    text: str
    seen_in: tuple[str, ...]
    touches: str
    compute: Compute
    applies: Applies
    links: tuple[str, ...] = ()
    harmless: bool = False


def by_sight(change: Callable[[Problem, RowSlice, AttentionInputs], AttentionInputs]) -> Compute:
    """Return the computation of a defect that changes what rows see."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        return problem.mix(change(problem, row_slice, problem.sight(row_slice)))

    return compute


def by_reading(change: Callable[[Problem, int, CacheRead], CacheRead]) -> Compute:
    """Return the computation of a defect that changes how the cache is read."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        reading = change(problem, row_slice.seq, problem.reading(row_slice.seq))
        return problem.mix(problem.sight_as_read(row_slice, reading))

    return compute


def always(problem: Problem) -> bool:
    """Answer yes: the defect needs nothing of a call but that it is one."""
    return True
