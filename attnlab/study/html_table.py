"""A table of a notebook: HTML on a page, aligned text in a terminal."""

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
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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
