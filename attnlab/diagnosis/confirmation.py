"""Confirmation: an explanation must hold in further cases with other lengths and odd scales."""

from collections.abc import Iterable

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.defects import Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slices import sample_rows
from attnlab.diagnosis.candidates import Candidate, fit
from attnlab.diagnosis.decision import NEVER_WRITTEN
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.examination import examine
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.reruns import Rerun
from attnlab.diagnosis.second_case import further_cases
from attnlab.diagnosis.withdrawal import SLOTS_OF, withdraw
from attnlab.lab.lab import Lab

# Reruns with another output buffer show the first directly; further cases have no freed blocks.
_SHOWN_BY_RERUNS = ("query_start_loc_as_int32", "freed_leaked")


def with_second_cases(lab: Lab, case: Case, rerun: Rerun, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without explanations that do not hold in further cases.

    A defect that changes nothing in a further case is kept, as is one in a case that the kernel rejects. So
    is one of a batch with several new tokens if decodes alone are right: another kernel may compute those.
    """
    has_prefill = max(case.lengths.query_lens, default=0) > 1
    for other in further_cases(case):
        if all(one.name in _SHOWN_BY_RERUNS for one in diagnosis.explanations):
            break
        known = other.replace(output_init="recycled")  # so that unwritten rows can be recognised
        if any(one.name in SLOTS_OF for one in diagnosis.explanations):
            known = known.replace(empty_slots="nan")  # finite numbers times 0 would not show it
        try:
            output = rerun(known)
        except AttnLabError:
            continue
        only_decodes = max(other.lengths.query_lens, default=0) == 1
        if has_prefill and only_decodes and not examine(lab, known, output, ()).diagnosis.is_wrong:
            continue
        diagnosis = withdraw(
            diagnosis,
            lambda one, known=known, output=output: is_refuted(lab, known, output, one),  # type: ignore[misc]
            "excluded by rerun",
            f"{{names}} does not explain a second run with {_changes_text(case, other)}",
        )
    return diagnosis


def is_refuted(lab: Lab, case: Case, output: torch.Tensor, candidate: Candidate) -> bool:
    """Answer whether the output of another case contradicts a candidate."""
    if candidate.name in _SHOWN_BY_RERUNS:
        return False
    again = examine(lab, case, output, (candidate.defect,), Pattern())
    if candidate.name == NEVER_WRITTEN:  # how many rows that concerns may depend on the lengths
        evidence = again.evidence
        return not bool(torch.isin(evidence.locations.wrong_rows, evidence.unwritten).all())
    if again.diagnosis.is_wrong:
        return not again.diagnosis.explanations
    if candidate.name in SLOTS_OF:  # the case may have no such slots
        return False
    return not is_hidden(again.problem, candidate.defect)


def is_hidden(problem: Problem, defect: Defect) -> bool:
    """Answer whether a defect changes only the rounding in a problem."""
    if not defect.applies(problem):
        return True
    for row_slice in sample_rows(problem):
        predicted, correct = defect.compute(problem, row_slice), problem.correct(row_slice)
        if bool((fit(predicted.output, correct, 1).ratio > 1).any()):
            return False
    return True


def _changes_text(case: Case, other: Case) -> str:
    """Return the changed fields of another case that matter to a reader."""
    names: Iterable[str] = ("query_lens", "ctx_lens", "sm_scale", "k_scale", "v_scale")
    return ", ".join(
        f"{name}={getattr(other, name)}"
        for name in names
        if getattr(other, name) != getattr(case, name)
    )
