"""Render a Sheet as HTML: no scripts, no external resources, all text escaped.

A page states its colours as --attnlab-good, -bad, -warn and -odd; JupyterLab's themes have theirs here, with
a contrast of at least 4.5. Elsewhere they are mid-tones, with at least 4 on white and on dark pages.
Everything else is inherited. If a page drops the style sheet, its own table style applies. Bars are SVG.
"""

import re
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

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
    Row,
    Sheet,
    Value,
    Words,
)

_COLOUR = {"good": "#1f883d", "bad": "#d9403f", "warn": "#9a6b00", "odd": "#8f5fd6"}
_FIRST, _THEN = "#56a0d3", "#d98200"  # the two parts of a bar
_BAR_WIDTH = 180
_MOST_FOLDED = 200  # rows
# The class is doubled so that it takes precedence over the page's rules for tables.
_STYLE = """<style>
.attnlab-sheet.attnlab-sheet { margin: .3em 0 }
.attnlab-sheet.attnlab-sheet div { margin: .3em 0 }
.attnlab-sheet.attnlab-sheet table { border: 0; border-collapse: collapse; margin: .3em 0;
  font-size: max(.92em, 12px) }
.attnlab-sheet.attnlab-sheet :is(th, td) { text-align: left; vertical-align: top; border: 0;
  padding: .2em .9em .2em .3em; max-width: 44em; white-space: normal; overflow-wrap: break-word }
.attnlab-sheet.attnlab-sheet tbody th { font-weight: normal; opacity: .8; white-space: nowrap }
.attnlab-sheet.attnlab-sheet tbody th + td { overflow-wrap: anywhere }
.attnlab-sheet.attnlab-sheet .n { text-align: right; font-variant-numeric: tabular-nums }
.attnlab-sheet.attnlab-sheet .c { font-family: var(--jp-code-font-family, ui-monospace, monospace);
  font-size: max(.95em, 12px); overflow-wrap: anywhere }
.attnlab-sheet.attnlab-sheet summary { cursor: pointer; opacity: .8 }
.attnlab-sheet.attnlab-sheet svg { height: 12px; max-width: none }
[data-jp-theme-light="true"] .attnlab-sheet { --attnlab-good: #1a7f37; --attnlab-bad: #cf222e;
  --attnlab-warn: #8a5d00; --attnlab-odd: #8250df }
[data-jp-theme-light="false"] .attnlab-sheet { --attnlab-good: #3fb950; --attnlab-bad: #ff7b72;
  --attnlab-warn: #d29922; --attnlab-odd: #bc8cff }
</style>"""


def render_html(sheet: Sheet) -> str:
    """Return the sheet as one block of HTML, with a class for the sheet's kind."""
    head = f"<div><b>{escape(sheet.kind)}</b>&ensp;{_cell(sheet.head)}</div>"
    name = re.sub("[^a-z0-9]+", "-", sheet.kind.lower()).strip("-")
    return f'<div class="attnlab-sheet attnlab-{name}">{_STYLE}{head}{_parts(sheet.parts)}</div>'


def _parts(parts: Sequence[Part]) -> str:
    return "".join(_part(part) for part in parts)


def _part(part: Part) -> str:
    if isinstance(part, Facts):
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{_value(value)}</td></tr>" for name, value in part.rows
        )
        return f"<table><tbody>{rows}</tbody></table>"
    if isinstance(part, Grid):
        return _grid(part)
    if isinstance(part, Lines):
        return "".join(f"<div>{_cell(line)}</div>" for line in part.lines)
    if isinstance(part, Command):
        return f"<div>{escape(part.title)}</div><div>{_cell(Words(part.line, code=True))}</div>"
    return _folded(part.summary, _parts(part.parts))


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def _grid(grid: Grid) -> str:
    """Return a table; rows after the first ``most`` are folded, up to a limit."""
    title = f"<div>{escape(grid.title)}</div>" if grid.title else ""
    if len(grid.rows) <= grid.most + 2:  # a fold takes as much room as two rows
        return title + _table(grid.columns, grid.rows)
    rest = grid.rows[grid.most :]
    left = len(rest) - _MOST_FOLDED
    inner = _table(grid.columns, rest[:_MOST_FOLDED]) + (
        f"<div>… and {left} more</div>" if left > 0 else ""
    )
    return (
        title
        + _table(grid.columns, grid.rows[: grid.most])
        + _folded(f"{len(rest)} more rows", inner)
    )


