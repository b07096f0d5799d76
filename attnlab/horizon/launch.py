"""The description of a launch: arguments, grid and programs of a kernel, as expressions of named sizes.

A description is a table of TOML, for example::

    [copy_rows]
    sizes = { rows = 1000, width = 4096 }
    grid = ["rows"]
    arguments = { x = "float16[rows, width]", index = "int32[rows] = i", stride = "x.stride(0)" }

A tensor is ``DTYPE[SHAPE]``, then ``strides [STRIDES]`` if it is not contiguous, then ``= VALUES`` if it
holds integers that the kernel uses; there, ``i`` is the offset of an element.
"""

import ast
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.case.errors import InvalidCase
from attnlab.horizon.machine import _BITS, Tensor

_TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\s*strides\s*\[(?P<strides>[^\]]*)\])?(?:\s*=\s*(?P<values>.*))?$"
)
_KEYS = {
    "kernel",
    "file",
    "sizes",
    "grid",
    "arguments",
    "tail",
    "most",
    "sweep",
    "like",
    "needs",
    "within",
}
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.Attribute,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.expr_context,
    ast.List,
    ast.Tuple,
)
GRID = (
    LAST_X := (1 << 31) - 1,
    65535,
    65535,
)  # CUDA C++ Programming Guide, technical specifications


