"""The part of ``import attnlab`` that runs Cases and compares outputs.

Every function accepts a Case or a pytest id, and changes of its fields as keywords. Without ``lab`` it
uses a default Lab, which keeps the last batches, caches and references.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCall
from attnlab.case.public import as_case
from attnlab.lab.decode_error import DecodedError, decode
from attnlab.lab.error_answer import ErrorAnswer
from attnlab.lab.error_map import ErrorMap
from attnlab.lab.error_text import ErrorText
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.lab.stage_table import StageTable, platforms_shown, stage_table


@cache
def default_lab() -> Lab:
    """Return the Lab that the public functions share."""
    return Lab()


def run(case: Case | str, *, lab: Lab | None = None, **changes: Any) -> Result:
    """Run a Case and compare its output with the reference.

    Raises InvalidCase for a wrong field, and Unavailable if the backend or the memory is missing. A call
    that the kernel rejects is a Result of status "rejected".
    """
    return (lab or default_lab()).run(as_case(case, **changes))


def stages(
    case: Case | str,
    *,
    platforms: Sequence[str] | None = None,
    lab: Lab | None = None,
    **changes: Any,
) -> StageTable:
    """Run a Case in every stage of the test, on several platforms (default: gfx942 and sm_90)."""
    case = as_case(case, **changes)
    return stage_table(lab or default_lab(), case, platforms or platforms_shown(case))


def reference(case: Case | str, *, lab: Lab | None = None, **changes: Any) -> torch.Tensor:
    """Return the correct output of a Case, [num_tokens, num_heads, head_size], computed plainly.

    The dtype is the Case's ``reference_dtype``. The op reshape_and_cache_flash has the cache as its output.
    """
    return (lab or default_lab()).reference(as_case(case, **changes)).clone()


def compare(
    case: Case | str, output: torch.Tensor, *, lab: Lab | None = None, **changes: Any
) -> ErrorMap:
    """Return the errors of an output of a Case, of any backend, against the reference.

    ``output``: shape and dtype of the Case's own output. Raises InvalidCall for another.
    """
    case, lab = as_case(case, **changes), lab or default_lab()
    call = lab.call(case)
    for name in ("shape", "dtype"):
        expected, got = getattr(call.output, name), getattr(output, name)
        if got != expected:
            raise InvalidCall(f"output must have {name} {_text(expected)}, got {_text(got)}")
    call.buffer.copy_(output)
    return lab.errors(case, call, lab.reference(case))


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def decode_error(
    text: str, case: Case | str | None = None, **changes: Any
) -> DecodedError | ErrorAnswer:
    """Return which sequence, token and kernel the text of a failed test is about.

    ``text``: the message of ``torch.testing.assert_close``, an index, or the output of pytest. ``case`` is
    the Case or the pytest id of the test (default: the id in the text, else ``Case()``). A dtype error, a
    failed ``torch.allclose`` and an index of a cache give an ErrorAnswer. Raises InvalidCase if the text
    has nothing to decode or does not match the Case.
    """
    found = ErrorText.read(text)
    if case is not None:
        found = dataclasses.replace(
            found, test_id=case if isinstance(case, str) else None, refusal=""
        )
    start = Case() if case is None and found.test_id is None else case or found.test_id
    assert start is not None
    return decode(found, as_case(start, **changes))
