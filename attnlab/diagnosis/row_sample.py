"""RowSample: the rows and heads of an output on which candidates are compared."""

from dataclasses import dataclass

import torch

from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.error_location import ErrorLocations

WORST_SEQS, WORST_TOKENS, WORST_HEADS = 3, 4, 6
_ALL_ELEMENTS = 1 << 18  # up to this size of an output, every row and head is taken
_SAMPLED = 12  # tokens and heads of each sequence in a larger output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSample:
    """A sample of an output: ``worst``, a few rows with the largest errors, and ``many``, wrong and
    correct rows of every sequence."""

    worst: list[RowSlice]
    many: list[RowSlice]


def sample_output(
    problem: Problem, locations: ErrorLocations, ignored: torch.Tensor, heads: range | None
) -> RowSample:
    """Sample an output, without the rows in ``ignored`` [n]; ``heads`` ran, None for all."""
    ran = torch.arange(problem.num_heads) if heads is None else torch.tensor(heads)
    ratio = locations.ratio.clone()
    ratio[ignored] = -1
    return RowSample(
        worst=_worst_rows(problem, ratio, ran), many=_many_rows(problem, ratio, ran, ignored)
    )


def _worst_rows(problem: Problem, ratio: torch.Tensor, heads: torch.Tensor) -> list[RowSlice]:
    """Return the worst rows and heads of the worst sequences, at least one decode and one prefill among
    them if both kinds are wrong."""
    by_error = sorted(problem.computed_seqs(), key=lambda seq: -_worst(problem, ratio, seq))
    worst_of_kind = {problem.is_decode(seq): seq for seq in reversed(by_error)}
    seqs = dict.fromkeys([by_error[0], *worst_of_kind.values(), *by_error])
    wrong_seqs = [seq for seq in seqs if _worst(problem, ratio, seq) > 1]
    return [
        RowSlice(
            seq=seq,
            tokens=_largest(_rows(problem, ratio, seq).amax(1), WORST_TOKENS),
            heads=heads[_largest(_rows(problem, ratio, seq)[:, heads].amax(0), WORST_HEADS)],
        )
        for seq in wrong_seqs[:WORST_SEQS]
    ]


def _many_rows(
    problem: Problem, ratio: torch.Tensor, heads: torch.Tensor, ignored: torch.Tensor
) -> list[RowSlice]:
    """Return all rows and heads of every sequence, or some of each if the output is large."""
    takes_all = problem.call.buffer.numel() <= _ALL_ELEMENTS
    row_slices = []
    for seq in problem.computed_seqs():
        seq_ratio = _rows(problem, ratio, seq)[:, heads]
        rows = problem.row_starts()[seq] + torch.arange(len(seq_ratio))
        tokens = torch.nonzero(~torch.isin(rows, ignored)).flatten()
        sampled_heads = heads
        if not takes_all:
            tokens = _spread(tokens, seq_ratio.amax(1))
            sampled_heads = heads[_spread(torch.arange(len(heads)), seq_ratio.amax(0))]
        if len(tokens):
            row_slices.append(RowSlice(seq=seq, tokens=tokens, heads=sampled_heads))
    return row_slices


def _rows(problem: Problem, ratio: torch.Tensor, seq: int) -> torch.Tensor:
    starts = problem.row_starts()
    return ratio[starts[seq] : starts[seq + 1]]


def _worst(problem: Problem, ratio: torch.Tensor, seq: int) -> float:
    rows = _rows(problem, ratio, seq)
    return float(rows.max()) if rows.numel() else -1.0


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values, the largest first."""
    order: torch.Tensor = values.argsort(descending=True, stable=True)
    return order[:count]


def _spread(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return some of ``indices``: half evenly spaced, first and last included, half of largest weight."""
    if len(indices) <= _SAMPLED:
        return indices
    even = indices[torch.linspace(0, len(indices) - 1, _SAMPLED // 2).long()]
    heaviest = indices[_largest(weight[indices], _SAMPLED // 2)]
    chosen: torch.Tensor = torch.cat([even, heaviest]).unique()
    return chosen
