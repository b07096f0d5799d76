"""Compare a pattern with further cases: only what holds there, too, is stated as a rule."""

import dataclasses
import re

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.describe import sizes_of
from attnlab.diagnosis.examination import Examination, examine
from attnlab.diagnosis.pattern_claim import PatternClaim, claim_of
from attnlab.diagnosis.reruns import Rerun
from attnlab.diagnosis.second_case import edge_case, further_cases
from attnlab.lab.lab import Lab


def confirmed_claim(lab: Lab, case: Case, first: Examination, rerun: Rerun) -> PatternClaim | None:
    """Return what the pattern of an output says and further cases confirm, or None.

    A claim from decodes alone is confirmed on decodes, and says so.
    """
    claim, cases = claim_of_examination(first, case), 0
    for other in further_cases(case):
        if claim is None or not claim.is_rule:
            return None
        if claim.only_decodes and max(other.lengths.query_lens) > 1:
            continue
        try:
            output = rerun(_as(other, case))
        except AttnLabError:
            continue
        claim, is_decisive = compared(lab, _as(other, case), output, claim)
        cases += is_decisive
    claim = _confirmed_at_edges(lab, case, claim, rerun)
    return claim if claim is not None and claim.is_rule and cases else None


def _confirmed_at_edges(
    lab: Lab, case: Case, claim: PatternClaim | None, rerun: Rerun
) -> PatternClaim | None:
    """Return the claim without limits of lengths that sequences just at the limit contradict."""
    while claim is not None and claim.sequences and (limit := _limit_of(claim.sequences[0])):
        other, left = edge_case(case, limit), None
        if other is not None:
            try:
                left, _ = compared(lab, _as(other, case), rerun(_as(other, case)), claim)
            except AttnLabError:
                left = None
        if left is not None and left.sequences[:1] == claim.sequences[:1]:
            return left
        claim = dataclasses.replace(claim, sequences=claim.sequences[1:])
    return claim


def _limit_of(rule: str) -> int | None:
    """Return the limit that a rule of sequences states, such as "with seq_len above 256"."""
    found = re.search(r" (?:above|up to) (\d+)$", rule)
    return None if found is None else int(found[1])


def _as(other: Case, case: Case) -> Case:
    return other.replace(empty_slots=case.empty_slots, output_init=case.output_init)


def compared(
    lab: Lab, case: Case, output: torch.Tensor, claim: PatternClaim
) -> tuple[PatternClaim | None, bool]:
    """Return what is left of a claim after another output, None if nothing, and whether that was wrong."""
    found = examine(lab, case, output, ())
    again = claim_of_examination(found, case)
    if again is None:
        return (claim if claim.predicts_none(sizes_of(found.problem)) else None), False
    return claim.common(again), True


def claim_of_examination(found: Examination, case: Case) -> PatternClaim | None:
    """Return what the errors of an examined output claim."""
    problem, pattern = found.problem, found.diagnosis.pattern
    ran = list(case.query_heads or range(problem.num_heads))
    return claim_of(found.evidence.locations.is_wrong, ran, sizes_of(problem), pattern)
