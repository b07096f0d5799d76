"""Finding: something that a kernel does wrong, with the smallest Case that shows it.

A finding's output is off by more than rounding. What changes no result, or none by more than that, is an
observation: worth knowing, no fault by itself.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.shown import Shown

KINDS = {
    "wrong_output": "it writes numbers that rounding does not explain",
    "wrong_bytes": "it leaves other bytes in the cache",
    "wrong_lse": "the logarithms of sums beside its output are wrong",
    "rows_not_written": "it leaves rows of the output as they were",
    "reads_unwritten_slots": "its output depends on slots that nobody wrote",
    "reads_freed_blocks": "its output depends on blocks that the sliding window has freed",
    "fails": "it raises where nothing in its contract says so",
}
OBSERVATIONS = {
    "out_of_bounds": "it reads or writes where none of its tensors is",
    "int32_wrap": "a product of int32 numbers does not fit",
    "follows_empty_slots": "bits of its output depend on slots that nobody wrote, within rounding",
    "reads_foreign_slots": "it loads slots of another sequence, or of blocks that are nobody's",
    "reads_future_slots": "it loads tokens behind the last row that a program works on",
    "reads_empty_slots": "it loads slots of its own blocks that nobody wrote",
    "reads_outside_window": "it loads tokens before the sliding window of every row at work",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Shown):
    """One thing that goes wrong.

    - ``kind``: of KINDS, or of OBSERVATIONS; ``evidence``: what was seen, in a sentence.
    - ``diagnosis``: the defect that explains it, or what the diagnosis says instead.
    - ``case``: the smallest; ``first``: where it was first seen, None where that is the same.
    - ``seen``: how many of the cases that were run show the same.
    """

    op: str
    kind: str
    case: Case
    evidence: str
    diagnosis: str
    seen: int = 1
    first: Case | None = None

    @property
    def is_fault(self) -> bool:
        """Answer whether it makes a result wrong."""
        return self.kind in KINDS

    @property
    def group(self) -> tuple[str, str, str]:
        """Return what makes two findings the same."""
        return self.op, self.kind, self.diagnosis

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-able values."""
        fields = dataclasses.asdict(self)
        first = None if self.first is None else self.first.to_cli()
        return {**fields, "run": self.case.to_cli(), "first": first}
