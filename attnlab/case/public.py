"""Accept a Case or a pytest id as the first argument of a public function."""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.fields import refuse


def as_case(case: Case | str, **changes: Any) -> Case:
    """Return the Case, or the Case of a pytest id of vLLM, with ``changes`` to its fields.

    Raises InvalidCase for an id that is not known, and for a change that is not allowed.
    """
    if isinstance(case, str):
        case = Case.from_test_id(case)
    elif not isinstance(case, Case):
        refuse("case", "a Case or a pytest id", case)
    return case.replace(**changes) if changes else case
