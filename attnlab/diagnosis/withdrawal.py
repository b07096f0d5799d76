"""Withdrawal: explanations that evidence other than the output contradicts.

An output may agree with a defect by its numbers although the run shows another fault: an overflowing
product, a dependence on slots that the defect does not read, or a second case that the defect does not
explain.
"""

import dataclasses
import math
from collections.abc import Callable, Collection

from attnlab.diagnosis.candidates import Candidate
from attnlab.diagnosis.decision import select_cause, status_of
from attnlab.diagnosis.diagnosis import Diagnosis

_LEFT = 0.25  # of the error that an explanation may leave in FP8
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


def with_coarse_formats(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a call in FP8 without explanations that leave over a quarter of the error.

    The rounding of FP8 weights and outputs is so coarse that it may cover the difference between two defects.
    """
    return withdraw(
        diagnosis,
        lambda one: math.isfinite(one.observed) and not one.residual <= _LEFT * one.observed,
        "excluded by value",
        "{names} would leave only rounding, but with FP8 this may be a large part of the error",
    )
