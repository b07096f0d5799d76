"""RecordedOp: a function whose calls are recorded, and how its arguments are read."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.recorder.argument_names import (
    BoundArguments,
    Reading,
    missing,
    read_arguments,
    returned_output,
    take_tables,
)

Adjust = Callable[[dict[str, Any], Reading], None]
Bind = Callable[[tuple[Any, ...], dict[str, Any]], BoundArguments]


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
    - ``reads``: the names of further arguments that ``adjust`` reads, or that change no number. Others whose
      names are not known are kept with the call, and what may depend on them is not decided.
    """

    module: str
    function: str
    op: str | None = None
    layout: str | None = None
    adjust: Adjust = no_change
    writes_cache: bool = False
    reads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return "module.function"."""
        return f"{self.module}.{self.function}"

    def read(self, arguments: dict[str, Any]) -> Reading | None:
        """Return what the arguments hold, or None if they are no paged attention and no cache write."""
        reading = read_arguments(arguments, self.reads)
        self.adjust(arguments, reading)
        if reading.result is None and "output" not in reading.fields and not self.writes_cache:
            reading.result = returned_output
        if not self.writes_cache:
            take_tables(reading)
        is_other = missing(reading.fields, writes_cache=self.writes_cache)
        return None if is_other else reading


def binder(signature: inspect.Signature) -> Bind:
    """Return a function (args, kwargs) that returns a call's arguments by name, with defaults.

    It raises TypeError for arguments that there are no parameters for. ``inspect.Signature.bind`` takes many
    times as long; it is used for parameters like *args.
    """
    parameters = signature.parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(one.kind not in named for one in parameters):
        return functools.partial(_bound, signature)
    positional = [one.name for one in parameters if one.kind is named[0]]
    names = {one.name for one in parameters}
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        if len(args) > len(positional) or not names.issuperset(kwargs):
            raise TypeError(f"there is no parameter for each argument of {signature}")
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        return BoundArguments({**defaults, **given}, defaults)

    return bind


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> BoundArguments:
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    arguments, defaults = dict(found.arguments), dict[str, Any]()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            defaults[name] = ()
        elif parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return BoundArguments(arguments, defaults)


def op_of_text(text: str) -> RecordedOp:
    """Return the op "module:function"; its arguments are found by their names. Raises InvalidCase."""
    module, colon, function = text.partition(":")
    if not (colon and module and function.isidentifier()):
        raise InvalidCase(f"op must be MODULE:FUNCTION, got {text!r}", field="op")
    return RecordedOp(module=module, function=function)
