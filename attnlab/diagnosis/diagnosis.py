"""Diagnosis: what explains an output, on what evidence."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.case import Case
from attnlab.case.shown import Shown
from attnlab.contracts.violation import Violations
from attnlab.diagnosis.candidates import Candidate

STATUSES = ("nothing wrong", "explained", "ambiguous", "unexplained", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """A changed Case that would tell two candidates apart.

    - ``case``: the Case, or None where none of the changes that were tried tells them apart.
    - ``changes``: what differs from the Case that was diagnosed.
    - ``pair``: the candidates; ``gap``: how far apart they are there, in units of the rounding bounds.
    """

    pair: tuple[str, str]
    case: Case | None
    changes: dict[str, Any]
    gap: float
    tried: int

    def sentence(self) -> str:
        """Return what to do, for a person."""
        one, other = self.pair
        if self.case is None:
            return f"{one} and {other} are the same under all {self.tried} changes that were tried"
        words = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        return f"{one} and {other} are {self.gap:.3g} bounds apart with {words}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Shown):
    """What explains an output.

    - ``status``: "nothing wrong" (rounding explains all of it), "explained" (one defect leaves only
      rounding), "ambiguous" (several do, and are the same here), "unexplained", or
      "rejected" where the kernel raised ``rejection``.
    - ``cause``: the defect that explains it, or None; ``explanations``: those among which the output
      does not decide; ``candidates``: all that were held against it, the best first.
    - ``wrong_rows``, ``wrong_heads``: how many are off by more than rounding; ``place``: the worst of
      them as sequence, token, row, head; ``largest``: the largest error there.
    - ``unwritten``: rows that nobody writes, found by two runs, by the buffer's known contents or by
      the contracts, as ``unwritten_by`` says; ``by_slots``: rows that depend on slots that nobody
      wrote; None where no run was made to see it.
    - ``violations``: what the contracts say of the call.
    - ``separation``: for an ambiguous one, the Case that would tell.
    - ``looked_at``: (rows, of how many) that the confirmation covers.
    """

    status: str
    cause: Candidate | None = None
    explanations: list[Candidate] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    wrong_rows: int = 0
    wrong_heads: int = 0
    place: dict[str, int] | None = None
    largest: float = 0.0
    tolerance: float | None = None
    unwritten: list[int] = field(default_factory=list)
    unwritten_by: str = ""
    by_slots: list[int] | None = None
    violations: Violations = field(default_factory=Violations)
    separation: Separation | None = None
    looked_at: tuple[int, int] = (0, 0)
    rejection: str = ""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Answer whether there is anything to explain."""
        return self.status != "nothing wrong"

    def sentences(self) -> list[str]:
        """Return what a person wants to know, a sentence each."""
        if not self.is_wrong:
            return [
                "nothing is wrong: every element is within its kernel's rounding of the right one"
            ]
        if self.status == "rejected":
            return [f"the kernel rejects the call: {self.rejection}", *self._link_sentences()]
        return [
            *self._place_sentences(),
            *self._cause_sentences(),
            *self._link_sentences(),
        ]

    def _place_sentences(self) -> list[str]:
        told = []
        if self.place is not None:
            told.append(
                "{} of {} rows wrong, the worst in sequence {seq}, token {token} (row {row}), head "
                "{head}: off by {size:.4g}".format(
                    self.wrong_rows, self.looked_at[1], size=self.largest, **self.place
                )
            )
        if self.tolerance is not None and self.largest <= self.tolerance:
            told.append(f"the tolerance of {self.tolerance:g} does not see it")
        if self.unwritten:
            told.append(f"{rows_text(self.unwritten)} written by nobody ({self.unwritten_by})")
        if self.by_slots:
            told.append(f"{rows_text(self.by_slots)} depending on slots that nobody wrote")
        return told

    def _cause_sentences(self) -> list[str]:
        if self.cause is not None:
            one = self.cause
            others = [s.name for s in self.explanations if s.name != one.name]
            same = f"; the same here: {', '.join(others)}" if others else ""
            return [f"explained by {one.name} in {one.scope}: {one.text}{same}"]
        if self.status == "ambiguous":
            names = ", ".join(candidate.name for candidate in self.explanations)
            return [f"ambiguous: {names} leave nothing but rounding"]
        return [f"unexplained: none of {len(self.candidates)} candidates predicts it"]

    def _link_sentences(self) -> list[str]:
        told = [
            f"violation: {violation.text}"
            for violation in self.violations
            if violation.effect != "harmless"
        ]
        if self.separation is not None:
            told.append(self.separation.sentence())
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-able values; NaN and infinity are strings."""
        return {
            "status": self.status,
            "cause": None if self.cause is None else suspect_dict(self.cause),
            "explanations": [candidate.name for candidate in self.explanations],
            "candidates": [suspect_dict(candidate) for candidate in self.candidates],
            "rejection": self.rejection or None,
            "wrong_rows": self.wrong_rows,
            "wrong_heads": self.wrong_heads,
            "place": self.place,
            "largest": number(self.largest),
            "unwritten": self.unwritten,
            "unwritten_by": self.unwritten_by,
            "by_slots": self.by_slots,
            "violations": [violation.to_dict() for violation in self.violations],
            "separation": self._separation_dict(),
            "looked_at": list(self.looked_at),
            "sentences": self.sentences(),
            "seconds": self.seconds,
        }

    def _separation_dict(self) -> dict[str, Any] | None:
        if self.separation is None:
            return None
        told = self.separation
        case = None if told.case is None else told.case.changes()
        return {
            "pair": list(told.pair),
            "case": case,
            "changes": told.changes,
            "gap": number(told.gap),
            "tried": told.tried,
            "sentence": told.sentence(),
        }


CANDIDATE_COLUMNS = ("candidate", "predicts", "seen", "left", "in bounds", "verdict", "in")


def candidate_cells(candidate: Candidate) -> list[str]:
    """Return a candidate as the cells of a table."""
    numbers = (candidate.predicted, candidate.observed, candidate.residual, candidate.ratio)
    linked = f" (violation: {', '.join(candidate.linked)})" if candidate.linked else ""
    return [
        candidate.name,
        *(f"{value:.3g}" for value in numbers),
        candidate.verdict + linked,
        candidate.scope,
    ]


def suspect_dict(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON-able values."""
    fields = {f.name: getattr(candidate, f.name) for f in dataclasses.fields(candidate)}
    del fields["defect"]
    return {
        name: number(value) if isinstance(value, float) else value for name, value in fields.items()
    }


def number(value: float) -> float | str:
    """Return a finite number, or its name: JSON has neither NaN nor infinity."""
    return value if value - value == 0 else str(value)


def rows_text(rows: list[int]) -> str:
    """Return "row 5 is", "rows 5–9 are" or "rows 5, 7, 9, … are"."""
    if len(rows) == 1:
        return f"row {rows[0]} is"
    if rows[-1] - rows[0] == len(rows) - 1:
        return f"rows {rows[0]}–{rows[-1]} are"
    return f"rows {', '.join(map(str, rows[:6]))}{', …' if len(rows) > 6 else ''} are"
