"""How the lab's nouns look: as HTML in a notebook, as text in a terminal, as one line.

Each noun becomes a :class:`~attnlab.display.sheet.Sheet`, and a sheet is written either way, so that both
hold the same facts.
"""

from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING

from attnlab.display.sheet import Sheet
from attnlab.shown import SHEETS, Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 110  # of text where no terminal says how wide it is


def sheet_of(noun: Shown) -> Sheet:
    """Return a noun's sheet; raise TypeError for one that has none."""
    for kind in type(noun).__mro__:
        if place := SHEETS.get(f"{kind.__module__}.{kind.__qualname__}"):
            module, _, name = place.partition(".")
            sheet: Sheet = getattr(import_module(f"attnlab.display.{module}"), name)(noun)
            return sheet
    raise TypeError(f"{type(noun).__name__} must be named in attnlab.shown.SHEETS")


def line(noun: Shown) -> str:
    """Return a noun in one line: its repr."""
    return sheet_of(noun).line


def text(noun: Shown) -> "RenderableType":
    """Return a noun as rich prints it."""
    from attnlab.display.as_text import render

    return render(sheet_of(noun))


def plain(noun: Shown) -> str:
    """Return a noun as text without colours."""
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, force_jupyter=False)
    console.print(text(noun))
    return "\n".join(row.rstrip() for row in out.getvalue().rstrip().splitlines())


def html(noun: Shown) -> str:
    """Return a noun as a piece of HTML that needs nothing from anywhere."""
    from attnlab.display.as_html import render

    return render(sheet_of(noun))
