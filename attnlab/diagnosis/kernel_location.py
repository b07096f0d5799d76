"""KernelLocation: where in the source of a kernel a fault may be."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.diagnosis.kernel_trials import Repair
from attnlab.diagnosis.repair_claim import RepairClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """A line of a kernel's source that may hold the fault.

    - ``file``: the path of the source; ``line``: from 1; ``source``: its text.
    - ``score``: from 0 to 1, by which lines are ranked. ``evidence``: "edit", "spectrum", "outside", "part",
      "load" or "role" (:mod:`attnlab.diagnosis.kernel_lines`). ``reason``: why, without a full stop.
    """

    file: str
    line: int
    source: str
    score: float
    evidence: str
    reason: str

    @property
    def text(self) -> str:
        """Return the line and the reason."""
        return f"{Path(self.file).name}, line {self.line}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLocation:
    """Lines that may hold a fault, ranked; or why there are none.

    - ``lines``: by all evidence, as material: most of them are not the fault. ``confirmed``: the edit that
      further cases confirm, or None if there is none or none was looked for.
    - ``repairs``: edits that make the located call right, and a second case, the best first.
    - ``why_none``: a clause, "" if there are lines. ``tried``: the number of trial edits. ``programs``:
      (programs with wrong elements, programs that write elements).
    """

    lines: tuple[KernelLine, ...] = ()
    confirmed: RepairClaim | None = None
    repairs: tuple[Repair, ...] = ()
    why_none: str = ""
    tried: int = 0
    programs: tuple[int, int] = (0, 0)

    def sentences(self) -> list[str]:
        """Return the line that reruns confirm in words, or that there is none."""
        if self.confirmed is not None:
            return [self.confirmed.text]
        if not self.lines:
            return [f"source line: unknown, because {self.why_none}"]
        return [f"source line: unknown; further cases confirm none of {self.tried} trial edits"]

    @property
    def confirmed_lines(self) -> tuple[KernelLine, ...]:
        """Return the lines of the confirmed edit, the first of them with what confirms it."""
        if self.confirmed is None:
            return ()
        own = [one for one in self.lines if (one.file, one.line) == self.confirmed.repair.line]
        return tuple(
            dataclasses.replace(one, evidence="edit", reason=self.confirmed.reason)
            for one in own[:1]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return {
            "confirmed": None if self.confirmed is None else self.confirmed.to_dict(),
            "lines": [one.to_dict() for one in self.lines],
            "why_none": self.why_none,
            "tried": self.tried,
            "programs": list(self.programs),
        }
