"""MlaResult: a path that ran, compared with the exact path step by step."""

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.json import json_number
from attnlab.case.shown import Shown
from attnlab.mla.mla_case import MlaCase
from attnlab.mla.partial import Partial

MATCH, MISMATCH = "match", "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """A step of a path, and its exact result.

    - ``name``, ``kind``: see :class:`attnlab.mla.paths.Step`.
    - ``ratio``: [num_tokens, num_heads], the largest error of an output element or the LSE as a multiple of
      its bound; infinite where a result is not finite, 0 for rows that see no key. Of the last merge, only
      the output counts: vLLM does not use its LSE.
    """

    name: str
    kind: str
    result: Partial
    exact: Partial
    ratio: torch.Tensor

    @property
    def is_right(self) -> bool:
        """Answer whether every error is within its bound."""
        return float(self.ratio.amax()) <= 1.0 if self.ratio.numel() else True

    @property
    def wrong_rows(self) -> list[int]:
        """Return the rows with an error beyond its bound."""
        return torch.nonzero((self.ratio > 1).any(1)).flatten().tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MlaResult(Shown):
    """What an MLA path computed, and which fault explains it.

    - ``ops``: whose ops ran. ``planted``: the fault that was planted, or None.
    - ``steps``: in their order; the last one's result is the output.
    - ``candidates``: names of the faults whose predicted output agrees, the narrowest prediction first; empty
      if nothing is wrong.
    """

    case: MlaCase
    ops: str
    planted: str | None
    steps: tuple[StepResult, ...]
    candidates: tuple[str, ...]
    seconds: float

    @property
    def status(self) -> str:
        """Return "match" if the output and its LSE are within their bounds, else "mismatch"."""
        return MATCH if self.last.is_right else MISMATCH

    @property
    def last(self) -> StepResult:
        """Return the step that returns the output."""
        return self.steps[-1]

    @property
    def output(self) -> torch.Tensor:
        """Return the output, [num_tokens, num_heads, value_size]."""
        return self.last.result.output

    @property
    def error(self) -> float:
        """Return the largest error of the output; infinite if it is not finite where it must be."""
        return float(_output_error(self.last.result, self.last.exact).amax())

    @property
    def worst(self) -> float:
        """Return the largest error of output or LSE as a multiple of its bound."""
        return float(self.last.ratio.amax())

    @property
    def first_wrong(self) -> str | None:
        """Return the name of the first step that is not right, or None."""
        return next((one.name for one in self.steps if not one.is_right), None)

    @property
    def cause(self) -> str | None:
        """Return the fault that explains the output, or None if nothing is wrong or no fault does."""
        return self.candidates[0] if self.candidates else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values of strict JSON."""
        steps = [
            {"name": one.name, "kind": one.kind, "worst": json_number(float(one.ratio.amax()))}
            for one in self.steps
        ]
        return {
            "case": self.case.to_dict(),
            "ops": self.ops,
            "planted": self.planted,
            "status": self.status,
            "error": json_number(self.error),
            "worst": json_number(self.worst),
            "first_wrong": self.first_wrong,
            "wrong_rows": self.last.wrong_rows,
            "cause": self.cause,
            "candidates": list(self.candidates),
            "steps": steps,
            "seconds": self.seconds,
        }


def compared(result: Partial, exact: Partial, with_lse: bool = True) -> torch.Tensor:
    """Return the largest error of each row and head as a multiple of its bound, [num_tokens, num_heads].

    ``with_lse``: the LSE is compared, too. Where both are NaN, the error is 0. A row that sees no key must
    have an infinite LSE.
    """
    bound, lse_bound = exact.errors
    by_element = _ratio(_difference(result.output, exact.output), bound)
    by_lse = _ratio(_difference(result.lse, exact.lse), lse_bound)
    is_empty = exact.lse == -torch.inf
    empty_error = torch.where(result.lse.isinf(), 0.0, torch.inf if with_lse else 0.0)
    ratio = by_element.amax(2)
    if with_lse:
        ratio = torch.maximum(ratio, by_lse)
    return torch.where(is_empty, empty_error, ratio)


def _ratio(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return errors as multiples of their bounds; a bound is NaN where both results are."""
    ratio = error / bound.clamp(min=torch.finfo(torch.float64).tiny)
    return ratio.masked_fill(error == 0, 0.0).nan_to_num(torch.inf, torch.inf)


def _output_error(result: Partial, exact: Partial) -> torch.Tensor:
    """Return the largest error of each row and head; 0 for rows that see no key."""
    error = _difference(result.output, exact.output).amax(2)
    return error.masked_fill(exact.lse == -torch.inf, 0.0)


def _difference(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    both_nan = found.isnan() & exact.isnan()
    error = (found.double() - exact).abs().nan_to_num(torch.inf, torch.inf)
    return error.masked_fill(both_nan | (found.double() == exact), 0.0)
