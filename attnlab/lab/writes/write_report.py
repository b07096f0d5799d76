"""WriteReport: the hostile cache writes that ran, and what they got wrong."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.shown import Shown
from attnlab.lab.writes.write_case import WriteCase


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """A hostile write: what it got wrong, by kind, or the error for which it could not run.

    ``failed``: the error is a failure of the op itself, for example an access outside of its tensors.
    """

    name: str
    case: WriteCase
    wrong: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    failed: bool = False

    @property
    def status(self) -> str:
        """Return "match", "mismatch", "failed" or "unavailable"."""
        if self.failed:
            return "failed"
        if self.error is not None:
            return "unavailable"
        return "mismatch" if self.wrong else "match"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriteReport(Shown):
    """What hostile cache writes found. ``backend``: whose ops ran."""

    backend: str
    results: tuple[WriteResult, ...]

    @property
    def findings(self) -> tuple[WriteResult, ...]:
        """Return the writes that are wrong, and those that failed."""
        return tuple(one for one in self.results if one.status in ("mismatch", "failed"))

    @property
    def unavailable(self) -> tuple[WriteResult, ...]:
        """Return the writes that could not run."""
        return tuple(one for one in self.results if one.status == "unavailable")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of strict JSON."""
        return {
            "backend": self.backend,
            "writes": len(self.results),
            "findings": len(self.findings),
            "unavailable": len(self.unavailable),
            "results": [
                {
                    "name": one.name,
                    "status": one.status,
                    "wrong": dict(one.wrong),
                    "error": one.error,
                    "case": dataclasses.asdict(one.case),
                }
                for one in self.results
            ],
        }
