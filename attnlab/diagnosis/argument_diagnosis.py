"""Diagnose a wrong output of a Case with an op argument: where it is wrong, by how much, and what gives it.

An X-ray describes the weights, where the op argument allows one. The defects of the catalogue do not know the
format that the argument asks for, so they are not compared. An output that is wrong without the argument is
diagnosed as that one.
"""

import dataclasses
import time
from collections.abc import Callable
from itertools import islice

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.op_arguments import NONE
from attnlab.diagnosis.argument_pattern import (
    KIND,
    argument_cells,
    argument_pattern,
    coarse_lab,
    sizes_of_case,
)
from attnlab.diagnosis.cells import Cells
from attnlab.diagnosis.claims import DescribedWeights, PatternClaim, claim_of
from attnlab.diagnosis.decision import check_output
from attnlab.diagnosis.diagnosis import Diagnosis, ErrorPlace
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.refinement import can_xray
from attnlab.diagnosis.reruns import further_cases
from attnlab.diagnosis.side_claim import confirmed_side_claims, side_claims
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.weights.conclude import xray

_XRAY_S = 6.0  # time for the search for a description
# Further cases, whose references are slow. The third has its sequences without context at other places.
_MOST_CASES = 3
_UNKNOWN = "which defect of the catalogue it is: they do not know what an op argument changes"


def diagnose_argument(
    lab: Lab,
    case: Case,
    output: torch.Tensor | None,
    diagnose_in: Callable[..., Diagnosis],
) -> Diagnosis:
    """Diagnose the output of a Case with an op argument, or run the Case for it.

    ``diagnose_in`` diagnoses a Case without an argument in the lab ``lab``; it is called if the Case ran.
    An FP8 output is diagnosed as a plain one that is rounded more. Raises InvalidCall if ``output`` has
    another shape or dtype than the Case's output.
    """
    began, ran = time.perf_counter(), None
    if output is None:
        ran = lab.run(case)
        if ran.status == "rejected":
            return Diagnosis(status="rejected", rejection=str(ran.error))
        output = ran.output
    check_output(output, lab.call(case).buffer)
    cells = argument_cells(lab, case, output.cpu())
    if not bool(cells.is_wrong.any()):
        return _without_wrong_rows(lab, case, ran, len(output))
    if ran is not None:
        plain_case, coarse = case.replace(op_argument=NONE), coarse_lab(lab, case)
        plain = diagnose_in(plain_case, lab=lab)
        if plain.is_wrong or plain.side_errors:
            return _as_without(plain, case)
        if coarse is not None:
            return _with_argument_alone(diagnose_in(plain_case, lab=coarse), case)
    found = _described(case, cells, argument_pattern(lab, case, cells, output.dtype))
    if ran is not None:
        found = _confirmed(lab, case, found)
        found = _with_xray(lab, case, found, sum(ran.seconds.values()))
    return dataclasses.replace(found, seconds=time.perf_counter() - began)


def _with_xray(lab: Lab, case: Case, diagnosis: Diagnosis, seconds: float) -> Diagnosis:
    """Return the diagnosis with an X-ray of the kernel, if the op argument allows it and it is quick; what it
    describes must hold for a second Case. ``seconds``: that a run takes.
    """
    if case.argument.no_xray or not can_xray(case, seconds):
        return diagnosis
    try:
        seen = xray(case, lab=lab, limit_s=_XRAY_S)
    except AttnLabError:
        return diagnosis  # the call is too large, or the kernel rejects coded values
    diagnosis = dataclasses.replace(diagnosis, xray=seen)
    if seen.description is None or not seen.confirmed:
        return diagnosis
    weights = DescribedWeights(description=seen.description, cases=1)
    return dataclasses.replace(diagnosis, status="described", weights=weights)


def claim_of_argument(lab: Lab, case: Case, output: torch.Tensor) -> PatternClaim | None:
    """Return what the errors of an output of a Case with an op argument claim; None if it is right.

    If something gives the output, the wrong places follow from that and are not claimed.
    """
    cells = argument_cells(lab, case, output.cpu())
    is_wrong = cells.is_wrong.view(case.lengths.num_tokens, case.num_heads)
    if not bool(is_wrong.any()):
        return None
    pattern = argument_pattern(lab, case, cells, output.dtype)
    if rules := pattern.of(KIND):
        values = frozenset(fact.what for fact in rules)
        return PatternClaim(
            sequences=(), rows=(), heads=(), all_heads=True, elements=None, values=values
        )
    return claim_of(is_wrong, list(range(case.num_heads)), sizes_of_case(case), pattern)


