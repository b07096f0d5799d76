"""The table of stages: one Case in every state that the test went through, on several platforms."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.case.stages import STAGES
from attnlab.contracts.contract import contract, unwritten_rows
from attnlab.contracts.dispatch import Target, decide
from attnlab.contracts.violations import find_violations
from attnlab.lab.lab import Lab

PLATFORMS_SHOWN = ("gfx942", "sm_90")


def platforms_shown(case: Case) -> tuple[str, ...]:
    """Return the columns of a Case's table where nobody asks for others: the CPU's op has one."""
    return (case.platform,) if case.backend == "vllm-cpu" else PLATFORMS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One Case of the table and what came of it; no tensors.

    ``decode_error`` and ``prefill_error`` are the largest absolute errors over the rows of sequences
    with one new token and with more; None where there is no such row or the call was rejected.
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
    """Run the Case in each stage on each platform, stage by stage.

    ``on_cell`` is called with (cells done, cells in all) before each cell. The Lab builds once what
    the cells share.
    """
    plan = [(stage, platform) for stage in stages for platform in platforms]
    cells = StageTable(case=case)
    for done, (stage, platform) in enumerate(plan):
        if on_cell is not None:
            on_cell(done, len(plan))
        cells.append(_cell(lab, case.replace(stage=stage, platform=platform)))
    return cells


def predict_stages(lab: Lab, case: Case, platform: str) -> list[int | str]:
    """Return what the contracts alone say of each stage on a platform: wrong elements, or "rejected".

    Nothing is run. Wrong are the elements of rows that nobody writes; what a slot does that lacks its
    token depends on the data, and with the test's it stays under the tolerance.
    """
    told: list[int | str] = []
    for stage in STAGES:
        staged = case.replace(stage=stage, platform=platform)
        call, kernels, target = lab.call(staged), decide(staged).kernels, Target.of(staged)
        terms = [contract(name, target, staged.op) for name in kernels]
        rejected = any(
            violation.effect == "rejected" for violation in find_violations(call, target, kernels)
        )
        wrong = int(unwritten_rows(terms, call).sum()) * call.output[0].numel()
        told.append("rejected" if rejected else wrong)
    return told


def outcomes(cells: Sequence[Cell], platform: str) -> list[int | str]:
    """Return what came of each stage on a platform, in the words of :func:`predict_stages`."""
    own = [cell for cell in cells if cell.platform == platform]
    return ["rejected" if cell.mismatched is None else cell.mismatched for cell in own]


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
    """Return the largest error of the decode, or of the other, sequences; NaN is the largest."""
    own = [
        error
        for error, query_len in zip(seq_error, case.lengths.query_lens, strict=True)
        if (query_len == 1) == decode
    ]
    return max(own, key=lambda error: (error != error, error), default=None)


def to_json(case: Case, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the table as JSON-able values; NaN is None."""
    rows = [
        {
            name: None if value != value else value
            for name, value in dataclasses.asdict(cell).items()
        }
        for cell in cells
    ]
    return {"case": case.changes(), "backend": case.backend, "cells": rows}
