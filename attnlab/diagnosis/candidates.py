"""Suspects: each defect of the catalogue held against an output, on the rows that matter.

First all of them on a few wrong rows, which most do not survive; then those that are left on many rows,
wrong ones and right ones, since a defect that explains the one must not touch the other.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Defect
from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.locate import ErrorLocations
from attnlab.diagnosis.row_sample import Sample

CHANCE = 1e-9  # of rounding alone leaning as far towards another candidate as is held against a candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What came of one defect.

    - ``verdict``: "explains", "excluded by value" (it predicts something else where the output is
      wrong), "excluded by place" (it would touch rows that are right, or not all that are wrong) or
      "less likely" (the output leans towards another candidate further than rounding can by chance).
    - ``predicted``, ``observed``: the largest difference from the right output at the failing place,
      as the defect has it and as it is; ``residual``: the largest that the defect leaves unexplained
      there; ``ratio``: the same in units of the rounding bound. NaN or infinity where one of them is.
    - ``scope``: which sequences it is in: "all", "decode", "prefill", or "sequence …", and ``seqs``
      the same by number.
    - ``rows``: how many wrong rows it was confirmed on.
    - ``linked``: kinds of violation that were found in the call and would cause it.
    """

    name: str
    text: str
    seen_in: tuple[str, ...]
    verdict: str
    predicted: float
    observed: float
    residual: float
    ratio: float
    scope: str = ""
    seqs: tuple[int, ...] = ()
    rows: int = 0
    linked: tuple[str, ...] = ()
    defect: Defect = dataclasses.field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """How well a prediction fits an output on some rows: ``ratio`` [rows, heads] is the largest
    residual of a head in units of the bound, ``squares`` the sum of the squared ratios of all
    elements, ``freedom`` in how many directions rounding may have gone."""

    ratio: torch.Tensor
    squares: torch.Tensor
    freedom: int


def fit(output: torch.Tensor, mixed: Predicted, keys: int) -> Fit:
    """Return how well ``mixed`` predicts ``output``, both [rows, heads, head_size]; NaN fits NaN.

    ``keys`` a row has: rounded weights push a head's output in as many directions as it has keys or
    elements, whichever is less.
    """
    wrong = _residual(output.double(), mixed)
    scaled = torch.where(wrong == 0, 0.0, wrong / mixed.noise).nan_to_num(torch.inf, torch.inf)
    directions = min(keys, output.shape[2])
    return Fit(
        ratio=scaled.amax(2),
        squares=scaled.square().sum(2),
        freedom=output.shape[0] * output.shape[1] * directions,
    )


def _residual(output: torch.Tensor, mixed: Predicted) -> torch.Tensor:
    """Return |output - predicted|: 0 where neither is finite, infinity where one of them is not."""
    wrong = (output - mixed.output).abs()
    odd = ~output.isfinite(), ~mixed.output.isfinite()
    return wrong.masked_fill(odd[0] != odd[1], torch.inf).masked_fill(odd[0] & odd[1], 0.0)


def screen(
    problem: Problem,
    output: torch.Tensor,
    row_slices: Sequence[RowSlice],
    catalogue: Iterable[Defect],
) -> list[Candidate]:
    """Return every defect that applies, held against the wrong rows of ``row_slices``, the worst first."""
    rights = [problem.right(row_slice) for row_slice in row_slices]
    return [
        _screened(problem, output, row_slices, rights, defect)
        for defect in catalogue
        if not defect.harmless and defect.applies(problem)
    ]


def _screened(
    problem: Problem,
    output: torch.Tensor,
    row_slices: Sequence[RowSlice],
    rights: Sequence[Predicted],
    defect: Defect,
) -> Candidate:
    verdict = "explains"
    predicted = observed = residual = worst = 0.0
    for i, (row_slice, right) in enumerate(zip(row_slices, rights, strict=True)):
        seen = at(problem, output, row_slice)
        told = defect.compute(problem, row_slice)
        if i == 0:
            predicted = _largest(told.output - right.output)
            observed = _largest(seen.double() - right.output)
            residual = float(_residual(seen.double(), told).max())
            worst = float(fit(seen, told, problem.seq_len(row_slice.seq)).ratio.max())
        wrong = fit(seen, right, problem.seq_len(row_slice.seq)).ratio > 1
        if (fit(seen, told, problem.seq_len(row_slice.seq)).ratio[wrong] > 1).any():
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
        ratio=worst,
        defect=defect,
    )


