"""Defect: one way for a kernel, or for the code that calls it, to be wrong."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from attnlab.defects.attention_inputs import AttentionInputs, Predicted
from attnlab.defects.cache_read import CacheRead
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice

Compute = Callable[[Problem, RowSlice], Predicted]
Applies = Callable[[Problem], bool]
ChangeInputs = Callable[[Problem, RowSlice, AttentionInputs], AttentionInputs]
ChangeCacheRead = Callable[[Problem, int, CacheRead], CacheRead]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Defect:
    """One way for a kernel, or for the code that calls it, to be wrong.

    - ``name``: unique; ``family``: the module that defines it.
    - ``text``: what happens, in one sentence without a full stop.
    - ``seen_in``: public issues and pull requests that report it, as "repository #number".
    - ``touches``: which rows it can change: "all", "cached" (rows with keys read from the cache),
      "decode" or "unwritten" (rows that the kernel never writes).
    - ``links``: kinds of Violation that would cause it.
    - ``compute``: returns the output of some rows under the defect; rows that it does not touch come out
      correct.
    - ``applies``: answers whether a call has the feature that the defect is about, such as a window.
    - ``harmless``: the defect changes only the rounding.
    - ``variants``: the same defect with other sizes, such as tiles, each as text and ``compute``. The
      diagnosis tries all of them; elsewhere ``compute`` stands for them.
    - ``is_possible``: answers whether the tensors at hand allow the defect; the diagnosis excludes others.
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
    variants: tuple[tuple[str, Compute], ...] = ()
    is_possible: Applies = lambda problem: True

    def expand(self) -> "tuple[Defect, ...]":
        """Return one Defect for each variant, with its text; the defect itself if it has none."""
        if not self.variants:
            return (self,)
        return tuple(
            dataclasses.replace(self, text=f"{self.text} ({text})", compute=compute, variants=())
            for text, compute in self.variants
        )


def changing_inputs(change: ChangeInputs) -> Compute:
    """Return the ``compute`` of a defect that changes the inputs of attention."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        inputs = problem.attention_inputs(row_slice)
        return problem.predict(change(problem, row_slice, inputs))

    return compute


def changing_cache_read(change: ChangeCacheRead) -> Compute:
    """Return the ``compute`` of a defect that changes how a sequence is read from the cache."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        cache_read = change(problem, row_slice.seq, problem.cache_read(row_slice.seq))
        return problem.predict(problem.inputs_read_by(row_slice, cache_read))

    return compute


def always(problem: Problem) -> bool:
    """Answer True: the defect applies to every call."""
    return True
