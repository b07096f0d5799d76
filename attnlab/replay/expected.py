"""Expected: the correct output of a call and its rounding bound, and how an output differs from it."""

from dataclasses import dataclass

import torch

from attnlab.contracts.target import Target
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.error_location import correct_and_bound
from attnlab.lab.expected_write import expected_write
from attnlab.tensors.call import KernelCall
from attnlab.tensors.quantised import Formats

_SHARP_WORK = 1 << 26  # products of a weight and a value, up to which every row has the sharp bound
_EXACT_ELEMENTS = 1 << 22  # up to this size of an output, the correct one is computed in float64
_ROWS_AT_ONCE = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """The correct output of a call; ``output`` and ``bound`` are [num_tokens, num_heads, value_size].

    - ``bound``: how far rounding may move each element.
    - ``rows``: [num_tokens] bool, the rows of sequences; padding rows are not compared.
    - ``formats``: how the call stores its output, or None if plainly.
    """

    output: torch.Tensor
    bound: torch.Tensor
    rows: torch.Tensor
    formats: Formats | None = None

    @classmethod
    def of_write(cls, call: KernelCall, target: Target) -> "Expected":
        """Return what a cache must hold after a write; its rows are slots."""
        right = expected_write(call.cpu(), target)
        rows = torch.ones(len(right.numbers), dtype=torch.bool)
        return cls(output=right.numbers, bound=right.bound, rows=rows)

    @classmethod
    def of(cls, problem: Problem) -> "Expected":
        """Compute the correct output of a problem's call, whose tensors are on the CPU."""
        call = problem.call
        shape = call.buffer.shape
        dtype = torch.float64 if call.buffer.numel() <= _EXACT_ELEMENTS else torch.float32
        output, bound = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        rows = torch.zeros(shape[0], dtype=torch.bool)
        starts = problem.row_starts()
        for seq in range(problem.num_seqs):
            own = slice(starts[seq], starts[seq + 1])
            if own.start == own.stop:
                continue
            rows[own] = True
            work = problem.query_len(seq) * problem.seq_len(seq) * shape[1] * shape[2]
            if work <= _SHARP_WORK:
                output[own], bound[own] = _sharp(problem, seq)
            else:
                output[own], bound[own] = correct_and_bound(problem, seq, slice(None), dtype, None)
        return cls(output=output, bound=bound, rows=rows, formats=problem.formats)

    def ratio(self, output: torch.Tensor) -> torch.Tensor:
        """Return each element's error in units of its bound; above 1 it is wrong.

        Infinite where the output is not finite, 0 in padding rows.
        """
        return self.in_bounds(self.error(output))

    def numbers(self, output: torch.Tensor) -> torch.Tensor:
        """Return the numbers of an output that the op stored, in the dtype of the correct output."""
        scale = 1.0 if self.formats is None else self.formats.output_scale
        wide = output.to(self.output.dtype)
        return wide if scale == 1.0 else wide * scale

    def error(self, output: torch.Tensor) -> torch.Tensor:
        """Return each element's absolute error; infinite where only one of both is finite."""
        return distance(self.numbers(output), self.output)

    def in_bounds(self, difference: torch.Tensor) -> torch.Tensor:
        """Return an absolute difference per element in units of the bound; 0 in padding rows."""
        ratio = torch.where(difference == 0, 0.0, difference / self.bound)
        return ratio.masked_fill(~self.rows[:, None, None], 0.0)


def _sharp(problem: Problem, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correct output of a sequence and the sharp bound, some rows at a time."""
    heads = torch.arange(problem.num_heads)
    parts = [
        problem.correct(RowSlice(seq=seq, tokens=tokens, heads=heads))
        for tokens in torch.arange(problem.query_len(seq)).split(_ROWS_AT_ONCE)
    ]
    return torch.cat([one.output for one in parts]), torch.cat([one.bound for one in parts])


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of two tensors; 0 where both are NaN, infinite where one is."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0)


def other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements of two tensors of one dtype have other bytes; NaN equals any NaN."""
    kind = _BITS[one.element_size()]
    differs = one.contiguous().view(kind) != other.contiguous().view(kind)
    return differs & ~(one.double().isnan() & other.double().isnan())
