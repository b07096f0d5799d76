"""Survey: where an output differs from the right one by more than its kernels' rounding can explain.

Every row and head is looked at, each against its own bound (:mod:`attnlab.lab.rounding`), not against a
tolerance: a test's tolerance may hide what this finds.
"""

from dataclasses import dataclass

import torch

from attnlab.defects.problem import Problem, RowSlice
from attnlab.lab.reference import attend

_SHARP, _HEADS = 4, 16  # rows of a sequence that are held to the likely bound, heads at a time
_EXACT = 1 << 22  # elements of an output up to which the right one is computed in float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorLocations:
    """What a look at the whole output tells.

    - ``ratio``: [num_tokens, num_heads] float32, the largest error of the head's elements in units of
      the bound; above 1 it is no rounding. Infinite where the output is not finite; -1 where the head or
      its sequence did not run.
    - ``error``: the same as an absolute difference.
    """

    ratio: torch.Tensor
    error: torch.Tensor

    @property
    def touched(self) -> torch.Tensor:
        """Return which rows and heads are wrong, [num_tokens, num_heads] bool."""
        return self.ratio > 1

    @property
    def touched_rows(self) -> torch.Tensor:
        """Return the rows with a wrong head, [n] int64."""
        return torch.nonzero(self.touched.any(1)).flatten()


def locate(
    problem: Problem,
    output: torch.Tensor,
    heads: range | None = None,
    expected: torch.Tensor | None = None,
) -> ErrorLocations:
    """Return where ``output`` [num_tokens, num_heads, head_size] is wrong.

    ``heads`` are those that ran; ``expected`` is the right output where that is known already.
    """
    tokens, num_heads, _ = output.shape
    some = slice(None) if heads is None else slice(heads.start, heads.stop)
    ratio = torch.full((tokens, num_heads), -1.0)
    error = torch.zeros(tokens, num_heads)
    dtype = torch.float64 if output.numel() <= _EXACT else torch.float32
    starts = problem.starts()
    for seq in problem.ran():
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start == rows.stop:
            continue
        known = None if expected is None else expected[rows, some]
        right, noise = _right(problem, seq, some, dtype, known)
        wrong = (output[rows, some].to(dtype) - right).abs_()
        wrong.nan_to_num_(torch.inf, torch.inf)
        error[rows, some] = wrong.amax(2).float()
        ratio[rows, some] = wrong.div_(noise).amax(2).float()
    _sharpen(problem, output, ratio, heads)
    return ErrorLocations(ratio=ratio, error=error)


def _sharpen(
    problem: Problem, output: torch.Tensor, ratio: torch.Tensor, heads: range | None
) -> None:
    """Hold some rows to the likely bound, which is closer: the ends of each sequence and rows between,
    so every row of a decode; of a large output some heads. Changes ``ratio`` in place."""
    ran = torch.arange(problem.num_heads) if heads is None else torch.tensor(heads)
    for seq in problem.ran():
        length = problem.query_len(seq)
        if not length:
            continue
        tokens = torch.linspace(0, length - 1, min(_SHARP, length)).long().unique()
        every = length == 1 or output.numel() <= _EXACT
        for some in (ran if every else ran[:: max(1, len(ran) // _HEADS)]).split(_HEADS):
            row_slice = RowSlice(seq=seq, tokens=tokens, heads=some)
            rows, right = problem.rows(row_slice), problem.right(row_slice)
            wrong = (output[rows][:, some].double() - right.output).abs() / right.noise
            sharp = wrong.nan_to_num(torch.inf, torch.inf).amax(2).float()
            ratio[rows[:, None], some] = torch.maximum(ratio[rows[:, None], some], sharp)


def _right(
    problem: Problem, seq: int, heads: slice, dtype: torch.dtype, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's right output of some query heads and its bound, each [query_len, heads,
    head_size]."""
    group = problem.call.num_queries_per_kv
    kv = heads if heads == slice(None) else slice(heads.start // group, -(-heads.stop // group))
    rows = slice(*problem.starts()[seq : seq + 2])
    query = problem.call.query[rows, heads]
    key, value = problem.meant(seq, kv, dtype)
    slopes = problem.call.alibi_slopes
    slopes = None if slopes is None else slopes[heads]
    cap = problem.call.softcap
    sinks = None if problem.call.sinks is None else problem.call.sinks[heads]
    magnitude = torch.empty(query.shape, dtype=dtype)
    right = torch.empty(query.shape, dtype=dtype) if known is None else known
    wanted = [(value.abs(), magnitude), *([(value, right)] if known is None else [])]
    for values, into in wanted:
        attend(
            query, key, values, problem.scale, into, problem.call.sliding_window, slopes, sinks, cap
        )
    rounding, length = problem.rounding(seq), key.shape[0]
    long_query, long_key = (float(one.float().norm(dim=2).max()) for one in (query, key))
    bias = 0.0 if slopes is None else float(slopes.abs().max()) * length
    error = rounding.score_error(
        long_query, long_key, query.shape[2], problem.scale, bias, cap or 0.0
    )
    share = rounding.relative(length, error)
    share += length * 2.0**-23 * (right.dtype == torch.float32)  # the right output's own sums
    fixed = rounding.fixed(length, float(value.abs().max()))
    return right, magnitude.mul_(share).add_(fixed)
