"""The functions that an op of vLLM can run: itself, the kernels that it launches, and what these call.

They are found in the source, without running it. A function that is imported inside another function belongs
to a further op, such as INT4 attention, and is not followed.
"""

import ast
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnlab.case.errors import Unsupported
from attnlab.case.ops import OPS
from attnlab.kernels.triton.coverage import Branch, Marker
from attnlab.kernels.vllm.source import OPS_FOLDERS, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function at the top level of a file, with the points that can run.

    - ``statements``: lines; ``branches``: by name (:mod:`attnlab.kernels.triton.coverage`).
    - ``parameters``: the names of its parameters. ``is_kernel``: Triton compiles it.
    - ``text``: the lines from ``line`` to ``last_line``.
    """

    file: Path
    name: str
    line: int
    last_line: int
    statements: frozenset[int]
    branches: dict[str, Branch]
    parameters: tuple[str, ...]
    is_kernel: bool
    text: tuple[str, ...]

    def to_dict(self, root: Path) -> dict[str, Any]:
        """Return the fields as JSON-able values, with the file relative to ``root``."""
        file = self.file.relative_to(root) if self.file.is_relative_to(root) else self.file
        statements = sorted(self.statements)
        return {**dataclasses.asdict(self), "file": file.as_posix(), "statements": statements}

    @classmethod
    def of_dict(cls, fields: Mapping[str, Any]) -> "Function":
        """Return the function of what :meth:`to_dict` returned."""
        branches = {
            name: Branch(
                **{**one, "then": tuple(one["then"]), "otherwise": tuple(one["otherwise"])}
            )
            for name, one in fields["branches"].items()
        }
        return cls(
            **{
                **fields,
                "file": Path(fields["file"]),
                "statements": frozenset(fields["statements"]),
                "branches": branches,
                "parameters": tuple(fields["parameters"]),
                "text": tuple(fields["text"]),
            }
        )


def op_functions(source: Source, op: str) -> list[Function]:
    """Return the functions of an op, by file and line; none if the release does not have it."""
    found = [
        _function(file, module, node)
        for file, module, node in _reached(source, OPS[op].module, OPS[op].function)
    ]
    return sorted(found, key=lambda one: (one.file, one.line))


def reached(source: Source, module: str, function: str) -> list[ast.FunctionDef]:
    """Return a function of a module of ops, then those that it runs; none if the release does not have it.

    Nothing in the result may be changed.
    """
    return [node for _, _, node in _reached(source, module, function)]


def _reached(
    source: Source, module_name: str, function: str
) -> list[tuple[Path, "_Module", ast.FunctionDef]]:
    """Return what :func:`reached` returns, each with its file and module."""
    try:
        file = source.op_file(module_name)
    except Unsupported:
        return []
    found: dict[tuple[Path, str], tuple[Path, _Module, ast.FunctionDef]] = {}
    waiting = [(file, function)]
    while waiting:
        file, name = waiting.pop()
        module = _read(file, file.stat().st_mtime_ns)
        if (file, name) in found or name not in module.functions:
            continue
        node = module.functions[name]
        found[file, name] = (file, module, node)
        for used in _names(node):
            where, original = module.imports.get(used, (file.stem, used))
            if (other := file.with_name(f"{where}.py")).is_file():
                waiting.append((other, original))
    return list(found.values())


def file_kernels(file: Path) -> list[Function]:
    """Return the kernels of a user's file, by line."""
    module = _read(file, file.stat().st_mtime_ns)
    every = (_function(file, module, node) for node in module.functions.values())
    return [one for one in every if one.is_kernel]


@dataclass(frozen=True, slots=True)
class _Module:
    """The functions of a module, what it imports from modules of its folder as (module, name), and its
    lines."""

    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str]]
    text: tuple[str, ...]


@lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> _Module:
    """Return a module; ``changed``, the time of its last change, keeps the cache correct."""
    source = file.read_text(encoding="utf-8")
    body = ast.parse(source).body
    return _Module(
        {node.name: node for node in body if isinstance(node, ast.FunctionDef)},
        dict(_imports(node for node in body if isinstance(node, ast.ImportFrom))),
        tuple(source.splitlines()),
    )


def _imports(nodes: Iterable[ast.ImportFrom]) -> Iterator[tuple[str, tuple[str, str]]]:
    folders = {folder.replace("/", ".") for folder in OPS_FOLDERS}
    for node in nodes:
        package, _, leaf = (node.module or "").rpartition(".")
        if node.level == 1 or package in folders:
            yield from ((one.asname or one.name, (leaf, one.name)) for one in node.names)


def _names(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def _function(file: Path, module: _Module, node: ast.FunctionDef) -> Function:
    """Return a function with its points."""
    marker = Marker()
    marker.visit(copy.deepcopy(node))  # it changes the tree
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return Function(
        file=file,
        name=node.name,
        line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        statements=frozenset(marker.statements),
        branches=marker.branches,
        parameters=tuple(one.arg for one in every),
        is_kernel=any("jit" in ast.unparse(one) for one in node.decorator_list),
        text=module.text[node.lineno - 1 : node.end_lineno],
    )
