"""Candidates: each defect of the catalogue, compared with an output.

There are two rounds. ``screen`` compares every defect with a few wrong rows, which excludes most of them.
``confirm`` compares the remaining ones with many rows, wrong and correct, because a defect that explains
the wrong rows must not touch the correct ones.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attnlab.defects.edit import Defect
from attnlab.diagnosis.cells import MOST_LEFT, ErrorLocations, RowSample, largest_limit
from attnlab.lab.problem import Predicted, Problem, RowSlice

MAX_CHANCE = (
    1e-9  # below this probability, a better fit of another candidate is not due to rounding
)


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
class Candidate:
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
    (:func:`attnlab.diagnosis.cells.limit_of`). Rounded weights move a head's output in at most as many
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
    return [
        _screened(problem, worst, variant)
        for defect in defects
        if not defect.harmless and defect.applies(problem)
        for variant in defect.expand()
    ]


def _screened(problem: Problem, worst: Sequence[_Rows], defect: Defect) -> Candidate:
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
        if is_unlike or not _moves(prediction, rows):
            verdict = "excluded by value" if i == 0 else "excluded by place"
            break
    return Candidate(
        name=defect.name,
        text=defect.text,
        seen_in=defect.seen_in,
        verdict=verdict,
        predicted=predicted,
        observed=observed,
        residual=residual,
        ratio=ratio,
        defect=defect,
    )


def _moves(prediction: Predicted, rows: _Rows) -> bool:
    """Answer whether a prediction is wrong where the rows are."""
    moves = residuals(prediction.output, rows.right)[1].amax(2) > 1
    return bool(moves[rows.is_wrong].any())


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
    members = {"all": computed, "sequences": wrong_seqs}
    if decode and decode != computed:
        members = {
            "all": computed,
            "decode": decode,
            "prefill": computed - decode,
            "sequences": wrong_seqs,
        }
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
