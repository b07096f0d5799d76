"""Mutants: the catalogue's defects, and outputs that are unrelated to the inputs."""

from collections.abc import Callable

import torch

from attnlab.defects import DEFECTS, Defect
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Compute, always
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice

NINE = (  # the mutants that the study of vLLM #28490 counted
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


def _noise(size: Callable[[Problem, RowSlice, Predicted], torch.Tensor | float]) -> Compute:
    """Return the ``compute`` of normal noise; ``size`` returns its standard deviation."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        correct = problem.correct(row_slice)
        generator = torch.Generator().manual_seed(int(row_slice.seq))
        noise = torch.randn(correct.output.shape, generator=generator, dtype=torch.float64)
        output = noise * size(problem, row_slice, correct)
        return Predicted(output=output, bound=correct.bound)

    return compute


def _output_size(problem: Problem, row_slice: RowSlice, correct: Predicted) -> torch.Tensor:
    """Return the root mean square of the correct output, at least one rounding step."""
    step = problem.rounding(row_slice.seq).step
    return correct.output.square().mean().sqrt().clamp(min=step)


def _unrelated(name: str, text: str, compute: Compute) -> Defect:
    return Defect(
        name=name,
        family="mutants",
        text=text,
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=compute,
        applies=always,
    )


CORRECT = _unrelated("correct", "the output is correct", Problem.correct)
MUTANTS: tuple[Defect, ...] = (
    *(defect for defect in DEFECTS.values() if not defect.harmless),
    _unrelated(
        "noise_of_its_size",
        "the output is random noise of the same magnitude as the correct output",
        _noise(_output_size),
    ),
    _unrelated(
        "random_noise",
        "the output is random noise from N(0, 1)",
        _noise(lambda problem, row_slice, correct: 1.0),
    ),
)
