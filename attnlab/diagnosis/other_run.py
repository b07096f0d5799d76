"""OtherRun: a second run of a Case with changed fields, and the output rows that differ between both."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, KernelRejected
from attnlab.case.json import json_number
from attnlab.case.shown import Shown
from attnlab.kernels.control import Instability, controlled, rows_agree
from attnlab.lab.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OtherRun(Shown):
    """A second run of a Case, compared with the first.

    - ``changes``: the fields that the second run changes, with their values as text.
    - ``rows``: the output rows whose bits differ; ``num_rows``: the number of all rows.
    - ``largest``: the largest difference; NaN if a value is NaN in one run only, 0 if no row differs.
    - ``error``: what the kernel raises in the second run, or None.
    - ``instability``: that equal runs differ, so that the change shows nothing, or None.
    """

    changes: Mapping[str, str]
    rows: tuple[int, ...]
    num_rows: int
    largest: float
    error: str | None = None
    instability: Instability | None = None

    @property
    def is_equal(self) -> bool:
        """Answer whether both outputs have the same bits."""
        return not self.rows and self.error is None and self.instability is None

    def text(self) -> str:
        """Return the comparison as one sentence."""
        changed = ", ".join(f"{name} {value}" for name, value in self.changes.items())
        if self.instability is not None:
            return f"{changed} is not compared: {self.instability.text}"
        if self.error is not None:
            return f"with {changed}, the kernel rejects the call: {self.error}"
        if not self.rows:
            return f"with {changed}, the output has the same bits"
        shown = ", ".join(map(str, self.rows[:8])) + (", …" if len(self.rows) > 8 else "")
        return (
            f"with {changed}, {len(self.rows)} of {self.num_rows} rows have other bits "
            f"(rows {shown}), the largest difference is {self.largest:.4g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        return {
            "changes": dict(self.changes),
            "rows": list(self.rows),
            "largest": json_number(self.largest),
            "error": self.error,
            "instability": None if self.instability is None else self.instability.to_dict(),
        }


def run_again(lab: Lab, case: Case, output: torch.Tensor, changes: Mapping[str, Any]) -> OtherRun:
    """Run a Case with changed fields, and compare its output with ``output``, that of the Case.

    Raises InvalidCase if the changes are not allowed, or give an output of another shape.
    """
    other = case.replace(**changes)
    words = {name: str(value) for name, value in changes.items()}
    none = OtherRun(changes=words, rows=(), num_rows=len(output), largest=0.0)
    with controlled() as control:
        try:
            second = lab.output(other)
        except KernelRejected as error:
            return dataclasses.replace(none, error=str(error))
        if not lab.backend(case).is_deterministic:
            control.compare(output, lambda: lab.output(case))
        is_alike = second.shape == output.shape and second.dtype == output.dtype
        same = rows_agree(output, second) if is_alike else None
    if control.found is not None:
        return dataclasses.replace(none, instability=control.found)
    if same is None:
        name = next(iter(changes))
        raise InvalidCase(f"{name} must keep the shape and dtype of the output", field=name)
    rows = torch.nonzero(~same).flatten()
    one, two = output[rows].double(), second[rows].double()
    both_nan = one.isnan() & two.isnan()
    difference = (one - two).abs().masked_fill(both_nan, 0.0)
    return OtherRun(
        changes=words,
        rows=tuple(rows.tolist()),
        num_rows=len(output),
        largest=float(difference.max()) if len(rows) else 0.0,
    )