def _cdiv(a: Any, b: Any) -> Any:
    return -(-a // b)


_FUNCTIONS: dict[str, Any] = {
    "cdiv": _cdiv,
    "where": np.where,
    "min": min,
    "max": max,
    "minimum": np.minimum,
    "power_of_2": lambda n: 1 << max(0, int(n) - 1).bit_length(),
}


@functools.cache
def _compiled(text: str) -> Any:
    """Return the code of an expression. Raises InvalidCase for anything but arithmetic."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise InvalidCase(f"expression must be arithmetic, got {text!r}", field="launch") from error
    for node in ast.walk(tree):
        is_method = isinstance(node, ast.Attribute) and node.attr not in ("stride", "numel")
        if not isinstance(node, _NODES) or is_method:
            raise InvalidCase(f"expression must be arithmetic, got {text!r}", field="launch")
    return compile(tree, "<launch>", "eval")


class _Shown:
    """A tensor as expressions see it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def stride(self, dim: int) -> int:
        return self._tensor.strides[dim]

    def numel(self) -> int:
        return int(np.prod([int(n) for n in self._tensor.shape], dtype=object))


def evaluate(text: Any, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or of anything that is not text, itself."""
    if not isinstance(text, str):
        return text
    try:
        return eval(_compiled(text), {"__builtins__": {}, **_FUNCTIONS}, dict(names))
    except (NameError, TypeError, ZeroDivisionError, IndexError) as error:
        raise InvalidCase(
            f"expression {text!r} of a launch is wrong: {error}", field="launch"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The description of a launch of ``kernel``.

    - ``file``: the end of the path of its file, "" for any; ``sizes``: the named sizes with their values.
    - ``sweep``: the sizes whose horizon is asked for; ``most``: the largest value of some sizes.
    - ``needs``: a condition on the sizes, "" for none; ``within``: what is at most a limit of a deployment.
    - ``tail``: how many programs run at the end of each axis of the grid.
    - ``is_assumed``: whether attnlab guessed it from the kernel's text.
    """

    kernel: str
    file: str = ""
    sizes: Mapping[str, int]
    grid: tuple[Any, ...]
    arguments: Mapping[str, Any]
    sweep: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    tail: tuple[int, ...] = (1, 1, 1)
    needs: str = ""
    within: Mapping[str, str] = field(default_factory=dict)
    is_assumed: bool = False

    def suits(self, path: str, kernel: str) -> bool:
        """Answer whether the description is one of a kernel in a file."""
        return kernel == self.kernel and f"/{path}".endswith(f"/{self.file}" if self.file else path)

    def at(self, sizes: Mapping[str, int]) -> "Launch":
        """Return the launch with other values of the sizes that it has.

        Raises InvalidCase if they do not meet its condition.
        """
        found = {name: sizes.get(name, value) for name, value in self.sizes.items()}
        if self.needs and not evaluate(self.needs, found):
            got = ", ".join(f"{n} {v}" for n, v in found.items() if n in self.needs)
            raise InvalidCase(
                f"deployment must fit {self.kernel}, which needs {self.needs}, got {got}",
                field="deployment",
            )
        return replace(self, sizes=found)

    def bind(self, sizes: Mapping[str, int]) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return arguments and grid for values of the sizes; None if a GPU has no such grid."""
        names: dict[str, Any] = dict(sizes)
        found: dict[str, Any] = {}
        for name, text in self.arguments.items():
            found[name] = self._argument(name, text, names)
            names[name] = _Shown(found[name]) if isinstance(found[name], Tensor) else found[name]
        grid = tuple(max(1, int(evaluate(one, names))) for one in self.grid)
        return None if any(n > m for n, m in zip(grid, GRID, strict=False)) else (found, grid)

    def _argument(self, name: str, text: Any, names: Mapping[str, Any]) -> Any:
        if isinstance(text, list):
            return tuple(self._argument(f"{name}[{i}]", one, names) for i, one in enumerate(text))
        match = _TENSOR.match(text) if isinstance(text, str) else None
        if match is None or match["dtype"] not in _BITS:
            if text == "none":
                return None
            if isinstance(text, str) and text.startswith("'"):
                return text.strip("'")
            if isinstance(text, str) and text.startswith("tl."):
                import triton.language as tl

                return getattr(tl, text[3:])
            return evaluate(text, names)
        shape = tuple(int(n) for n in evaluate(f"[{match['shape']}]", names))
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(1, shape[i + 1])
        if match["strides"]:
            strides = [int(n) for n in evaluate(f"[{match['strides']}]", names)]
        values = None
        if match["values"]:
            values = functools.partial(_values, match["values"], dict(names))
        return Tensor(
            name=name, dtype=match["dtype"], shape=shape, strides=tuple(strides), values=values
        )


def _values(text: str, names: Mapping[str, Any], index: Any) -> Any:
    return evaluate(text, {**names, "i": index})


def programs(grid: tuple[int, ...], tail: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the last programs of a grid, ``tail`` of them on each axis."""
    axes = [
        [n - 1 - i for i in range(min(n, k))]
        for n, k in zip((*grid, 1, 1), (*tail, 1, 1), strict=False)
    ]
    return [(x, y, z) for x in axes[0] for y in axes[1] for z in axes[2]]


def read_launches(path: Path) -> dict[str, Launch]:
    """Return the descriptions in a TOML file by name. Raises InvalidCase, in one line, for a wrong one."""
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidCase(
            f"launch must be a TOML file, got {path}: {error}", field="launch"
        ) from error
    return {name: _launch(name, tables, path) for name in tables}


def _launch(name: str, tables: Mapping[str, Any], path: Path) -> Launch:
    """Return the description ``name``; one that is ``like`` another states only what differs."""
    table = tables[name]
    if isinstance(table, dict) and "like" in table:
        base = tables.get(table["like"])
        if not isinstance(base, dict):
            raise InvalidCase(
                f"like of launch {name} must name a launch, got {table['like']!r}", field="launch"
            )
        arguments = {**base.get("arguments", {}), **table.get("arguments", {})}
        table = {**base, **table, "arguments": arguments}
    if not isinstance(table, dict) or not {"grid", "arguments"} <= set(table):
        raise InvalidCase(f"launch {name} must have grid and arguments, got {path}", field="launch")
    if unknown := set(table) - _KEYS:
        raise InvalidCase(
            f"launch {name} must have only {sorted(_KEYS)}, got {sorted(unknown)}", field="launch"
        )
    sizes = dict(table.get("sizes", {}))
    bad = [n for n, v in sizes.items() if type(v) is not int or v < 1]
    if bad:
        raise InvalidCase(
            f"size {bad[0]} of launch {name} must be a positive int, got {sizes[bad[0]]!r}",
            field="launch",
        )
    return Launch(
        kernel=table.get("kernel", name),
        file=table.get("file", ""),
        sizes=sizes,
        grid=tuple(table["grid"]),
        arguments=table["arguments"],
        sweep=tuple(table.get("sweep", sizes)),
        most=table.get("most", {}),
        tail=tuple(table.get("tail", (1, 1, 1))),
        needs=table.get("needs", ""),
        within=table.get("within", {}),
    )
