"""power: find the defects that a test would notice, given its data, tolerance, cache and output buffer.

Each defect of the catalogue is a mutant of the correct output. A mutant is killed if an element leaves the
test's tolerance, survives if none does, and is equivalent if no data would show it. No kernel runs: the
mutants' outputs are computed, on a sample of each sequence's rows and heads.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from attnlab.case.case import Case
from attnlab.case.ops import check_scored
from attnlab.defects import Defect
from attnlab.defects.problem import make_problem
from attnlab.lab.lab import Lab
from attnlab.mutation.mutants import MUTANTS
from attnlab.mutation.remedies import NO_REMEDIES, Remedies, find_remedies
from attnlab.mutation.report import Mutant, MutationReport
from attnlab.mutation.score import CorrectSample, Score, sample_correct, score

__all__ = ["Mutant", "MutationReport", "power"]


def power(
    case: Case,
    *,
    mutants: Iterable[Defect] = MUTANTS,
    remedies: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
) -> MutationReport:
    """Return which mutants a test with the Case's data and tolerance would notice.

    With ``remedies``, search for the cheapest change of the test that kills each survivor and for one set
    of changes that kills as many as possible, and run the models under that set. Raises InvalidCase for
    a cache write.
    """
    began = time.perf_counter()
    check_scored(case.spec)
    on_step("the test's own data")
    lab = Lab(keep=1, device="cpu")  # most changes of a test leave its batch
    problem = make_problem(case, lab.batch(case))
    sample = sample_correct(problem)
    applicable = [mutant for mutant in mutants if mutant.applies(problem)]
    scores = {mutant.name: score(problem, sample, mutant, case) for mutant in applicable}
    alive = {mutant.name: mutant for mutant in applicable if not scores[mutant.name].is_killed}
    found = find_remedies(case, alive, lab, on_step) if remedies and alive else NO_REMEDIES
    return report_of(case, applicable, scores, found, sampled_of(sample), began)


def report_of(
    case: Case,
    applicable: Sequence[Defect],
    scores: Mapping[str, Score],
    found: Remedies,
    sampled: tuple[int, int],
    began: float,
) -> MutationReport:
    """Return the report of the applicable mutants; ``sampled``: see :func:`sampled_of`."""
    rows = [_mutant(mutant, scores[mutant.name], found) for mutant in applicable]
    return MutationReport(
        case=case,
        mutants=sorted(rows, key=lambda row: -row.margin),
        proposal=found.proposal,
        left=found.left,
        models_pass=found.models_pass,
        sampled=(sampled[0], case.lengths.num_tokens),
        heads=sampled[1],
        seconds=time.perf_counter() - began,
    )


def sampled_of(sample: CorrectSample) -> tuple[int, int]:
    """Return the number of rows of a sample, and the largest number of heads of a row."""
    rows = sum(len(part.tokens) for part, _ in sample)
    return rows, max(len(part.heads) for part, _ in sample)


def _mutant(mutant: Defect, mutant_score: Score, found: Remedies) -> Mutant:
    outcome = "survived"
    if mutant_score.is_killed:
        outcome = "killed"
    elif mutant.name in found.equivalent:
        outcome = "equivalent"
    return Mutant(
        name=mutant.name,
        text=mutant.text,
        outcome=outcome,
        effect=mutant_score.effect,
        margin=mutant_score.margin,
        margins=mutant_score.margins,
        remedy=found.cheapest.get(mutant.name),
    )
