"""Cells: rows and heads of an output next to the correct output, the material of a description."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnlab.lab.problem import AttentionInputs, Problem, RowSlice
from attnlab.lab.reference import attend
from attnlab.tensors.case_visibility import mask_of

# ErrorLocations: where an output differs from the correct one by more than its kernel's rounding.
#
# Every row and head is compared with its own rounding bound (:mod:`attnlab.lab.rounding`), not with a
# test's tolerance, because a tolerance may hide an error.

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
    if problem.misread is None:
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
    if problem.misread is not None:  # numbers of an op argument: small
        tokens = torch.arange(problem.query_len(seq))
        every = torch.arange(problem.num_heads)[heads]
        found = problem.correct(RowSlice(seq=seq, tokens=tokens, heads=every))
        return found.output.to(dtype), found.bound.to(dtype)
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
    return torch.minimum(bound, largest_limit(output, correct, right_bound))


def largest_limit(
    output: torch.Tensor, correct: torch.Tensor, right_bound: torch.Tensor
) -> torch.Tensor:
    """Return the greatest value of :func:`limit_of` for any hypothesis."""
    error = (output - correct).abs().nan_to_num(torch.inf, torch.inf).amax(-1, keepdim=True)
    return torch.maximum(right_bound, MOST_LEFT * error)


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


# RowSample: the rows and heads of an output on which candidates are compared.

WORST_SEQS, WORST_TOKENS, WORST_HEADS = 3, 4, 6
_ROWS_SAMPLED = 12  # tokens and heads of each sequence in a larger output


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
    if len(indices) <= _ROWS_SAMPLED:
        return indices
    even = indices[torch.linspace(0, len(indices) - 1, _ROWS_SAMPLED // 2).long()]
    heaviest = indices[_largest(weight[indices], _ROWS_SAMPLED // 2)]
    chosen: torch.Tensor = torch.cat([even, heaviest]).unique()
    return chosen


# Parts: wrong rows and heads of single sequences with their inputs, for fits of the softmax weights.

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
