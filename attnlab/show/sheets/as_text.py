"""Render a Sheet as text for rich."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnlab.show.sheets.sheet import (
    Bar,
    Cell,
    Facts,
    Grid,
    Hidden,
    Lines,
    Link,
    Part,
    Sheet,
    Value,
    Words,
)

_STYLE = {"good": "green", "bad": "red", "warn": "yellow", "odd": "magenta", "quiet": "dim"}
_BAR_WIDTH = 24
_MOST_COMPLETE = 200  # rows
_MANY = 7  # columns: from here on with less space between them
_UNBROKEN = 9  # the longest word or number, in characters, that a narrow table does not break


def render(sheet: Sheet, *, complete: bool = False) -> RenderableType:
    """Return the sheet as something that rich prints, without its folded parts.

    ``complete``: print all rows of a table (up to 200) and not only those that a notebook shows at once.
    """
    head = Text(sheet.kind, "bold") + Text("  ") + _cell(sheet.head)
    return Group(head, *(text for part in sheet.parts for text in _part(part, complete)))


def _part(part: Part, complete: bool) -> list[RenderableType]:
    if isinstance(part, Facts):
        return [_facts(part)]
    if isinstance(part, Grid):
        return _grid(part, max(part.most, _MOST_COMPLETE) if complete else part.most)
    if isinstance(part, Lines):
        return [_cell(line) for line in part.lines]
    return []


def _facts(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.rows:
        table.add_row(f"  {name}", _value(value))
    return table


def _grid(grid: Grid, most: int) -> list[RenderableType]:
    """Return the title, the first ``most`` rows, and the number of rows that are omitted."""
    gap = 2 if len(grid.columns) < _MANY else 1
    table = Table(box=None, padding=(0, gap), pad_edge=False)
    shown = grid.rows[:most]
    texts = [[_value(value) for value in row] for row in shown]
    for i, name in enumerate(grid.columns):
        number = all(isinstance(row[i], int) for row in shown)
        words = " ".join([name, *(cells[i].plain for cells in texts)]).split()
        width = max((len(word) for word in words if len(word) <= _UNBROKEN), default=0)
        table.add_column(
            Text(name), justify="right" if number else "left", overflow="fold", min_width=width
        )
    for cells in texts:
        table.add_row(*cells)
    left = len(grid.rows) - len(shown)
    return [
        *([Text(grid.title, "dim")] if grid.title else []),
        table,
        *([Text(f"… and {left} more rows", "dim")] if left else []),
    ]


def _value(value: Value) -> Text:
    if isinstance(value, str | int | Words | Bar | Link | Hidden):
        return _cell(value)
    return Text("\n").join(_cell(cell) for cell in value if not isinstance(cell, Hidden))


def _cell(cell: Cell) -> Text:
    if isinstance(cell, Bar):
        return Text(_bar(cell))
    if isinstance(cell, Link):
        return Text(cell.text, f"link {cell.path}")
    if isinstance(cell, Hidden):
        return Text(cell.summary, "dim")
    if isinstance(cell, Words):
        return Text(cell.text, _STYLE.get(cell.tone, ""))
    return Text(str(cell))


def _bar(bar: Bar) -> str:
    """Return a bar of characters; a part above 0 has at least one."""
    first, then = (
        max(round(part * _BAR_WIDTH / max(1, bar.full)), int(part > 0))
        for part in (bar.first, bar.then)
    )
    return "░" * first + "█" * then
