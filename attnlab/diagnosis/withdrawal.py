"""Withdrawal: explanations that evidence other than the output contradicts.

An output may agree with a defect by its numbers although the run shows another fault: an overflowing
product, a dependence on slots that the defect does not read, or a second case that the defect does not
explain.
"""

import dataclasses
from collections.abc import Callable, Collection

from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.decision import select_cause, status_of
from attnlab.diagnosis.diagnosis import Diagnosis

# The kind of empty slots whose contents reach the output under a defect.
SLOTS_OF = {"tail_leaked": "tail", "tail_attended": "tail", "freed_leaked": "freed"}


def withdraw(
    diagnosis: Diagnosis, is_refuted: Callable[[Candidate], bool], verdict: str, reason: str
) -> Diagnosis:
    """Return the diagnosis without the explanations that are refuted; ``verdict`` is what they become.

    ``reason``: a sentence with "{names}" for the names of the withdrawn explanations.
    """
    refuted = [one.name for one in diagnosis.explanations if is_refuted(one)]
    if not refuted:
        return diagnosis
    explanations = [one for one in diagnosis.explanations if one.name not in refuted]
    candidates = [
        dataclasses.replace(one, verdict=verdict) if one.name in refuted else one
        for one in diagnosis.candidates
    ]
    cause = select_cause(explanations)
    return dataclasses.replace(
        diagnosis,
        status=status_of(cause, explanations, diagnosis.pattern),
        cause=cause,
        explanations=explanations,
        candidates=candidates,
        withdrawn=(*diagnosis.withdrawn, reason.format(names=", ".join(refuted))),
    )


def with_run_faults(
    diagnosis: Diagnosis, wraps: Collection[str], outside: Collection[str]
) -> Diagnosis:
    """Return the diagnosis with the faults that the run reported.

    Lines with int32 overflow or out-of-bounds access explain why other slots were read, so no defect that
    reads other slots is named besides.
    """
    diagnosis = dataclasses.replace(diagnosis, wraps=tuple(wraps), outside=tuple(outside))
    if not diagnosis.is_wrong or not (wraps or outside):
        return diagnosis
    what = "the product overflows" if wraps else "an access is out of bounds"
    return withdraw(
        diagnosis,
        lambda one: one.defect.family == "reads",
        "excluded by run",
        f"{{names}} would give the same output, but in the run {what}",
    )


def with_slot_kinds(diagnosis: Diagnosis, kinds: dict[str, list[int]]) -> Diagnosis:
    """Return the diagnosis without leaks of slots whose contents change no row; ``kinds`` maps kinds of
    slots to the rows that depend on them."""
    diagnosis = dataclasses.replace(diagnosis, slot_kinds=kinds)
    return withdraw(
        diagnosis,
        lambda one: one.name in SLOTS_OF and SLOTS_OF[one.name] not in kinds,
        "excluded by run",
        "{names} is withdrawn: no row depends on the slots that it reads",
    )