def at(problem: Problem, output: torch.Tensor, row_slice: RowSlice) -> torch.Tensor:
    """Return an output at a spot, [rows, heads, head_size]."""
    return output[problem.rows(row_slice)][:, row_slice.heads]


def _largest(difference: torch.Tensor) -> float:
    """Return the largest magnitude; NaN where there is one."""
    return float(difference.abs().max()) if difference.numel() else math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Confirmed:
    """A candidate after the second look: its squared residuals over all rows of the sample, those out of
    its scope held against the right output."""

    candidate: Candidate
    squares: float = 0.0
    freedom: int = 0


def confirm(
    problem: Problem,
    output: torch.Tensor,
    sample: Sample,
    found: ErrorLocations,
    candidates: Sequence[Candidate],
) -> list[Confirmed]:
    """Return each candidate with the scope in which it explains all wrong rows and touches no right one."""
    if not candidates:
        return []
    looked = [
        found.touched[problem.rows(row_slice)][:, row_slice.heads] for row_slice in sample.many
    ]
    wrong_seqs = {s.seq for s, wrong in zip(sample.many, looked, strict=True) if bool(wrong.any())}
    wrong_seqs |= {row_slice.seq for row_slice in sample.first}
    rows = sum(int(wrong.any(1).sum()) for wrong in looked)
    rights = _fits(problem, output, sample.many, None)
    found_scopes = scopes(problem, wrong_seqs)
    confirmed = []
    for candidate in candidates:
        fits = _fits(problem, output, sample.many, candidate.defect)
        agrees = {seq for seq, one in fits.items() if bool((one.ratio <= 1).all())}
        fitting = [
            (name, members)
            for name, members in found_scopes
            if wrong_seqs <= members and members & fits.keys() <= agrees
        ]
        if not fitting:
            told = dataclasses.replace(candidate, verdict="excluded by place")
            confirmed.append(Confirmed(candidate=told))
            continue
        name, members = fitting[0]
        parts = [fits[seq] if seq in members else rights[seq] for seq in fits]
        confirmed.append(
            Confirmed(
                candidate=dataclasses.replace(
                    candidate, scope=name, seqs=tuple(sorted(members)), rows=rows
                ),
                squares=sum(float(part.squares.sum()) for part in parts),
                freedom=sum(part.freedom for part in parts),
            )
        )
    return confirmed


def _fits(
    problem: Problem, output: torch.Tensor, row_slices: Sequence[RowSlice], defect: Defect | None
) -> dict[int, Fit]:
    """Return by sequence how well a defect, or the right output, fits."""
    fits = {}
    for row_slice in row_slices:
        told = problem.right(row_slice) if defect is None else defect.compute(problem, row_slice)
        fits[row_slice.seq] = fit(
            at(problem, output, row_slice), told, problem.seq_len(row_slice.seq)
        )
    return fits


def scopes(problem: Problem, wrong: set[int]) -> list[tuple[str, set[int]]]:
    """Return where a defect may be: in all sequences, in those of one kernel, or in the wrong ones."""
    every = set(problem.ran())
    decode = {seq for seq in every if problem.is_decode(seq)}
    names = ", ".join(map(str, sorted(wrong)[:8])) + (", …" if len(wrong) > 8 else "")
    noun = "sequence" if len(wrong) == 1 else "sequences"
    found = [("all", every)]
    if decode and decode != every:
        found += [("decode", decode), ("prefill", every - decode)]
    return [*found, (f"{noun} {names}", wrong)]


def is_by_chance(better: Confirmed, worse: Confirmed) -> bool:
    """Answer whether rounding may lean as far from ``worse`` towards ``better`` as it does.

    If ``worse`` were the cause, its residual would be rounding, and that ``better`` leaves less of it
    would be chance: the share of its squares that lies in the one direction between the two. Of a
    random direction among ``freedom`` that share exceeds r with a probability below
    (1 - r)^((freedom - 1) / 2).
    """
    if worse.squares == 0:
        return True
    left = min(1.0, better.squares / worse.squares)
    exponent = (worse.freedom - 1) / 2
    return exponent * math.log(max(left, 1e-300)) > math.log(CHANCE)
