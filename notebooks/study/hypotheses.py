"""Hypotheses about a failure: what each predicts, and whether that agrees with what was observed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result

_BUFFERS = ("zeros", "recycled")  # contents of the output buffer that no hypothesis fixes
_FACTOR = 2.0  # by which an observed size may leave the predicted range


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one hypothesis predicts.

    - ``status``: "match", "mismatch" or "rejected".
    - ``row``: the only row with mismatches, or None; ``elements``: mismatches, None if rejected.
    - ``smallest``, ``largest``: the range of the largest error over the contents of the output buffer.
      ``largest`` is the largest number of the dtype if a row keeps the content of both buffers: no kernel
      wrote it, so it may hold anything. None if the call is rejected or the error is NaN.
    - ``after_fix``: mismatches after the cast moved, everything else unchanged.
    """

    status: str
    row: int | None
    elements: int | None
    smallest: float | None
    largest: float | None
    after_fix: int | None

    def agrees(self, observed: Mapping[str, Any]) -> dict[str, bool]:
        """Answer for each observation whether the prediction agrees with it."""
        return {
            "output": self.status != "rejected",
            "row": self.row == observed["row"],
            "elements": self.elements == observed["elements"],
            "largest": self._covers(observed["largest"]),
            "after the cast moved": self.after_fix == observed["after the cast moved"],
        }

    def _covers(self, size: float) -> bool:
        if self.smallest is None or self.largest is None:
            return False
        return self.smallest / _FACTOR <= size <= self.largest * _FACTOR

    def cells(self) -> list[str]:
        """Return the prediction as the cells of a table, in the order of agrees()."""
        size = "none"
        if self.smallest is not None and self.largest is not None:
            ends = dict.fromkeys((f"{self.smallest:.2g}", f"{self.largest:.2g}"))
            size = " to ".join(ends)
        row, elements, after_fix = (
            "none" if value is None else str(value)
            for value in (self.row, self.elements, self.after_fix)
        )
        return [self.status, row, elements, size, after_fix]


def predict(lab: Lab, case: Case, changes: Mapping[str, Any]) -> Prediction:
    """Return what a hypothesis predicts; ``changes`` turn the failing Case into the hypothesis's Case.

    The same steps for every hypothesis: run it with two contents of the output buffer, look for rows that
    keep both, and run it after the cast moved.
    """
    assumed = case.replace(**changes)
    runs = [lab.run(assumed.replace(output_init=buffer)) for buffer in _BUFFERS]
    query_start_loc = {"stage": "cast_after_cumsum", "query_start_loc_dtype": None}
    fixed = lab.run(case.replace(**{**changes, **query_start_loc}))
    after = fixed.errors.mismatched if fixed.errors else None
    errors = runs[-1].errors
    if errors is None:
        return Prediction(
            status="rejected", row=None, elements=None, smallest=None, largest=None, after_fix=after
        )
    sizes = [run.errors.greatest_abs.value for run in runs if run.errors is not None]
    places = runs[-1].places()
    is_known = not any(map(math.isnan, sizes))
    largest = max(sizes)
    if is_known and _keeps_a_row(lab, runs):
        largest = torch.finfo(getattr(torch, case.dtype)).max
    return Prediction(
        status=runs[-1].status,
        row=places[0].row if len(places) == 1 else None,
        elements=errors.mismatched,
        smallest=min(sizes) if is_known else None,
        largest=largest if is_known else None,
        after_fix=after,
    )


def _keeps_a_row(lab: Lab, runs: Sequence[Result]) -> bool:
    """Answer whether a row of the output has the bits of the buffer before the call in every run."""
    kept = [_kept(run.call.buffer, lab.call(run.case).buffer) for run in runs]
    return bool(torch.stack(kept).all(0).any())


def _kept(output: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return which rows have equal bits, [num_tokens] bool."""
    bits = {2: torch.int16, 4: torch.int32}[output.element_size()]
    same = output.contiguous().view(bits) == buffer.contiguous().view(bits)
    return same.flatten(1).all(1)


def table_of(
    predictions: Mapping[str, Prediction], observed: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Return a row for each hypothesis: its name, then "yes" or "no" and the predicted value."""
    rows = []
    for name, prediction in predictions.items():
        agreed = prediction.agrees(observed).values()
        cells = zip(agreed, prediction.cells(), strict=True)
        rows.append((name, *(f"{'yes' if yes else 'no'}: {cell}" for yes, cell in cells)))
    return rows
