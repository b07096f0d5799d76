"""The part of ``import attnlab`` that scores a test."""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.public import as_case
from attnlab.mutation import power as scoring
from attnlab.mutation.power import MutationReport


def power(case: Case | str, *, remedies: bool = True, **changes: Any) -> MutationReport:
    """Return which defects a test with the Case's data and tolerance detects.

    With ``remedies``, also search the cheapest change of the test that detects each survivor.
    """
    return scoring.power(as_case(case, **changes), remedies=remedies)