def _table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    number = [all(isinstance(row[i], int) for row in rows) for i in range(len(columns))]
    classes = [' class="n"' if is_number else "" for is_number in number]
    head = "".join(
        f"<th{attrs}>{escape(name)}</th>" for name, attrs in zip(columns, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{attrs}>{_value(v)}</td>" for v, attrs in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value(value: Value) -> str:
    if isinstance(value, str | int | Words | Bar | Link | Hidden):
        return _cell(value)
    return "<br>".join(_cell(cell) for cell in value)


def _cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return _bar(cell)
    if isinstance(cell, Hidden):
        return _folded(cell.summary, "<br>".join(map(escape, cell.lines)))
    if isinstance(cell, Link):
        return f'<a href="{escape(quote(cell.path))}">{escape(cell.text)}</a>'
    if not isinstance(cell, Words):
        return escape(str(cell))
    attrs = ' class="c"' if cell.code else ""
    if cell.tone in _COLOUR:
        colour = f"var(--attnlab-{cell.tone}, {_COLOUR[cell.tone]})"
        attrs += f' style="color:{colour};font-weight:600"'
    elif cell.tone == "quiet":
        attrs += ' style="opacity:.75"'
    return f"<span{attrs}>{escape(cell.text)}</span>" if attrs else escape(cell.text)


def _bar(bar: Bar) -> str:
    """Return a bar as inline SVG; a part above 0 is at least one pixel wide."""
    scale = _BAR_WIDTH / max(1, bar.full)
    first = max(bar.first * scale, float(bar.first > 0))
    then = max(bar.then * scale, 2.0 * (bar.then > 0))
    rects = "".join(
        f'<rect x="{x:.1f}" y="1" width="{width:.1f}" height="10" fill="{colour}"></rect>'
        for x, width, colour in ((0, first, _FIRST), (first, then, _THEN))
        if width
    )
    return (
        f'<svg role="img" width="{_BAR_WIDTH + 4}" height="12">'
        f"<title>{escape(bar.label)}</title>{rects}</svg>"
    )


_TEXT_STYLE = {"good": "green", "bad": "red", "warn": "yellow", "odd": "magenta", "quiet": "dim"}
_TEXT_BAR_WIDTH = 24
_MOST_COMPLETE = 200  # rows
_NARROW = 80  # columns of the narrowest terminal for which words are kept whole
# The longest word, in characters, that a table keeps whole if it has room.
_WORD, _SHORT_WORD = 24, 9


def render_text(sheet: Sheet, *, complete: bool = False) -> RenderableType:
    """Return the sheet as something that rich prints, without its folded parts.

    ``complete``: print all rows of a table (up to 200) and not only those that a notebook shows at once.
    """
    head = Text(sheet.kind, "bold") + Text("  ") + _text_cell(sheet.head)
    return Group(head, *(text for part in sheet.parts for text in _text_part(part, complete)))


def _text_part(part: Part, complete: bool) -> list[RenderableType]:
    if isinstance(part, Facts):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in part.rows:
            table.add_row(f"  {name}", _text_value(value))
        return [table]
    if isinstance(part, Grid):
        return _text_grid(part, max(part.most, _MOST_COMPLETE) if complete else part.most)
    if isinstance(part, Lines):
        return [_text_cell(line) for line in part.lines]
    if isinstance(part, Command):  # a wrapped line could not be pasted into a shell
        line = Text(part.line, no_wrap=True, overflow="ignore")
        return [Text(f"# {part.title}", "dim"), line]
    return []


def _text_grid(grid: Grid, most: int) -> list[RenderableType]:
    """Return the title, the first ``most`` rows, and the number of rows that are omitted."""
    shown = grid.rows[:most]
    texts = [[_text_value(value) for value in row] for row in shown]
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


def _text_value(value: Value) -> Text:
    if isinstance(value, str | int | Words | Bar | Link | Hidden):
        return _text_cell(value)
    return Text("\n").join(_text_cell(cell) for cell in value if not isinstance(cell, Hidden))


def _text_cell(cell: Cell) -> Text:
    if isinstance(cell, Bar):
        return Text(_text_bar(cell))
    if isinstance(cell, Link):
        return Text(cell.text, f"link {cell.path}")
    if isinstance(cell, Hidden):
        return Text(cell.summary, "dim")
    if isinstance(cell, Words):
        return Text(cell.text, _TEXT_STYLE.get(cell.tone, ""))
    return Text(str(cell))


def _text_bar(bar: Bar) -> str:
    """Return a bar of characters; a part above 0 has at least one."""
    first, then = (
        max(round(part * _TEXT_BAR_WIDTH / max(1, bar.full)), int(part > 0))
        for part in (bar.first, bar.then)
    )
    return "░" * first + "█" * then
