"""Sheet: what is to be shown of a noun, before it is HTML or text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Tone: TypeAlias = Literal["", "good", "bad", "warn", "odd", "quiet"]


@dataclass(frozen=True, slots=True)
class Words:
    """Some text, and what to think of it; ``code`` is set in a fixed width."""

    text: str
    tone: Tone = ""
    code: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of two parts, ``first`` and ``then``, where a full one is ``full``; ``label`` says it."""

    first: int
    then: int
    full: int
    label: str


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another notebook, by its path from this one."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Hidden:
    """Lines that a notebook opens on a click, inside a table, and a terminal leaves out."""

    summary: str
    lines: Sequence[str]


Cell: TypeAlias = "str | int | Words | Bar | Link | Hidden"
Value: TypeAlias = "Cell | Sequence[Cell]"  # several are a line each
Row: TypeAlias = "Sequence[Value]"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are."""

    rows: Sequence[tuple[str, Value]]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. Integers are set to the right. Behind ``most`` rows it is folded, in text cut."""

    columns: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    most: int = 12


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, one below the other."""

    lines: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Folded:
    """Parts that a notebook opens on a click and a terminal leaves out."""

    summary: str
    parts: Sequence["Part"]


Part: TypeAlias = "Facts | Grid | Lines | Folded"


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is to be shown of a noun.

    - ``kind``: the noun's name; ``head``: the most important thing about it, beside the name.
    - ``line``: the noun in one line of text, for repr and for lists.
    """

    kind: str
    line: str
    head: Cell
    parts: Sequence[Part] = ()
