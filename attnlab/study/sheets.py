"""Sheets of the study: the claims and the notebooks."""

from attnlab.show.notebook import as_text
from attnlab.show.sheets.sheet import Facts, Grid, Hidden, Lines, Link, Row, Sheet, Tone, Words
from attnlab.study.claims.ledger import FAILS, HOLDS, UNDECIDED, Finding, Findings
from attnlab.study.overview import Chapters

_VERDICT: dict[str, Tone] = {HOLDS: "good", FAILS: "bad", UNDECIDED: "odd"}
_COUNTED = {HOLDS: "hold", FAILS: "fail", UNDECIDED: "cannot be decided"}


def claim(one: Finding) -> Sheet:
    """Return a claim, its verdict, and the evidence."""
    what = one.claim
    return Sheet(
        kind=f"Claim {what.number}",
        line=f"<Claim {what.number}: {one.verdict}>",
        head=Words(one.verdict, _VERDICT[one.verdict]),
        parts=[
            Lines([f"“{what.text}” (notes {what.notes})", one.reading]),
            Facts([("rests on", one.rests_on), *_evidence(one)]),
        ],
    )


def claims(found: Findings) -> Sheet:
    """Return a row for each claim: its verdict and the evidence."""
    counts = ", ".join(
        f"{sum(one.verdict == name for one in found)} {counted}"
        for name, counted in _COUNTED.items()
        if any(one.verdict == name for one in found)
    )
    rows: list[Row] = [
        [
            one.claim.number,
            Words(one.verdict, _VERDICT[one.verdict]),
            one.claim.text,
            [one.reading, *_figures(one)],
            Words(one.rests_on, "quiet"),
        ]
        for one in found
    ]
    summary = f"{len(found)} claims: {counts}" if found else "no claims"
    return Sheet(
        kind="Claims",
        line=f"<Claims: {summary}>",
        head=summary,
        parts=[
            Grid(["number", "verdict", "claim", "evidence", "rests on"], rows, most=len(rows)),
        ],
    )


def _figures(one: Finding) -> list[Hidden]:
    """Return the figures that an experiment measured, folded; empty if it measured none."""
    lines = [f"{name}: {value}" for name, value in _evidence(one)]
    count = "1 figure" if len(lines) == 1 else f"{len(lines)} figures"
    return [Hidden(count, lines)] if lines else []


def _evidence(one: Finding) -> list[tuple[str, str]]:
    return [(name, as_text(value)) for name, value in one.evidence.items()]


def chapters(found: Chapters) -> Sheet:
    """Return a row for each notebook: its question, the answer, and the claims that it concerns."""
    judged = sum(bool(one.verdict) for one in found)
    summary = f"{len(found)} notebooks, {judged} of them answered here"
    rows: list[Row] = [
        [
            Link(one.notebook[:2], one.notebook),
            Link(one.question, one.notebook),
            one.verdict or Words("no verdict: explore it by hand", "quiet"),
            ", ".join(one.claims),
        ]
        for one in found
    ]
    return Sheet(
        kind="Notebooks",
        line=f"<Chapters: {summary}>",
        head=summary,
        parts=[
            Grid(["number", "question", "answer, computed here", "claims"], rows, most=len(rows))
        ],
    )
