"""Shown: the base class of objects that display themselves in notebooks and terminals.

The renderer is :mod:`attnlab.show.sheets`, which this folder must not import. The package's ``__init__``
registers it here.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

# Of a line with the step of long work in a notebook, which is empty at the end; pages leave it out.
STEP_MIME = "application/vnd.attnlab.step+json"

if TYPE_CHECKING:
    from rich.console import RenderableType


class Renderer(Protocol):
    """Renders an object as one line, as text for rich, as plain text and as HTML."""

    def line(self, noun: Any) -> str: ...
    def text(self, noun: Any) -> "RenderableType": ...
    def plain(self, noun: Any) -> str: ...
    def html(self, noun: Any) -> str: ...


_load: list[Callable[[], Renderer]] = []


def set_renderer(load: Callable[[], Renderer]) -> None:
    """Register the function that loads the renderer; it is called when an object is displayed."""
    _load[:] = [load]


def renderer() -> Renderer:
    """Return the registered renderer."""
    return _load[0]()


class Shown:
    """Display an object: as a table in a notebook, as text in a terminal, as one line for repr.

    IPython calls ``_repr_html_`` and ``_repr_pretty_``, rich calls ``__rich__``. A dataclass that
    inherits from this class must set ``repr=False``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(renderer().line(self))

    def __rich__(self) -> "RenderableType":
        shown: RenderableType = renderer().text(self)
        return shown

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Give IPython the text, or one line if the object is inside another one."""
        alone = type(printer).__module__.startswith("IPython.") and len(printer.stack) == 1
        printer.text(renderer().plain(self) if alone else repr(self))

    def _repr_html_(self) -> str:
        return str(renderer().html(self))


# Numbers in JSON: strict JSON has neither NaN nor infinity.
#
# Every ``to_dict`` of the package writes NaN as "nan", and infinities as "inf" and "-inf"; ``float()``
# reads them back. null is reserved for a value that does not exist. So ``json.dumps(…, allow_nan=False)``
# works.


def json_number(value: float) -> float | str:
    """Return a number as strict JSON has it: itself if finite, else "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else str(float(value))


def json_value(value: Any) -> Any:
    """Return a value as strict JSON has it, at any depth of dicts, lists, tuples and dataclasses."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if dataclasses.is_dataclass(value):
        own = getattr(value, "to_dict", None)
        return json_fields(value) if own is None else own()
    return value


def json_fields(noun: Any, *more: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass by name as strict JSON has them, except those of ``without``.

    ``more``: further attributes; of a method, what it returns.
    """
    names = [one.name for one in dataclasses.fields(noun) if one.name not in without]
    found = {name: getattr(noun, name) for name in (*names, *more)}
    return {
        name: json_value(value() if inspect.ismethod(value) else value)
        for name, value in found.items()
    }


class Document:
    """A dataclass with a document of strict JSON: its fields, more attributes, and without some fields."""

    __slots__ = ()
    _more: ClassVar[tuple[str, ...]] = ()
    _without: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the object as values of strict JSON (:func:`json_fields`)."""
        return json_fields(self, *self._more, without=self._without)


class HostileReport(Shown):
    """What hostile cases found: ``results``, each with a ``status``, "match" if it is right."""

    __slots__ = ()
    results: tuple[Any, ...]
    _noun: ClassVar[str] = "cases"

    @property
    def findings(self) -> tuple[Any, ...]:
        """Return the results that are wrong, and those of ops that failed."""
        return tuple(one for one in self.results if one.status in ("mismatch", "failed"))

    @property
    def unavailable(self) -> tuple[Any, ...]:
        """Return the results of cases that could not run."""
        return tuple(one for one in self.results if one.status == "unavailable")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of strict JSON."""
        counts = {name: len(getattr(self, name)) for name in ("findings", "unavailable")}
        return {**json_fields(self), **counts, self._noun: len(self.results)}
