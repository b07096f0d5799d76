"""ConfirmedRule: a rule beyond the catalogue that explains an output and those of further cases."""

from dataclasses import dataclass

from attnlab.diagnosis.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRule:
    """A rule and the number of further cases with wrong outputs that it explained.

    ``only_decodes``: no wrong output with several new tokens of a sequence was seen. ``others``: rules of
    other kinds that give the same outputs in all of these cases.
    """

    candidate: Candidate
    cases: int
    only_decodes: bool = False
    others: tuple[Candidate, ...] = ()

    @property
    def law(self) -> str:
        """Return what the kernel does, with the rules that no case separates from it."""
        laws = (self.candidate.text, *(one.text for one in self.others))
        return ", or ".join(laws) + (": no case separates them" if self.others else "")

    @property
    def text(self) -> str:
        """Return the rule in words, with its rows and the number of cases."""
        scope = self.candidate.scope
        where = "" if scope is None or scope.rows == "all" else f"{scope.text}: "
        plural = "case" if self.cases == 1 else "cases"
        ran = " (only decodes ran)" if self.only_decodes else ""
        return f"{where}{self.law}{ran} (confirmed on {self.cases} further {plural})"
