"""Pytest ids of a test file, from its decorators: the file is parsed, not imported."""

import ast
import itertools
from collections.abc import Iterator
from typing import Any


class Opaque:
    """A value that pytest writes as the parameter's name and its place in the list."""


def ids(source: str) -> dict[str, list[str]]:
    """Return the ids of each parametrised test function that a source text defines, by its name.

    A conditional expression counts with each of its values. Devices are cuda:0.
    """
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            lists = [
                words
                for decorator in reversed(node.decorator_list)
                if (words := _words(decorator, constants)) is not None
            ]
            if lists:
                found[node.name] = [
                    f"{node.name}[{'-'.join(words)}]" for words in itertools.product(*lists)
                ]
    return found


def _words(decorator: ast.expr, constants: dict[str, ast.expr]) -> list[str] | None:
    """Return the texts of the values of one parametrize decorator; None for another decorator."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith(
        ".parametrize"
    ):
        return None
    names = ast.literal_eval(decorator.args[0])
    names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    found = []
    for i, value in enumerate(_elements(decorator.args[1], constants)):
        if isinstance(value, ast.Starred):  # its ids are not known without running it
            found.append(names[0])
            continue
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.param":
            named = [k.value for k in value.keywords if k.arg == "id"]
            found.append(str(_text(named[0], "", i, constants)) if named else names[0])
            continue
        parts = value.elts if len(names) > 1 else [value]
        found.append("-".join(_text(p, n, i, constants) for n, p in zip(names, parts, strict=True)))
    return found


def _elements(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """Yield the elements of a list expression."""
    if isinstance(node, ast.Name):
        yield from _elements(constants[node.id], constants)
    elif isinstance(node, ast.IfExp):
        longest = max(
            (list(_elements(part, constants)) for part in (node.body, node.orelse)), key=len
        )
        yield from longest
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _elements(node.left, constants)
        yield from _elements(node.right, constants)
    elif isinstance(node, ast.ListComp) and "cuda" in ast.unparse(node):
        yield ast.Constant("cuda:0")
    elif isinstance(node, ast.List | ast.Tuple):
        yield from node.elts
    else:
        raise AssertionError(f"a list of unknown form: {ast.unparse(node)}")


def _text(node: ast.expr, name: str, place: int, constants: dict[str, ast.expr]) -> str:
    """Return pytest's text of a value."""
    value = _value(node, constants)
    return f"{name}{place}" if isinstance(value, Opaque) else str(value)


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Constant) and not isinstance(node.value, bytes):
        return node.value
    if isinstance(node, ast.Name) and node.id not in constants:
        return node.id  # a function: pytest writes its name
    return Opaque()
