"""Sheet: the content that is displayed for a noun, independent of HTML and of the terminal."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from attnlab.case.shown import Shown

Tone: TypeAlias = Literal["", "good", "bad", "warn", "odd", "quiet"]


@dataclass(frozen=True, slots=True)
class Words:
    """Text with a tone, which gives its colour; ``code`` selects a fixed-width font."""

    text: str
    tone: Tone = ""
    code: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of two parts, ``first`` and ``then``; ``full`` is its full length, ``label`` its alt text."""

    first: int
    then: int
    full: int
    label: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link to another notebook; ``path`` is relative to this one."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Hidden:
    """Lines inside a table cell that a notebook unfolds on a click; a terminal omits them."""

    summary: str
    lines: Sequence[str]


Cell: TypeAlias = "str | int | Words | Bar | Link | Hidden"
Value: TypeAlias = "Cell | Sequence[Cell]"  # a sequence has one line for each cell
Row: TypeAlias = "Sequence[Value]"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and their values."""

    rows: Sequence[tuple[str, Value]]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; columns of integers are right-aligned.

    ``most``: rows that are visible at once. HTML folds the rest, a notebook's text omits it, and a
    command prints it.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    most: int = 12


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, one per line."""

    lines: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to copy, on one line whatever its length; ``title`` states what it is for."""

    line: str
    title: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Parts that a notebook unfolds on a click; a terminal omits them."""

    summary: str
    parts: Sequence["Part"]


Part: TypeAlias = "Facts | Grid | Lines | Command | Folded"


@dataclass(frozen=True, slots=True, repr=False)
class Sheet(Shown):
    """The content that is displayed for a noun. A Sheet can be displayed itself.

    - ``kind``: the noun's name; ``head``: its most important fact, next to the name.
    - ``line``: the noun in one line of text, for repr and for lists.
    """

    kind: str
    line: str
    head: Cell
    parts: Sequence[Part] = ()

    @classmethod
    def of(
        cls,
        kind: str,
        head: Cell,
        *parts: "Part | None",
        tone: Tone = "",
        line: str = "",
        name: str = "",
    ) -> "Sheet":
        """Return a sheet without the parts that are None, and tables and lists without rows.

        ``tone``: of the head; ``line``: the noun in one line (default: the head), after its ``name``.
        """
        text = line or (head.text if isinstance(head, Words | Link) else str(head))
        return cls(
            kind=kind,
            line=f"<{name or kind}: {text}>",
            head=Words(head, tone) if isinstance(head, str) and tone else head,
            parts=[
                one for one in parts if one and getattr(one, "rows", getattr(one, "lines", True))
            ],
        )

    def noted(self, note: str) -> "Sheet":
        """Return the sheet with a note after its head."""
        head = self.head if isinstance(self.head, Words) else Words(str(self.head))
        return dataclasses.replace(
            self, head=dataclasses.replace(head, text=f"{head.text}; {note}")
        )
