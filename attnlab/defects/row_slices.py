"""Selections of a problem's rows: all of them, or a small sample of each sequence."""

from collections.abc import Iterator

import torch

from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice


def all_rows(problem: Problem, kind: str = "all") -> Iterator[RowSlice]:
    """Yield one RowSlice per sequence, with all its rows and heads; ``kind`` is "all", "decode" or
    "prefill"."""
    heads = torch.arange(problem.num_heads)
    for seq in range(problem.num_seqs):
        if kind == "all" or problem.is_decode(seq) == (kind == "decode"):
            yield RowSlice(seq=seq, tokens=torch.arange(problem.query_len(seq)), heads=heads)


def sample_rows(
    problem: Problem, tokens: int = 6, heads: int = 6, max_seqs: int | None = None
) -> list[RowSlice]:
    """Return a few rows of each sequence that ran, with a few heads.

    The first and last rows of a sequence, and the first two heads and the last, are always included. Of
    more than ``max_seqs`` sequences, those with the shortest and the longest queries are taken.
    """
    sampled_heads = torch.linspace(0, problem.num_heads - 1, min(heads, problem.num_heads)).long()
    if problem.num_heads > 1:
        sampled_heads = torch.cat([sampled_heads, torch.tensor([1])]).unique()
    seqs = sorted(problem.computed_seqs(), key=problem.query_len)
    if max_seqs is not None and len(seqs) > max_seqs:
        seqs = sorted({*seqs[: -(-max_seqs // 2)], *seqs[-(max_seqs // 2) :]})
    row_slices = []
    for seq in seqs:
        length = problem.query_len(seq)
        if length:
            rows = torch.linspace(0, length - 1, min(tokens, length)).long().unique()
            row_slices.append(RowSlice(seq=seq, tokens=rows, heads=sampled_heads))
    return row_slices
