"""Score: how far a mutant moves an output, in units of what a test allows."""

from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.defects import Defect
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.defects.row_slices import sample_rows

MAX_SEQS, TOKENS, HEADS = 4, 4, 4  # of the sample; a decode has one token
CorrectSample = list[tuple[RowSlice, Predicted]]  # some rows, each with its correct output


_NOTHING = 1e-9  # a margin that is no change


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The effect of a mutant on a sample of rows.

    ``effect``: the largest absolute change of an element; ``margins``: by kernel, "decode" and "prefill",
    the largest ratio of a change to what the test allows there. Both are infinite if an element becomes NaN
    or infinite.
    """

    effect: float
    margins: dict[str, float]

    @property
    def margin(self) -> float:
        """Return the margin of the kernel in which the mutant shows least, of those that it changes.

        A fault may be in one kernel only, so the test must notice it in each.
        """
        return least_margin(self.margins)

    @property
    def is_killed(self) -> bool:
        """Answer whether the test notices the mutant in each kernel whose rows it changes."""
        return self.margin > 1


def least_margin(margins: dict[str, float]) -> float:
    """Return the smallest margin of the kernels whose rows change, 0 if none do."""
    return min((one for one in margins.values() if one > _NOTHING), default=0.0)


def kernels_where(margins: dict[str, float], *, killed: bool) -> tuple[str, ...]:
    """Return the kernels in whose rows a mutant is killed, or survives although it changes them."""
    changed = {kernel: one for kernel, one in margins.items() if one > _NOTHING}
    return tuple(kernel for kernel, one in changed.items() if (one > 1) == killed)


def sample_correct(problem: Problem) -> CorrectSample:
    """Return a sample of rows and heads, each with its correct output."""
    row_slices = sample_rows(problem, TOKENS, HEADS, MAX_SEQS)
    return [(row_slice, problem.correct(row_slice)) for row_slice in row_slices]


def score(problem: Problem, sample: CorrectSample, mutant: Defect, case: Case) -> Score:
    """Return a mutant's score under the Case's tolerances."""
    effect, margins = 0.0, dict[str, float]()
    for row_slice, correct in sample:
        kernel = "decode" if problem.is_decode(row_slice.seq) else "prefill"
        output = mutant.compute(problem, row_slice).output
        change = (output - correct.output).abs().nan_to_num(torch.inf, torch.inf)
        atol = correct.bound if case.tolerance is None else case.tolerance
        allowed = atol + case.rtol * correct.output.abs()
        ratio = torch.where(change == 0, 0.0, change / allowed)
        effect = max(effect, float(change.max()))
        margins[kernel] = max(margins.get(kernel, 0.0), float(ratio.max()))
    return Score(effect=effect, margins=margins)


def derived_tolerance(sample: CorrectSample) -> float:
    """Return the smallest atol under which rounding fails no test: the largest rounding bound."""
    return max(float(correct.bound.max()) for _, correct in sample)
