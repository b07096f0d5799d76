"""Sheets of a catalogue: a table of all entries, and the facts of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.show.sheets.sheet import Facts, Grid, Row, Sheet, Words


def list_sheet(
    noun: str, entries: Mapping[str, Mapping[str, Any]], columns: Sequence[str]
) -> Sheet:
    """Return a row for each entry, with the facts in ``columns``."""
    rows: list[Row] = [
        [Words(name, code=True), *(_text(facts[column]) for column in columns)]
        for name, facts in entries.items()
    ]
    titles = [noun, *(column.replace("_", " ") for column in columns)]
    return Sheet(
        kind=f"{noun.capitalize()}s",
        line=f"<{noun.capitalize()}s: {len(entries)}>",
        head=f"{len(entries)}",
        parts=[Grid(titles, rows, most=len(rows))],
    )


def one_sheet(noun: str, name: str, facts: Mapping[str, Any]) -> Sheet:
    """Return every fact of an entry."""
    rows = [(fact.replace("_", " "), _text(value)) for fact, value in facts.items()]
    return Sheet(
        kind=noun.capitalize(),
        line=f"<{noun.capitalize()}: {name}>",
        head=Words(name, code=True),
        parts=[Facts(rows)],
    )


def _text(value: Any) -> str:
    """Return a fact as text: yes or no, and lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
