"""RecordedOp: a function whose calls are recorded, and how its arguments are read."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.recorder.argument_names import Reading, missing, read_arguments

Adjust = Callable[[dict[str, Any], Reading], None]


def no_change(arguments: dict[str, Any], reading: Reading) -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """A function whose calls are recorded.

    - ``module``, ``function``: where it is defined.
    - ``op``: the op of :data:`attnlab.case.ops.OPS` that describes its arguments; None chooses by the
      layout of the cache. ``layout``: that of its cache, None to find it by the shapes.
    - ``writes_cache``: the op writes a cache; otherwise it is an attention op.
    - ``adjust``: completes what :func:`attnlab.recorder.argument_names.read_arguments` found by the names of
      the arguments. It changes the Reading and computes nothing that waits for a GPU.
    """

    module: str
    function: str
    op: str | None = None
    layout: str | None = None
    adjust: Adjust = no_change
    writes_cache: bool = False

    @property
    def name(self) -> str:
        """Return "module.function"."""
        return f"{self.module}.{self.function}"

    def read(self, arguments: dict[str, Any]) -> Reading | None:
        """Return what the arguments hold, or None if they are no paged attention and no cache write."""
        reading = read_arguments(arguments)
        self.adjust(arguments, reading)
        is_other = missing(reading.fields, writes_cache=self.writes_cache)
        return None if is_other else reading


def bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by the parameters' names, with defaults; raise TypeError."""
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    arguments = dict(found.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    return arguments


def op_of_text(text: str) -> RecordedOp:
    """Return the op "module:function"; its arguments are found by their names. Raises InvalidCase."""
    module, colon, function = text.partition(":")
    if not (colon and module and function.isidentifier()):
        raise InvalidCase(f"op must be MODULE:FUNCTION, got {text!r}", field="op")
    return RecordedOp(module=module, function=function)
