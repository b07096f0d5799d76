"""Mutants: the catalogue's defects, and outputs that have nothing to do with the input."""

from collections.abc import Callable

import torch

from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import always
from attnlab.defects.problem import Problem, RowSlice

NINE = (  # the mutants of a reference that the two figures of this project's first study counted
    "scale_doubled",
    "scale_missing",
    "scores_ignored",
    "causal_plus_one",
    "causal_minus_one",
    "keys_of_next_sequence",
    "new_tokens_only",
    "values_of_next_sequence",
    "random_noise",
)


def _noise(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Return random numbers of the size of the right output."""
    right = problem.right(row_slice)
    generator = torch.Generator().manual_seed(int(row_slice.seq))
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    size = right.output.square().mean().sqrt()
    return Predicted(
        output=drawn * size.clamp(min=problem.rounding(row_slice.seq).step), noise=right.noise
    )


def _standard_noise(problem: Problem, row_slice: RowSlice) -> Predicted:
    generator = torch.Generator().manual_seed(int(row_slice.seq))
    right = problem.right(row_slice)
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    return Predicted(output=drawn, noise=right.noise)


def _garbage(name: str, text: str, compute: Callable[[Problem, RowSlice], Predicted]) -> Defect:
    return Defect(
        name=name,
        family="rows",
        text=text,
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=compute,
        applies=always,
    )


RIGHT = _garbage("right", "the right output", lambda problem, row_slice: problem.right(row_slice))
MUTANTS: tuple[Defect, ...] = (
    *(defect for defect in CATALOGUE if not defect.harmless),
    _garbage("noise_of_its_size", "random numbers, as large as the right output", _noise),
    _garbage("random_noise", "random numbers of N(0, 1)", _standard_noise),
)
