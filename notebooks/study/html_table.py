"""A table of a notebook: HTML on a page, aligned text in a terminal."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Table:
    """Show rows under column names; a number is shown with three significant digits."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        sides = ["right" if self._has_numbers(i) else "left" for i in range(len(self.columns))]
        head = _cells("th", self.columns, sides)
        body = "".join(f"<tr>{_cells('td', row, sides)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _has_numbers(self, column: int) -> bool:
        """Answer whether a column has only numbers, which are aligned at their end."""
        return bool(self.rows) and all(_NUMBER.fullmatch(row[column]) for row in self.rows)


_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?%)?|none|nan|inf|")


def _cells(tag: str, texts: Sequence[str], sides: Sequence[str]) -> str:
    """Return cells of a row. The style is needed because JupyterLab aligns all text at the right."""
    return "".join(
        f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'
        for text, side in zip(texts, sides, strict=True)
    )


def table(*columns: str, rows: Iterable[Sequence[object]]) -> Table:
    """Return a Table of the rows, one value for each column.

    Raises ValueError if a row has another length than ``columns``.
    """
    texts = tuple(tuple(map(_text, row)) for row in rows)
    for row in texts:
        if len(row) != len(columns):
            raise ValueError(f"rows must have {len(columns)} values each, got {len(row)}: {row}")
    return Table(columns, texts)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value is None else str(value)
