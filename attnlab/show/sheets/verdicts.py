"""Sheets of the verdicts of a notebook."""

from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import Facts, Grid, Part, Row, Sheet, Words

if TYPE_CHECKING:
    from attnlab.show.notebook import Verdict, Verdicts


def verdict(one: "Verdict") -> Sheet:
    """Return what was expected, what was found, and the evidence."""
    from attnlab.show.notebook import as_text

    values = {"expected": one.expected, "found": one.found, **one.evidence}
    return Sheet(
        kind="Verdict",
        line=f"{'✓' if one.ok else '✗'} {one}",
        head=mark(one.ok, one.name),
        parts=[Facts([(name, Words(as_text(v), code=True)) for name, v in values.items()])],
    )


def verdicts(found: "Verdicts") -> Sheet:
    """Return a row for each verdict."""
    right = sum(one.ok for one in found)
    count = f"{right} of {len(found)} as expected" if len(found) else "no verdict was recorded"
    parts: list[Part] = []
    if len(found):
        parts = [Grid(["verdict", "expected", "found"], [row(one) for one in found], most=60)]
    return Sheet(
        kind="Verdicts",
        line=f"<Verdicts: {count}>",
        head=Words(count, "good" if right == len(found) > 0 else "bad"),
        parts=parts,
    )


def row(one: "Verdict") -> Row:
    """Return a verdict as a row of a table: its mark and name, what was expected, what was found."""
    from attnlab.show.notebook import as_text

    found = Words(as_text(one.found), "good" if one.ok else "bad", code=True)
    return [mark(one.ok, one.name), Words(as_text(one.expected), code=True), found]


def mark(ok: bool, text: str) -> Words:
    """Return a text with a tick or a cross."""
    return Words(f"{'✓' if ok else '✗'} {text}", "good" if ok else "bad")
