"""Shown: the base class that lets a noun display itself in a notebook and in a terminal.

The sheets are in :mod:`attnlab.show.sheets`, above this folder. The package's ``__init__`` registers them
as the renderer, so nothing here imports upwards.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType


class Renderer(Protocol):
    """What displays a noun: as one line, as text for rich, as plain text, as HTML."""

    def line(self, noun: Any) -> str: ...
    def text(self, noun: Any) -> "RenderableType": ...
    def plain(self, noun: Any) -> str: ...
    def html(self, noun: Any) -> str: ...


_load: list[Callable[[], Renderer]] = []


def set_renderer(load: Callable[[], Renderer]) -> None:
    """Register the function that loads the renderer; it is called when a noun is first displayed."""
    _load[:] = [load]


def renderer() -> Renderer:
    """Return the registered renderer."""
    return _load[0]()


class Shown:
    """Show a noun: a table in a notebook, the same as text in a terminal, one line as its repr.

    IPython asks for ``_repr_html_`` and ``_repr_pretty_``, rich for ``__rich__``. A dataclass leaves
    ``__repr__`` to this with ``repr=False``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(renderer().line(self))

    def __rich__(self) -> "RenderableType":
        shown: RenderableType = renderer().text(self)
        return shown

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Give IPython the text, and the one line where the noun is part of something else."""
        alone = type(printer).__module__.startswith("IPython.") and len(printer.stack) == 1
        printer.text(renderer().plain(self) if alone else repr(self))

    def _repr_html_(self) -> str:
        return str(renderer().html(self))
