"""Candidates: each defect of the catalogue, compared with an output.

There are two rounds. ``screen`` compares every defect with a few wrong rows, which excludes most of them.
``confirm`` compares the remaining ones with many rows, wrong and correct, because a defect that explains
the wrong rows must not touch the correct ones.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from attnlab.case.shown import Document
from attnlab.defects.edit import Defect, Rows
from attnlab.kernels.child_process import in_copies
from attnlab.kernels.triton.interpreter import cores
from attnlab.lab.problem import Predicted, Problem, RowSlice
from attnlab.lab.reference import attend
from attnlab.tensors.case_call import mask_of

# Cells: rows and heads of an output next to the correct output, the material of a description.

# ErrorLocations: where an output differs from the correct one by more than its kernel's rounding.
#
# Every row and head is compared with its own rounding bound (:mod:`attnlab.lab.reference`), not with a
# test's tolerance, because a tolerance may hide an error.

_SHARP_ROWS, _SHARP_HEADS = 4, 16  # per sequence and at a time, for the sharper bound
_ROWS_AT_ONCE = 64  # of attention without a mask
_CLEAR = 8.0  # bounds; an error of 1.7 of them was explained by three wrong rules
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

    @property
    def is_clear(self) -> bool:
        """Answer whether an error is so far above its bound that a wrong rule would hardly explain it."""
        return bool((self.ratio > _CLEAR).any())

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
            sharp = (at(problem, output, row_slice).double() - correct.output).abs() / correct.bound
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
        return Cells(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


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
    names = [one.name for one in fields(Cells)]
    return Cells(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


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
        output=at(problem, output, row_slice).double().flatten(0, 1),
        correct=correct.output.flatten(0, 1),
        bound=correct.bound.flatten(0, 1),
    )


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
            tokens=_largest_first(_rows(problem, ratio, seq).amax(1), WORST_TOKENS),
            heads=heads[_largest_first(_rows(problem, ratio, seq)[:, heads].amax(0), WORST_HEADS)],
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


def _largest_first(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values, the largest first."""
    order: torch.Tensor = values.argsort(descending=True, stable=True)
    return order[:count]


