"""MlaReport: the hostile cases of MLA that ran, and what they found."""

from dataclasses import dataclass
from typing import Any

from attnlab.case.shown import Shown
from attnlab.mla.mla_case import MlaCase
from attnlab.mla.mla_result import MATCH, MlaResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariantResult:
    """A hostile case, why it is one, and its result, or the error for which it could not run."""

    reason: str
    case: MlaCase
    result: MlaResult | None = None
    error: str | None = None

    @property
    def status(self) -> str:
        """Return "match", "mismatch" or "unavailable"."""
        return "unavailable" if self.result is None else self.result.status

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of strict JSON."""
        result = None if self.result is None else self.result.to_dict()
        return {
            "reason": self.reason,
            "status": self.status,
            "error": self.error,
            "case": self.case.to_dict(),
            "result": result,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MlaReport(Shown):
    """What the hostile cases of MLA found in the ops of a release."""

    release: str
    backend: str
    results: tuple[VariantResult, ...]

    @property
    def findings(self) -> tuple[VariantResult, ...]:
        """Return the cases with a wrong output."""
        return tuple(one for one in self.results if one.result and one.result.status != MATCH)

    @property
    def unavailable(self) -> tuple[VariantResult, ...]:
        """Return the cases that could not run."""
        return tuple(one for one in self.results if one.result is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of strict JSON."""
        return {
            "release": self.release,
            "backend": self.backend,
            "cases": len(self.results),
            "findings": len(self.findings),
            "unavailable": len(self.unavailable),
            "results": [one.to_dict() for one in self.results],
        }
