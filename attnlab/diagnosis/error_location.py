"""ErrorLocations: where an output differs from the correct one by more than its kernel's rounding.

Every row and head is compared with its own rounding bound (:mod:`attnlab.lab.rounding`), not with a test's
tolerance, because a tolerance may hide an error.
"""

from dataclasses import dataclass

import torch

from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.lab.reference import attend
from attnlab.tensors.sequence_mask import mask_of

_SHARP_ROWS, _SHARP_HEADS = 4, 16  # per sequence and at a time, for the sharper bound
_ROWS_AT_ONCE = 64  # of attention without a mask
_EXACT_ELEMENTS = 1 << 22  # up to this size of an output, the correct one is computed in float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ErrorLocations:
    """The errors of an output by row and head.

    - ``ratio``: [num_tokens, num_heads] float32, the largest error of the head's elements in units of
      the rounding bound. Above 1 the element is wrong. Infinite if the output is not finite, -1 if the
      head or its sequence did not run.
    - ``error``: [num_tokens, num_heads] float32, the largest absolute error of the head's elements. It need
      not be the element of ``ratio``, because elements have different bounds.
    """

    ratio: torch.Tensor
    error: torch.Tensor

    @property
    def is_wrong(self) -> torch.Tensor:
        """Return which rows and heads are wrong, [num_tokens, num_heads] bool."""
        return self.ratio > 1

    @property
    def wrong_rows(self) -> torch.Tensor:
        """Return the rows with a wrong head, [n] int64."""
        return torch.nonzero(self.is_wrong.any(1)).flatten()

    def largest(self, *, in_bounds: bool) -> tuple[int, int]:
        """Return (row, head) of the largest wrong error, absolute or in units of its rounding bound."""
        size = self.ratio if in_bounds else self.error.masked_fill(~self.is_wrong, -1.0)
        row, head = divmod(int(size.argmax()), size.shape[1])
        return row, head


def locate(
    problem: Problem,
    output: torch.Tensor,
    heads: range | None = None,
    expected: torch.Tensor | None = None,
) -> ErrorLocations:
    """Return where ``output`` [num_tokens, num_heads, head_size] is wrong.

    ``heads`` are the query heads that ran, None for all; ``expected`` is the correct output if it is
    already known.
    """
    tokens, num_heads, _ = output.shape
    ran = slice(None) if heads is None else slice(heads.start, heads.stop)
    ratio = torch.full((tokens, num_heads), -1.0)
    error = torch.zeros(tokens, num_heads)
    dtype = torch.float64 if output.numel() <= _EXACT_ELEMENTS else torch.float32
    starts = problem.row_starts()
    for seq in problem.computed_seqs():
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start == rows.stop:
            continue
        known = None if expected is None else expected[rows, ran]
        correct, bound = correct_and_bound(problem, seq, ran, dtype, known)
        difference = (output[rows, ran].to(dtype) - correct).abs_()
        difference.nan_to_num_(torch.inf, torch.inf)
        error[rows, ran] = difference.amax(2).float()
        ratio[rows, ran] = difference.div_(bound).amax(2).float()
    _sharpen(problem, output, ratio, heads)
    return ErrorLocations(ratio=ratio, error=error)


def _sharpen(
    problem: Problem, output: torch.Tensor, ratio: torch.Tensor, heads: range | None
) -> None:
    """Compare some rows with the bound of :meth:`Problem.correct`, which is sharper; changes ``ratio``.

    These are the first and last rows of each sequence and a few between, so every row of a decode. In a
    large output, only some heads are compared.
    """
    ran = torch.arange(problem.num_heads) if heads is None else torch.tensor(heads)
    for seq in problem.computed_seqs():
        length = problem.query_len(seq)
        if not length:
            continue
        tokens = torch.linspace(0, length - 1, min(_SHARP_ROWS, length)).long().unique()
        takes_all = length == 1 or output.numel() <= _EXACT_ELEMENTS
        sampled = ran if takes_all else ran[:: max(1, len(ran) // _SHARP_HEADS)]
        for part in sampled.split(_SHARP_HEADS):
            row_slice = RowSlice(seq=seq, tokens=tokens, heads=part)
            rows, correct = problem.rows(row_slice), problem.correct(row_slice)
            sharp = (output[rows][:, part].double() - correct.output).abs() / correct.bound
            sharp = sharp.nan_to_num(torch.inf, torch.inf).amax(2).float()
            ratio[rows[:, None], part] = torch.maximum(ratio[rows[:, None], part], sharp)


def correct_and_bound(
    problem: Problem, seq: int, heads: slice, dtype: torch.dtype, known: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's correct output for some query heads and its rounding bound, each
    [query_len, heads, head_size] in ``dtype``."""
    call, group = problem.call, problem.call.num_queries_per_kv
    kv = heads if heads == slice(None) else slice(heads.start // group, -(-heads.stop // group))
    query = call.query[slice(*problem.row_starts()[seq : seq + 2]), heads]
    key, value = problem.intended_kv(seq, kv, dtype)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[heads]
    sinks = None if call.sinks is None else call.sinks[heads]
    shape = (*query.shape[:2], value.shape[2])
    magnitude = torch.empty(shape, dtype=dtype)
    correct = torch.empty(shape, dtype=dtype) if known is None else known
    outputs = [(value.abs(), magnitude), *([(value, correct)] if known is None else [])]
    for values, output in outputs:
        attend(
            query,
            key,
            values,
            problem.sm_scale,
            output,
            mask_of(call, seq),
            slopes,
            sinks,
            call.softcap,
        )
    rounding, length = problem.rounding(seq), key.shape[0]
    query_norm, key_norm = (float(tensor.float().norm(dim=2).max()) for tensor in (query, key))
    bias = 0.0 if slopes is None else float(slopes.abs().max()) * length
    bias += call.visibility.largest_bias
    score_error = rounding.score_error(
        query_norm, key_norm, query.shape[2], problem.sm_scale, bias, call.softcap or 0.0
    )
    relative = rounding.relative(length, score_error)
    relative += length * 2.0**-23 * (correct.dtype == torch.float32)  # sums of the reference itself
    fixed = rounding.fixed(length, float(value.abs().max()))
    return problem.clamped(correct), magnitude.mul_(relative).add_(fixed)
