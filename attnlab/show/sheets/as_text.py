"""Render a Sheet as text for rich."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnlab.show.sheets.sheet import (
    Bar,
    Cell,
    Command,
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
_NARROW = 80  # columns of the narrowest terminal for which words are kept whole
_WORD, _SHORT_WORD = (
    24,
    9,
)  # the longest word, in characters, that a table keeps whole if it has room


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
    if isinstance(part, Command):  # a wrapped line could not be pasted into a shell
        line = Text(part.line, no_wrap=True, overflow="ignore")
        return [Text(f"# {part.title}", "dim"), line]
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
    shown = grid.rows[:most]
    texts = [[_value(value) for value in row] for row in shown]
    widths, gap = _min_widths(grid.columns, texts)
    table = Table(box=None, padding=(0, gap), pad_edge=False)
    for i, name in enumerate(grid.columns):
        number = all(isinstance(row[i], int) for row in shown)
        table.add_column(
            Text(name), justify="right" if number else "left", overflow="fold", min_width=widths[i]
        )
    for cells in texts:
        table.add_row(*cells)
    left = len(grid.rows) - len(shown)
    return [
        *([Text(grid.title, "dim")] if grid.title else []),
        table,
        *([Text(f"… and {left} more rows", "dim")] if left else []),
    ]


def _min_widths(columns: Sequence[str], texts: list[list[Text]]) -> tuple[list[int], int]:
    """Return the least width of each column, so that words stay whole, and the space around it.

    If long words need more than a narrow terminal has, only the first column, which identifies the row,
    keeps them, and there is less space between columns.
    """

    def longest(column: int, limit: int) -> int:
        words = " ".join([columns[column], *(cells[column].plain for cells in texts)]).split()
        return max((len(word) for word in words if len(word) <= limit), default=0)

    wide = [longest(i, _WORD) for i in range(len(columns))]
    if sum(wide) + 4 * len(columns) <= _NARROW:
        return wide, 2
    return [*wide[:1], *(longest(i, _SHORT_WORD) for i in range(1, len(columns)))], 1


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