def _spread(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return some of ``indices``: half evenly spaced, first and last included, half of largest weight."""
    if len(indices) <= _ROWS_SAMPLED:
        return indices
    even = indices[torch.linspace(0, len(indices) - 1, _ROWS_SAMPLED // 2).long()]
    heaviest = indices[_largest_first(weight[indices], _ROWS_SAMPLED // 2)]
    chosen: torch.Tensor = torch.cat([even, heaviest]).unique()
    return chosen


# Parts: wrong rows and heads of single sequences with their inputs, for fits of the softmax weights.

ENOUGH = 8  # independent numbers of an output that a fit must reproduce, beyond those that it fits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Some rows and heads of one sequence, those of ``at``.

    ``output``, ``correct``, ``bound``: [rows, heads, head_size] float64. ``is_wrong``: [rows, heads]
    bool, the cells to fit: wrong, finite and not zero. ``is_clear``: those of them whose error is far above
    rounding.
    """

    at: Rows
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
        rows = Rows(problem=problem, slice=row_slice)
        right, found = problem.predict(rows.inputs), at(problem, output, row_slice).double()
        ratio = ratio_of(found - right.output, right.bound)
        is_wrong = ratio > 1
        is_wrong &= found.isfinite().all(2) & (found != 0).any(2) & right.output.isfinite().all(2)
        if bool(is_wrong.any()):
            part = Part(
                at=rows,
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
        numbers = (part.at.visible.sum(1) - 1).clamp(max=part.output.shape[2]) - fitted
        count += int((part.is_wrong.sum(1) * numbers.clamp(min=0)).sum())
    return count >= ENOUGH


def num_cells(parts: Sequence[Part]) -> int:
    """Return the number of cells to fit."""
    return sum(int(part.is_wrong.sum()) for part in parts)


MAX_CHANCE = 1e-9  # below it, a better fit of another candidate is not due to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The sequences in which a defect occurs.

    - ``rows``: "all"; "decode" or "prefill", all sequences of that kind; or "sequences", only those with
      wrong rows.
    - ``sequences``: their indices, ascending.
    """

    rows: str
    sequences: tuple[int, ...]

    @property
    def degree(self) -> int:
        """Return how closely the scope was fitted to the wrong rows: 0 not at all, 1 to a kind of
        sequence, 2 to single sequences."""
        return {"all": 0, "decode": 1, "prefill": 1, "sequences": 2}[self.rows]

    @property
    def text(self) -> str:
        """Return the scope in words, such as "decode rows" or "sequences 2, 5"."""
        if self.rows != "sequences":
            return f"{self.rows} rows"
        names = ", ".join(map(str, self.sequences[:8])) + (", …" if len(self.sequences) > 8 else "")
        return f"{'sequence' if len(self.sequences) == 1 else 'sequences'} {names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Document):
    """One defect and how it compares with the output.

    - ``verdict``: "explains"; "excluded by inputs" (the tensors at hand, or the run, contradict it);
      "excluded by value" (it predicts something else in the worst rows, or no change beyond rounding);
      "excluded by place" (it would change rows that are correct, or does not explain all wrong ones);
      "excluded by rerun" (it does not explain the output of a second case); or "less likely" (another
      candidate fits better than rounding allows by chance).
    - ``predicted``, ``observed``: largest difference from the correct output in the worst rows, under the
      defect and in the output; ``residual``: the largest difference between the two; ``ratio``: the same
      in units of the rounding bound. NaN or infinite if an element is not finite.
    - ``scope``: the sequences that it explains, or None if it explains nothing.
    - ``rows``: number of wrong rows on which it was confirmed.
    - ``linked``: kinds of violations found in the call that would cause this defect.
    - ``shown``: how many independent numbers of the output it explains, of finite ones; of rows that are not
      finite, how many heads, if it also predicts which are finite. 0: the output fits, but shows nothing.
    - ``cases``: further cases that show it, None if none was run.
    - ``only_decodes``: reruns show it in batches of decodes alone, of an op that computes prefills, too.
    """

    _without = ("defect",)

    name: str
    text: str
    seen_in: tuple[str, ...]
    verdict: str
    predicted: float
    observed: float
    residual: float
    ratio: float
    scope: Scope | None = None
    rows: int = 0
    linked: tuple[str, ...] = ()
    shown: int = 0
    cases: int | None = None
    only_decodes: bool = False
    defect: Defect = dataclasses.field(repr=False, compare=False)

    @property
    def is_established(self) -> bool:
        """Answer whether evidence shows it, beyond that the output does not contradict it."""
        return bool(self.linked) or (self.shown > 0 and self.cases != 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """How well a prediction fits an output on some rows.

    - ``residual``: the largest absolute difference.
    - ``ratio``: [rows, heads], the largest difference of each head in units of the rounding bound.
    - ``squares``: the sum of the squared ratios of all elements; ``freedom``: the number of independent
      directions in which rounding can move the output.
    - ``shown``: the number of independent numbers in heads whose error the prediction explains but for a
      small part; ``odd``, ``finite``: the number of heads with and without elements that are not finite,
      both as predicted.
    """

    residual: float
    ratio: torch.Tensor
    squares: float
    freedom: int
    shown: int = 0
    odd: int = 0
    finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Confirmation:
    """A candidate after the second round, with ``squares`` and ``freedom`` of its Fit over all rows of the
    sample. Rows outside its scope are compared with the correct output."""

    candidate: Candidate
    squares: float = 0.0
    freedom: int = 0


def fit(
    output: torch.Tensor, predicted: Predicted, seq_len: int, right: Predicted | None = None
) -> Fit:
    """Return how well a prediction fits ``output`` [rows, heads, head_size]; NaN fits NaN, an infinite number
    fits one that the dtype cannot hold, and anything fits a row that sees no key.

    ``right``: the right output; what a prediction may leave of the output's error is limited by it
    (:func:`attnlab.diagnosis.candidates.limit_of`). Rounded weights move a head's output in at most as many
    directions as there are keys or elements.
    """
    exact, most = output.double(), None
    if right is not None:
        most = largest_limit(exact, right.output, right.bound)
    residual, ratio = residuals(output, predicted, most)
    is_odd, predicts_odd = ~output.isfinite(), _is_odd(predicted.output, output.dtype)
    rows, heads, head_size = output.shape
    finite = ~is_odd.any(2) & ~predicts_odd.any(2)
    odd = (is_odd & predicts_odd).any(2)
    if predicted.sees_nothing is not None:
        odd &= ~predicted.sees_nothing[:, None]
    shown = 0
    if right is not None:
        error = (exact - right.output).abs()
        shows = finite & (error > right.bound).any(2)
        shows &= residual.amax(2) <= MOST_LEFT * error.amax(2)
        shown = int(shows.sum()) * min(seq_len - 1, head_size)
    return Fit(
        residual=float(residual.max()),
        ratio=ratio.amax(2),
        squares=float(ratio.square().sum(2).sum()),
        freedom=rows * heads * min(seq_len, head_size),
        shown=shown,
        odd=int(odd.sum()),
        finite=int(finite.sum()),
    )


def residuals(
    output: torch.Tensor, predicted: Predicted, most: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the difference of a prediction from ``output`` [rows, heads, head_size], and the same in units
    of the rounding bound, which is at most ``most``; NaN and what is not finite count as in :func:`fit`."""
    residual = (output.double() - predicted.output).abs()
    is_odd, predicts_odd = ~output.isfinite(), _is_odd(predicted.output, output.dtype)
    residual = residual.masked_fill(is_odd != predicts_odd, torch.inf)
    residual = residual.masked_fill(is_odd & predicts_odd, 0.0)
    if predicted.sees_nothing is not None:
        residual = residual.masked_fill(is_odd & predicted.sees_nothing[:, None, None], 0.0)
    limit = predicted.bound if most is None else torch.minimum(predicted.bound, most)
    ratio = torch.where(residual == 0, 0.0, residual / limit)
    return residual, ratio.nan_to_num(torch.inf, torch.inf)


def _is_odd(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return which numbers are NaN, or infinite in a dtype."""
    return ~(numbers.abs() <= torch.finfo(dtype).max)


_MANY = 64  # defects that are shared with copies of this process


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Wrong rows that defects are compared with: their output, right output, and which heads are wrong.

    ``most``: how much of the error an explanation may leave; ``observed``: the largest error.
    """

    slice: RowSlice
    output: torch.Tensor
    right: Predicted
    is_wrong: torch.Tensor
    most: torch.Tensor
    observed: float

    @classmethod
    def of(cls, problem: Problem, output: torch.Tensor, row_slice: RowSlice) -> "_Rows":
        rows, right = at(problem, output, row_slice), problem.correct(row_slice)
        return cls(
            slice=row_slice,
            output=rows,
            right=right,
            is_wrong=residuals(rows, right)[1].amax(2) > 1,
            most=largest_limit(rows.double(), right.output, right.bound),
            observed=_largest(rows.double() - right.output),
        )


def screen(
    problem: Problem,
    output: torch.Tensor,
    worst_rows: Sequence[RowSlice],
    defects: Iterable[Defect],
) -> list[Candidate]:
    """Compare every defect that applies, and each of its variants, with ``worst_rows``, given with the worst
    ones first."""
    worst = [_Rows.of(problem, output, row_slice) for row_slice in worst_rows]
    variants = [
        variant
        for defect in defects
        if not defect.harmless and defect.applies(problem)
        for variant in defect.expand()
    ]
    count = cores() if len(variants) > _MANY else 1
    found = in_copies(lambda variant: _screened(problem, worst, variant), variants, count)
    return [
        Candidate(
            name=variant.name, text=variant.text, seen_in=variant.seen_in, defect=variant, **numbers
        )
        for variant, numbers in zip(variants, found, strict=True)
    ]


def _screened(problem: Problem, worst: Sequence[_Rows], defect: Defect) -> dict[str, Any]:
    """Return the verdict about a defect, and the numbers of its Candidate."""
    verdict = "explains" if defect.is_possible(problem) else "excluded by inputs"
    predicted = observed = residual = ratio = 0.0
    for i, rows in enumerate(worst):
        prediction = defect.compute(problem, rows.slice)
        left, in_bounds = residuals(rows.output, prediction, rows.most)
        if i == 0:
            predicted, observed = _largest(prediction.output - rows.right.output), rows.observed
            residual, ratio = float(left.max()), float(in_bounds.max())
        if verdict == "excluded by inputs":
            break
        leaves_much = math.isfinite(observed) and residual > MOST_LEFT * observed
        is_unlike = leaves_much or bool((in_bounds.amax(2)[rows.is_wrong] > 1).any())
        moves = residuals(prediction.output, rows.right)[1].amax(2) > 1
        if is_unlike or not bool(moves[rows.is_wrong].any()):
            verdict = "excluded by value" if i == 0 else "excluded by place"
            break
    return {
        "verdict": verdict,
        "predicted": predicted,
        "observed": observed,
        "residual": residual,
        "ratio": ratio,
    }


def at(problem: Problem, output: torch.Tensor, row_slice: RowSlice) -> torch.Tensor:
    """Return the rows and heads of a RowSlice in an output, [rows, heads, ...]."""
    return output[problem.rows(row_slice)][:, row_slice.heads]


def _largest(difference: torch.Tensor) -> float:
    """Return the largest magnitude; NaN if there is one."""
    return float(difference.abs().max()) if difference.numel() else math.nan


def confirm(
    problem: Problem,
    output: torch.Tensor,
    sample: RowSample,
    locations: ErrorLocations,
    candidates: Sequence[Candidate],
) -> list[Confirmation]:
    """Return each candidate with the widest scope in which it explains all wrong rows of the sample and
    touches no correct one, or as "excluded by place" if there is none."""
    if not candidates:
        return []
    is_wrong = [at(problem, locations.is_wrong, row_slice) for row_slice in sample.many]
    wrong_seqs = {row_slice.seq for row_slice in sample.worst} | {
        row_slice.seq
        for row_slice, wrong in zip(sample.many, is_wrong, strict=True)
        if bool(wrong.any())
    }
    wrong_rows = sum(int(wrong.any(1).sum()) for wrong in is_wrong)
    right = [problem.correct(row_slice) for row_slice in sample.many]
    correct_fits = _fits(problem, output, sample.many, right, None)
    scopes = possible_scopes(problem, wrong_seqs)
    confirmations = []
    for candidate in candidates:
        fits = _fits(problem, output, sample.many, right, candidate.defect)
        scope = _widest_scope(scopes, fits, wrong_seqs)
        if scope is None:
            excluded = dataclasses.replace(candidate, verdict="excluded by place")
            confirmations.append(Confirmation(candidate=excluded))
            continue
        parts = [fits[seq] if seq in scope.sequences else correct_fits[seq] for seq in fits]
        inside = [fits[seq] for seq in fits if seq in scope.sequences]
        shown = _shown(inside)
        confirmations.append(
            Confirmation(
                candidate=dataclasses.replace(candidate, scope=scope, rows=wrong_rows, shown=shown),
                squares=sum(part.squares for part in parts),
                freedom=sum(part.freedom for part in parts),
            )
        )
    return confirmations


def _shown(fits: Sequence[Fit]) -> int:
    """Return what the outputs of sequences show of a prediction (``Candidate.shown``)."""
    odd, finite = sum(one.odd for one in fits), sum(one.finite for one in fits)
    return sum(one.shown for one in fits) or min(odd, finite)


def _fits(
    problem: Problem,
    output: torch.Tensor,
    row_slices: Sequence[RowSlice],
    right: Sequence[Predicted],
    defect: Defect | None,
) -> dict[int, Fit]:
    """Return, by sequence, how well a defect fits the output; None stands for the correct output.

    ``right``: the correct output of each slice.
    """
    return {
        row_slice.seq: fit(
            at(problem, output, row_slice),
            correct if defect is None else defect.compute(problem, row_slice),
            problem.seq_len(row_slice.seq),
            correct,
        )
        for row_slice, correct in zip(row_slices, right, strict=True)
    }


def possible_scopes(problem: Problem, wrong_seqs: set[int]) -> list[Scope]:
    """Return the scopes that a defect may have, the widest first: all sequences, those of one kind, or
    the wrong ones."""
    computed = set(problem.computed_seqs())
    decode = {seq for seq in computed if problem.is_decode(seq)}
    kinds = (
        {"decode": decode, "prefill": computed - decode} if decode not in (set(), computed) else {}
    )
    members = {"all": computed, **kinds, "sequences": wrong_seqs}
    return [Scope(rows=rows, sequences=tuple(sorted(seqs))) for rows, seqs in members.items()]


def _widest_scope(
    scopes: Sequence[Scope], fits: dict[int, Fit], wrong_seqs: set[int]
) -> Scope | None:
    """Return the first scope that has all wrong sequences and in which the defect fits every sequence."""
    agreeing = {seq for seq, part in fits.items() if bool((part.ratio <= 1).all())}
    for scope in scopes:
        members = set(scope.sequences)
        if wrong_seqs <= members and members & fits.keys() <= agreeing:
            return scope
    return None


def is_by_chance(better: Confirmation, worse: Confirmation) -> bool:
    """Answer whether rounding could make ``better`` fit this much better although ``worse`` is the cause.

    If ``worse`` is the cause, its residual is rounding. ``better`` then fits better only by the share of
    the squares that lies in the one direction between the two predictions. For a random direction among
    ``freedom`` directions, that share exceeds r with a probability below (1 - r)^((freedom - 1) / 2).
    """
    if worse.squares == 0:
        return True
    remaining = min(1.0, better.squares / worse.squares)
    exponent = (worse.freedom - 1) / 2
    return exponent * math.log(max(remaining, 1e-300)) > math.log(MAX_CHANCE)
