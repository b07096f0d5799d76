"""A Sheet as text: what rich prints in a terminal."""

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


def render(sheet: Sheet) -> RenderableType:
    """Return the sheet as something that rich prints; what is folded is left out."""
    head = Text(sheet.kind, "bold") + Text("  ") + _cell(sheet.head)
    return Group(head, *(one for part in sheet.parts for one in _part(part)))


def _part(part: Part) -> list[RenderableType]:
    if isinstance(part, Facts):
        return [_facts(part)]
    if isinstance(part, Grid):
        return _grid(part)
    if isinstance(part, Lines):
        return [_cell(one) for one in part.lines]
    return []


def _facts(facts: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.rows:
        table.add_row(f"  {name}", _value(value))
    return table


def _grid(grid: Grid) -> list[RenderableType]:
    """Return the title, the first rows, and how many are left out."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    shown = grid.rows[: grid.most]
    for i, name in enumerate(grid.columns):
        number = all(isinstance(row[i], int) for row in shown)
        table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in shown:
        table.add_row(*(_value(one) for one in row))
    left = len(grid.rows) - len(shown)
    return [
        *([Text(grid.title, "dim")] if grid.title else []),
        table,
        *([Text(f"… and {left} more rows", "dim")] if left else []),
    ]


def _value(value: Value) -> Text:
    if isinstance(value, str | int | Words | Bar | Link | Hidden):
        return _cell(value)
    return Text("\n").join(_cell(one) for one in value if not isinstance(one, Hidden))


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
    """Return a bar of characters; a part that is there has at least one."""
    first, then = (
        max(round(part * _BAR_WIDTH / max(1, bar.full)), int(part > 0))
        for part in (bar.first, bar.then)
    )
    return "░" * first + "█" * then
