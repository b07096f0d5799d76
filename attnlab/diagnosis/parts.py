"""Parts: wrong rows and heads of single sequences with their inputs, for fits of the softmax weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.cells import CLEAR, limit_of, ratio_of

_ENOUGH = 8  # independent numbers of an output that a fit must reproduce, beyond those that it fits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Some rows and heads of one sequence.

    ``output``, ``correct``, ``bound``: [rows, heads, head_size] float64. ``is_wrong``: [rows, heads]
    bool, the cells to fit: wrong, finite and not zero. ``is_clear``: those of them whose error is far above
    rounding.
    """

    seq: int
    inputs: AttentionInputs
    output: torch.Tensor
    correct: torch.Tensor
    bound: torch.Tensor
    is_wrong: torch.Tensor
    is_clear: torch.Tensor


def wrong_parts(
    problem: Problem, output: torch.Tensor, row_slices: Sequence[RowSlice]
) -> list[Part]:
    """Return the parts of an output [num_tokens, num_heads, head_size] with a cell to fit."""
    parts = []
    for row_slice in row_slices:
        inputs = problem.attention_inputs(row_slice)
        right = problem.predict(inputs)
        found = output[problem.rows(row_slice)][:, row_slice.heads].double()
        ratio = ratio_of(found - right.output, right.bound)
        is_wrong = ratio > 1
        is_wrong &= found.isfinite().all(2) & (found != 0).any(2) & right.output.isfinite().all(2)
        if bool(is_wrong.any()):
            part = Part(
                seq=row_slice.seq,
                inputs=inputs,
                output=found,
                correct=right.output,
                bound=right.bound,
                is_wrong=is_wrong,
                is_clear=is_wrong & (ratio > CLEAR),
            )
            parts.append(part)
    return parts


def fits(part: Part, difference: torch.Tensor, bound: torch.Tensor) -> bool:
    """Answer whether a hypothesis explains every wrong cell of a part.

    ``difference`` of the output and the hypothesis, ``bound`` of the hypothesis: [rows, heads, head_size].
    """
    if not bool(bound.isfinite().all()):
        return False
    ratio = ratio_of(difference, limit_of(bound, part.output, part.correct, part.bound))
    return bool((ratio <= 1)[part.is_wrong].all())


def is_over_determined(parts: Sequence[Part], fitted: int = 0) -> bool:
    """Answer whether the wrong cells have many more independent numbers than a fit has.

    A row that sees n keys has n - 1 of them, because its weights have one sum; ``fitted``: those that a fit
    chooses for each cell.
    """
    count = 0
    for part in parts:
        numbers = (part.inputs.visible.sum(1) - 1).clamp(max=part.output.shape[2]) - fitted
        count += int((part.is_wrong.sum(1) * numbers.clamp(min=0)).sum())
    return count >= _ENOUGH


def num_cells(parts: Sequence[Part]) -> int:
    """Return the number of cells to fit."""
    return sum(int(part.is_wrong.sum()) for part in parts)
