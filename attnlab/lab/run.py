"""The table of stages: one Case in every stage of the test, on several platforms."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attnlab.case.case import Case, as_case
from attnlab.case.errors import InvalidCall
from attnlab.case.fields import is_plugin
from attnlab.case.shown import Shown, json_value
from attnlab.case.stages import STAGES
from attnlab.contracts.contract import Target, contracts_of
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import unwritten_rows
from attnlab.contracts.violations import find_violations
from attnlab.kernels.backend import in_parts
from attnlab.lab.decode_error import DecodedError, ErrorAnswer, decode
from attnlab.lab.error_map import ErrorMap
from attnlab.lab.error_text import ErrorText
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result
from attnlab.tensors.case_call import hollow_call

PLATFORMS_SHOWN = ("gfx942", "sm_90")


def platforms_shown(case: Case) -> tuple[str, ...]:
    """Return the default columns of a Case's table.

    vLLM's CPU op and a user's kernel do not depend on the platform: their table has one column.
    """
    is_one = case.backend == "vllm-cpu" or is_plugin(case.backend)
    return (case.platform,) if is_one else PLATFORMS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The outcome of one Case of the table, without tensors.

    ``decode_error`` and ``prefill_error`` are the largest absolute errors over the rows of sequences with
    one new token and with more; None if there is no such row or the call was rejected.
    """

    stage: str
    platform: str
    status: str
    verdict: str
    mismatched: int | None
    total: int | None
    first_index: tuple[int, int, int] | None
    decode_kernel: str | None
    decode_error: float | None
    prefill_error: float | None


class StageTable(Shown, list[Cell]):
    """The cells of a table of stages, stage by stage; ``case``: the Case that they were made from."""

    __slots__ = ("case",)

    def __init__(self, cells: Iterable[Cell] = (), *, case: Case | None = None) -> None:
        super().__init__(cells)
        self.case = case


def stage_table(
    lab: Lab,
    case: Case,
    platforms: Sequence[str] = PLATFORMS_SHOWN,
    stages: Sequence[str] = tuple(STAGES),
    on_cell: Callable[[int, int], None] | None = None,
) -> StageTable:
    """Run the Case in each stage on each platform; return the cells stage by stage.

    ``on_cell`` is called before each cell with the number of finished cells and of all cells. The cells
    share batch, cache and reference as far as their stages allow.
    """
    plan = [
        case.replace(stage=stage, platform=platform) for stage in stages for platform in platforms
    ]
    cells: dict[int, Cell] = {}
    order = sorted(range(len(plan)), key=lambda i: plan[i].staging.fill)  # equal ones share a cache
    for i in in_parts(order):
        if on_cell is not None:
            on_cell(len(cells), len(plan))
        cells[i] = _cell(lab, plan[i])
    return StageTable([cells[i] for i in range(len(plan))], case=case)


def predict_stages(case: Case, platform: str) -> list[int | str]:
    """Predict the outcome of each stage on a platform from the contracts: wrong elements, or "rejected".

    No kernel runs. The elements of unwritten rows are wrong. The effect of a slot that lacks its token
    depends on the data; with the test's data it stays below the tolerance, so it counts as 0.
    """
    predicted: list[int | str] = []
    for stage in STAGES:
        staged = case.replace(stage=stage, platform=platform)
        call, kernels, target = hollow_call(staged), decide(staged).kernels, Target.of(staged)
        terms = contracts_of(kernels, target, staged.op)
        rejected = any(
            violation.effect == "rejected" for violation in find_violations(call, target, kernels)
        )
        wrong = int(unwritten_rows(terms, call).sum()) * call.buffer[0].numel()
        predicted.append("rejected" if rejected else wrong)
    return predicted


def outcomes(cells: Sequence[Cell], platform: str) -> list[int | str]:
    """Return the outcome of each stage on a platform, in the form of :func:`predict_stages`."""
    column = [cell for cell in cells if cell.platform == platform]
    return ["rejected" if cell.mismatched is None else cell.mismatched for cell in column]


def _cell(lab: Lab, case: Case) -> Cell:
    result = lab.run(case)
    errors = result.errors
    return Cell(
        stage=case.stage,
        platform=case.platform,
        status=result.status,
        verdict=result.verdict,
        mismatched=None if errors is None else errors.mismatched,
        total=None if errors is None else errors.total,
        first_index=None if errors is None else errors.first_index,
        decode_kernel=result.decision.decode,
        decode_error=None if errors is None else _largest(errors.seq_error(), case, decode=True),
        prefill_error=None if errors is None else _largest(errors.seq_error(), case, decode=False),
    )


def _largest(seq_error: list[float], case: Case, decode: bool) -> float | None:
    """Return the largest error of the decode sequences, or of the others; NaN is the largest."""
    errors = [
        error
        for error, query_len in zip(seq_error, case.lengths.query_lens, strict=True)
        if (query_len == 1) == decode
    ]
    return max(errors, key=lambda error: (error != error, error), default=None)


def to_json(case: Case, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the table as values of strict JSON."""
    rows = [json_value(dataclasses.asdict(cell)) for cell in cells]
    return {"case": json_value(case.changes()), "backend": case.backend, "cells": rows}


# The part of ``import attnlab`` that runs Cases and compares outputs.
#
# Every function accepts a Case or a pytest id, and changes of its fields as keywords. Without ``lab`` it
# uses a default Lab, which keeps the last batches, caches and references.


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