def compared_argument(
    lab: Lab, case: Case, output: torch.Tensor, claim: PatternClaim
) -> tuple[PatternClaim | None, bool]:
    """Return what is left of a claim after the output of another Case, and whether that was wrong."""
    again = claim_of_argument(lab, case, output)
    if again is None:
        is_allowed = not claim.heads or claim.predicts_none(sizes_of_case(case))
        return (claim if is_allowed else None), False
    return claim.common(again), True


def _confirmed(lab: Lab, case: Case, found: Diagnosis) -> Diagnosis:
    """Return the diagnosis with what of its pattern further cases confirm.

    What gives the output must give it there, too, or it is withdrawn.
    """
    claim, cases = claim_of_argument(lab, case, lab.run(case).output), 0
    for other in islice(further_cases(case), _MOST_CASES):
        if claim is None:
            break
        if claim.only_decodes and max(other.lengths.query_lens) > 1:
            continue
        try:
            ran = lab.run(other)
        except AttnLabError:
            continue
        if ran.status == "rejected":
            continue
        claim, is_decisive = compared_argument(lab, other, ran.output, claim)
        cases += is_decisive
    is_confirmed = claim is not None and claim.is_rule and cases > 0
    if found.pattern.of(KIND) and not is_confirmed:
        facts = tuple(fact for fact in found.pattern.facts if fact.kind != KIND)
        pattern = dataclasses.replace(found.pattern, facts=facts)
        found = dataclasses.replace(found, pattern=pattern, status="unexplained")
    if not is_confirmed:
        return found
    return dataclasses.replace(found, status="described", claim=claim)


def _without_wrong_rows(lab: Lab, case: Case, ran: Result | None, rows: int) -> Diagnosis:
    """Return the diagnosis of a right output, with wrong log-sum-exps and rows of padding if the Case ran.

    They are described if further cases confirm what is stated of them.
    """
    right = Diagnosis(status="nothing wrong", tolerance=case.tolerance, looked_at=(rows, rows))
    claims = () if ran is None else side_claims(lab, case, ran)
    if not claims:
        return right
    confirmed = confirmed_side_claims(lab, case, claims, lab.run)
    return dataclasses.replace(
        right,
        status="described" if confirmed else "unexplained",
        side_errors=confirmed or claims,
        looked_at=(0, rows),
    )


def _described(case: Case, cells: Cells, pattern: Pattern) -> Diagnosis:
    """Return the diagnosis: the pattern, and the largest errors."""
    rows, heads = case.lengths.num_tokens, case.num_heads
    is_wrong = cells.is_wrong.view(rows, heads)
    error = (cells.output - cells.correct).abs().nan_to_num(torch.inf).amax(1)
    error = error.masked_fill(~cells.is_wrong, -1.0)
    largest, in_bounds = int(error.argmax()), int(cells.ratio.argmax())
    return Diagnosis(
        status="described" if pattern.is_complete else "unexplained",
        pattern=pattern,
        wrong_rows=int(is_wrong.any(1).sum()),
        wrong_heads=int(is_wrong.any(0).sum()),
        place=_place(cells, largest),
        largest=float(error[largest]),
        place_in_bounds=_place(cells, in_bounds),
        largest_in_bounds=float(cells.ratio[in_bounds]),
        tolerance=case.tolerance,
        unknown=[_UNKNOWN],
        looked_at=(rows, rows),
    )


def _place(cells: Cells, at: int) -> ErrorPlace:
    """Return the place of a cell."""
    numbers = (int(each[at]) for each in (cells.seq, cells.token, cells.row, cells.head))
    return ErrorPlace(**dict(zip(("seq", "token", "row", "head"), numbers, strict=True)))


def _with_argument_alone(found: Diagnosis, case: Case) -> Diagnosis:
    """Return the diagnosis of an output that is wrong with its argument alone, with a note."""
    what = f"why it is right without op_argument {case.op_argument}"
    return dataclasses.replace(found, unknown=[*found.unknown, what])


def _as_without(plain: Diagnosis, case: Case) -> Diagnosis:
    """Return the diagnosis of the Case without its argument, with a note."""
    what = (
        f"what op_argument {case.op_argument} adds: this is about the output without it, wrong, too"
    )
    return dataclasses.replace(plain, unknown=[*plain.unknown, what])
