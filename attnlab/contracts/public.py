"""The part of ``import attnlab`` that needs no tensors."""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.public import as_case
from attnlab.contracts.dispatch import Decision, decide


def explain(case: Case | str, **changes: Any) -> Decision:
    """Return which kernels run for a Case or a pytest id, and each term of the predicate that decides.

    ``changes`` are fields of the Case, such as ``platform="gfx1100"``. No kernel is run.
    """
    return decide(as_case(case, **changes))
