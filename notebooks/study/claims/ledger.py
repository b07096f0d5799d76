"""The classes of the ledger: a claim, the experiment that judges it, and its finding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.shown import Shown
from attnlab.show.notebook import Json, as_text, plain
from attnlab.show.sheets.sheet import Facts, Grid, Hidden, Lines, Row, Sheet, Tone, Words

HOLDS, FAILS, UNDECIDED = "holds", "fails", "cannot be decided"
_VERDICT: dict[str, Tone] = {HOLDS: "good", FAILS: "bad", UNDECIDED: "odd"}
_COUNTED = {HOLDS: "hold", FAILS: "fail", UNDECIDED: "cannot be decided"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of the investigation's notes: its number in the ledger, its text, and the notes with it."""

    number: str
    text: str
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Shown):
    """The finding about a claim.

    - ``verdict``: "holds", "fails" or "cannot be decided".
    - ``reading``: the result of the experiment in one sentence; ``evidence``: its figures.
    - ``rests_on``: what ran: a model, arithmetic, …
    """

    claim: Claim
    verdict: str
    reading: str
    rests_on: str
    evidence: dict[str, Json] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-able values."""
        return {
            "number": self.claim.number,
            "claim": self.claim.text,
            "notes": self.claim.notes,
            "verdict": self.verdict,
            "reading": self.reading,
            "rests_on": self.rests_on,
            "evidence": self.evidence,
        }

    def sheet(self) -> Sheet:
        """Return the claim, its verdict, and the evidence."""
        what = self.claim
        return Sheet.of(
            f"Claim {what.number}",
            self.verdict,
            Lines([f"“{what.text}” (notes {what.notes})", self.reading]),
            Facts([("rests on", self.rests_on), *self._figures()]),
            tone=_VERDICT[self.verdict],
        )

    def row(self) -> Row:
        """Return the finding as a row of a table, its figures folded."""
        lines = [f"{name}: {value}" for name, value in self._figures()]
        count = "1 figure" if len(lines) == 1 else f"{len(lines)} figures"
        return [
            self.claim.number,
            Words(self.verdict, _VERDICT[self.verdict]),
            self.claim.text,
            [self.reading, *([Hidden(count, lines)] if lines else [])],
            Words(self.rests_on, "quiet"),
        ]

    def _figures(self) -> list[tuple[str, str]]:
        return [(name, as_text(value)) for name, value in self.evidence.items()]


class Findings(Shown, list[Finding]):
    """The findings about all claims, shown as a table."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return a row for each claim: its verdict and the evidence."""
        counts = ", ".join(
            f"{sum(one.verdict == name for one in self)} {counted}"
            for name, counted in _COUNTED.items()
            if any(one.verdict == name for one in self)
        )
        summary = f"{len(self)} claims: {counts}" if self else "no claims"
        rows = [one.row() for one in self]
        columns = ["number", "verdict", "claim", "evidence", "rests on"]
        return Sheet.of("Claims", summary, Grid(columns, rows, most=len(rows)))


Experiment = Callable[[Claim], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A claim and the experiment that judges it."""

    claim: Claim
    judge: Experiment


def entry(number: str, notes: str, text: str) -> Callable[[Experiment], Entry]:
    """Return a decorator that turns an experiment into an entry of the ledger."""
    claim = Claim(number=number, text=text, notes=notes)
    return lambda judge: Entry(claim=claim, judge=judge)


def found(
    claim: Claim, is_so: bool | None, reading: str, rests_on: str, **evidence: object
) -> Finding:
    """Return a finding; ``is_so`` is None if the claim cannot be decided here."""
    verdict = UNDECIDED if is_so is None else HOLDS if is_so else FAILS
    return Finding(
        claim=claim,
        verdict=verdict,
        reading=reading,
        rests_on=rests_on,
        evidence={name: plain(value, name) for name, value in evidence.items()},
    )
