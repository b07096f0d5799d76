"""ConfirmedRule: a rule beyond the catalogue that explains an output and those of further cases."""

from dataclasses import dataclass

from attnlab.diagnosis.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRule:
    """A rule and the number of further cases with wrong outputs that it explained."""

    candidate: Candidate
    cases: int

    @property
    def text(self) -> str:
        """Return the rule in words."""
        scope = self.candidate.scope
        where = "" if scope is None or scope.rows == "all" else f"{scope.text}: "
        plural = "case" if self.cases == 1 else "cases"
        return f"{where}{self.candidate.text} (confirmed on {self.cases} further {plural})"
