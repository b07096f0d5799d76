"""KernelLocation: where in the source of a kernel a fault may be."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.diagnosis.kernel_trials import Repair

_MOST_SENTENCES = 3


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

    - ``repairs``: edits that make the located call right, and a second case, the best first.
    - ``why_none``: a clause, "" if there are lines. ``tried``: the number of trial edits. ``programs``:
      (programs with wrong elements, programs that write elements).
    """

    lines: tuple[KernelLine, ...] = ()
    repairs: tuple[Repair, ...] = ()
    why_none: str = ""
    tried: int = 0
    programs: tuple[int, int] = (0, 0)

    def sentences(self) -> list[str]:
        """Return the first lines in words, or why there are none."""
        if not self.lines:
            return [f"location in the kernel: none, because {self.why_none}"]
        certain = [one for one in self.lines if one.evidence == "edit"]
        shown = (certain or self.lines)[:_MOST_SENTENCES]
        return [f"location in the kernel: {one.text}" for one in shown]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return {
            "lines": [one.to_dict() for one in self.lines],
            "why_none": self.why_none,
            "tried": self.tried,
            "programs": list(self.programs),
        }
