"""Sample: the rows and heads of an output on which candidates are heard."""

from dataclasses import dataclass

import torch

from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.locate import ErrorLocations

SPOTS, TOKENS, HEADS = 3, 4, 6  # looked at first: sequences, tokens of each, heads
_MANY = 1 << 18  # elements up to which every row is looked at, else a sample
_SAMPLED = 12  # tokens of a sequence in the sample, and heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The spots that are looked at, first a few wrong ones, then many of both kinds; ``complete`` where
    the second are all rows and heads of the output."""

    first: list[RowSlice]
    many: list[RowSlice]
    complete: bool


def choose(
    problem: Problem, found: ErrorLocations, ignore: torch.Tensor, heads: range | None
) -> Sample:
    """Return the spots to look at; rows in ``ignore`` [n] are not looked at."""
    ran = torch.arange(problem.num_heads) if heads is None else torch.tensor(heads)
    ratio = found.ratio.clone()
    ratio[ignore] = -1
    worst_seqs = sorted(
        problem.ran(), key=lambda seq: -_worst(problem, ratio, seq)
    )  # the worst of each kind first
    kinds = {problem.is_decode(seq): seq for seq in reversed(worst_seqs)}
    order = list(dict.fromkeys([worst_seqs[0], *kinds.values(), *worst_seqs]))
    wrong_seqs = [seq for seq in order if _worst(problem, ratio, seq) > 1]
    first = [
        RowSlice(
            seq=seq,
            tokens=_top(_rows(problem, ratio, seq).amax(1), TOKENS),
            heads=ran[_top(_rows(problem, ratio, seq)[:, ran].amax(0), HEADS)],
        )
        for seq in wrong_seqs[:SPOTS]
    ]
    elements = problem.call.output.numel()
    complete = elements <= _MANY and len(ignore) == 0
    many = []
    for seq in problem.ran():
        own = _rows(problem, ratio, seq)[:, ran]
        tokens = torch.nonzero(~torch.isin(problem.starts()[seq] + torch.arange(len(own)), ignore))
        tokens, some = tokens.flatten(), ran
        if elements > _MANY:
            tokens = _spread(tokens, own.amax(1))
            some = ran[_spread(torch.arange(len(ran)), own.amax(0))]
        if len(tokens):
            many.append(RowSlice(seq=seq, tokens=tokens, heads=some))
    return Sample(first=first, many=many, complete=complete)


def _rows(problem: Problem, ratio: torch.Tensor, seq: int) -> torch.Tensor:
    starts = problem.starts()
    return ratio[starts[seq] : starts[seq + 1]]


def _worst(problem: Problem, ratio: torch.Tensor, seq: int) -> float:
    rows = _rows(problem, ratio, seq)
    return float(rows.max()) if rows.numel() else -1.0


def _top(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the greatest values, the greatest first."""
    order: torch.Tensor = values.argsort(descending=True, stable=True)
    return order[:count]


def _spread(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return some of ``indices``: those of greatest weight, the ends, and some evenly between."""
    if len(indices) <= _SAMPLED:
        return indices
    even = indices[torch.linspace(0, len(indices) - 1, _SAMPLED // 2).long()]
    most = indices[_top(weight[indices], _SAMPLED // 2)]
    chosen: torch.Tensor = torch.cat([even, most]).unique()
    return chosen
