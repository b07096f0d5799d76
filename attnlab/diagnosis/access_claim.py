"""AccessClaim: accesses that a kernel must not make, or lacks, wherever its output is wrong."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessClaim:
    """Statements about the slots that a kernel reads and the rows that it writes.

    ``facts``: each holds in every case with a wrong output. It holds in none with a right one, except that
    programs may store different numbers to the same elements and leave the right one there. ``cases``: the
    number of further cases with wrong outputs.
    """

    facts: tuple[str, ...]
    cases: int

    @property
    def text(self) -> str:
        """Return the claim in words."""
        plural = "case" if self.cases == 1 else "cases"
        return f"{'; '.join(self.facts)} (confirmed on {self.cases} further {plural})"
