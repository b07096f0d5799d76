"""Outputs that depend on memory outside of a kernel's tensors: the access is the finding.

Under the interpreter such loads return 0, on a GPU anything. Statements about the values of the output then
describe the interpreter, not the kernel.
"""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.diagnosis.address_rules import FAMILY
from attnlab.diagnosis.bad_lines import with_bad_lines
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import PLACES
from attnlab.diagnosis.rule_search import find_rule
from attnlab.kernels.control import rows_agree
from attnlab.kernels.triton.memory import other_outside
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result

Run = Callable[[Case], Result]
_OTHER = 56  # 1.0 as a byte in float8_e4m3fn


def with_outside_reads(
    lab: Lab, case: Case, diagnosis: Diagnosis, ran: Result, run: Run
) -> Diagnosis:
    """Return the diagnosis with the rows that depend on memory outside of the tensors.

    If the lines of these accesses recur wherever a further output is wrong, the status is "described", and
    nothing is stated about values. A rule about addresses is: it is why an access is out of bounds.
    :func:`without_unfounded_rule` judges it. ``lab`` has its tensors on the CPU; ``run`` runs the kernels.
    """
    rows = outside_rows(case, ran, run) if diagnosis.wrong_rows and ran.outside else ()
    if not rows:
        return diagnosis
    diagnosis = dataclasses.replace(
        diagnosis, outside_rows=rows, outside=ran.outside, wraps=ran.wraps
    )
    places = tuple(fact for fact in diagnosis.pattern.facts if fact.kind in PLACES)
    bare = dataclasses.replace(
        diagnosis,
        status="unexplained",
        cause=None,
        explanations=[],
        pattern=dataclasses.replace(diagnosis.pattern, facts=places),
    )
    found = with_bad_lines(lab, case, bare, run)
    if not found.bad_lines:
        return diagnosis
    rule = find_rule(lab, case, lambda one: run(one).output.cpu())
    is_address = rule is not None and rule.candidate.defect.family == FAMILY
    return dataclasses.replace(found, rule=rule if is_address else None)


def without_unfounded_rule(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without a rule about addresses if every wrong row depends on memory outside.

    The interpreter loads zeros there from every address, so that other factors give the same output.
    """
    rule = diagnosis.rule
    if rule is None or rule.candidate.defect.family != FAMILY:
        return diagnosis
    if len(diagnosis.outside_rows) < diagnosis.wrong_rows:
        return diagnosis
    status = diagnosis.status if diagnosis.bad_lines else "unexplained"
    return dataclasses.replace(diagnosis, rule=None, status=status)


def outside_rows(case: Case, ran: Result, run: Run) -> tuple[int, ...]:
    """Return the rows that change with what loads outside of all tensors return.

    Only the interpreter knows them.
    """
    if case.backend == "rocm":
        return ()
    try:
        with other_outside(_OTHER):
            again = run(case)
    except AttnLabError:
        return ()
    if again.status == "rejected":
        return ()
    is_equal = rows_agree(again.output.cpu(), ran.output.cpu())
    return tuple(torch.nonzero(~is_equal).flatten().tolist())
