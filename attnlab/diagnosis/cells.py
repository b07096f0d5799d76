"""Cells: rows and heads of an output next to the correct output, the material of a description."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice

_ALL_ELEMENTS = 1 << 18  # up to this size of an output, every row and head is a cell
CLEAR = 5.0  # errors beyond so many rounding bounds are far above rounding
_SAMPLED = 6  # rows and heads of each sequence in a larger output, each with its neighbours
MOST_LEFT = 0.25  # of an error that a hypothesis may leave, however large its own rounding bound is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Some cells of an output; a cell is one head of one row.

    - ``row``, ``head``, ``seq``, ``token``: [n] int64; ``token`` counts the sequence's new tokens.
    - ``output``, ``correct``, ``bound``: [n, head_size] float64; ``bound`` is the largest rounding error.
    """

    row: torch.Tensor
    head: torch.Tensor
    seq: torch.Tensor
    token: torch.Tensor
    output: torch.Tensor
    correct: torch.Tensor
    bound: torch.Tensor

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.row)

    @property
    def ratio(self) -> torch.Tensor:
        """Return the largest error of each cell in units of the bound, [n]; infinite if not finite."""
        return ratio_of(self.output - self.correct, self.bound)

    @property
    def is_wrong(self) -> torch.Tensor:
        """Return which cells are wrong, [n] bool."""
        return self.ratio > 1

    def select(self, chosen: torch.Tensor) -> "Cells":
        """Return the cells ``chosen`` by a mask or by indices."""
        return Cells(
            row=self.row[chosen],
            head=self.head[chosen],
            seq=self.seq[chosen],
            token=self.token[chosen],
            output=self.output[chosen],
            correct=self.correct[chosen],
            bound=self.bound[chosen],
        )


def ratio_of(difference: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return the largest |difference| / bound over the last dimension; 0 / 0 is 0, NaN is infinite."""
    magnitude = difference.abs().nan_to_num(torch.inf, torch.inf)
    return torch.where(magnitude == 0, 0.0, magnitude / bound).amax(-1)


def limit_of(
    bound: torch.Tensor, output: torch.Tensor, correct: torch.Tensor, right_bound: torch.Tensor
) -> torch.Tensor:
    """Return by how much an output may differ from a hypothesis that explains its error.

    This is the hypothesis' own rounding ``bound``, but no more than a quarter of the error of the cell, or
    the rounding bound of the right output: a hypothesis whose bound covers the error explains nothing. All
    are [..., head_size]; ``correct`` and ``right_bound`` are of the right output.
    """
    error = (output - correct).abs().nan_to_num(torch.inf, torch.inf).amax(-1, keepdim=True)
    return torch.minimum(bound, torch.maximum(right_bound, MOST_LEFT * error))


def cells_of(
    problem: Problem, output: torch.Tensor, ratio: torch.Tensor, heads: range | None = None
) -> Cells:
    """Return all cells of a small output, or some of each sequence of a large one.

    ``ratio``: [num_tokens, num_heads], the errors; the worst rows and heads of a sequence are included,
    each with its neighbours. ``heads``: the query heads that ran, None for all.
    """
    ran = torch.arange(problem.num_heads) if heads is None else torch.tensor(heads)
    starts, parts = problem.row_starts(), []
    for seq in problem.computed_seqs():
        errors = ratio[starts[seq] : starts[seq + 1]][:, ran]
        if not len(errors):
            continue
        tokens, chosen = torch.arange(len(errors)), torch.arange(len(ran))
        if output.numel() > _ALL_ELEMENTS:
            tokens = _with_neighbours(_sampled(errors.amax(1)), len(tokens))
            chosen = _with_neighbours(_sampled(errors.amax(0)), len(chosen))
        parts.append(_part(problem, output, RowSlice(seq=seq, tokens=tokens, heads=ran[chosen])))
    return _concatenate(parts)


def _sampled(errors: torch.Tensor) -> torch.Tensor:
    """Return some indices: half evenly spaced, half those of the largest errors."""
    if len(errors) <= _SAMPLED:
        return torch.arange(len(errors))
    even = torch.linspace(0, len(errors) - 1, _SAMPLED // 2).long()
    return torch.cat([even, errors.topk(_SAMPLED // 2).indices])


def _with_neighbours(indices: torch.Tensor, count: int) -> torch.Tensor:
    near = torch.cat([indices - 1, indices, indices + 1])
    chosen: torch.Tensor = near[(near >= 0) & (near < count)].unique()
    return chosen


def _part(problem: Problem, output: torch.Tensor, row_slice: RowSlice) -> Cells:
    """Return the cells of a RowSlice, row by row."""
    correct, rows = problem.correct(row_slice), problem.rows(row_slice)
    num_rows, num_heads = len(rows), len(row_slice.heads)
    return Cells(
        row=rows.repeat_interleave(num_heads),
        head=row_slice.heads.repeat(num_rows),
        seq=torch.full((num_rows * num_heads,), row_slice.seq),
        token=row_slice.tokens.repeat_interleave(num_heads),
        output=output[rows][:, row_slice.heads].double().flatten(0, 1),
        correct=correct.output.flatten(0, 1),
        bound=correct.bound.flatten(0, 1),
    )


def _concatenate(parts: Sequence[Cells]) -> Cells:
    names = ("row", "head", "seq", "token", "output", "correct", "bound")
    return Cells(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
