"""Faults that were written by hand, in the style of real ones, for `tools/real_faults.py --by-hand`.

docs/hand-faults.json has them. Each changes statements of a Triton kernel that no single rule of
tools/source_mutation.py changes: a lost statement, two expressions, an expression in all loops, another
order. A change names a statement or an expression as `ast.unparse` prints it, and replaces all of them in a
function.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NoPlace(ValueError):
    """Raised if a source lacks what a fault changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandFault:
    """A fault of an op: ``changes`` of its ``functions``, each the text before and after."""

    name: str
    op: str
    functions: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "HandFault":
        """Return the fault of a JSON object with the fields of the class."""
        changes = tuple((before, after) for before, after in fields["changes"])
        return cls(
            name=fields["name"],
            op=fields["op"],
            functions=tuple(fields["functions"]),
            changes=changes,
        )

    def places(self, text: str) -> list[tuple[ast.stmt | ast.expr, str]]:
        """Return what is changed in a source, with its replacement; raise NoPlace if a change has none."""
        kernels = [
            one
            for one in ast.walk(ast.parse(text))
            if isinstance(one, ast.FunctionDef) and one.name in self.functions
        ]
        found = []
        for before, after in self.changes:
            nodes = [node for kernel in kernels for node in _equal(kernel, before)]
            if not nodes:
                raise NoPlace(f"{self.name}: no {before!r}")
            found += [(node, after) for node in nodes]
        return found

    def lines(self, text: str) -> list[int]:
        """Return the first line of each change; the changed source has the same lines."""
        return [node.lineno for node, _ in self.places(text)]

    def apply(self, text: str) -> str:
        """Return the source with the fault, with as many lines as before."""
        starts = [0]
        for row in text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(row))
        data = text.encode()
        places = sorted(self.places(text), key=lambda one: (one[0].lineno, one[0].col_offset))
        for node, after in reversed(places):
            last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
            start, end = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column
            first = data[starts[node.lineno - 1] : start].decode()
            # A row without the indentation would end a kernel inside an if: textwrap.dedent keeps all of it.
            margin = first[: len(first) - len(first.lstrip())]
            rows = f"\n{margin}" * (last - node.lineno)
            new = f"({after}{rows})" if isinstance(node, ast.expr) else f"{after}{rows}"
            data = data[:start] + new.encode() + data[end:]
        return data.decode()


def read_faults(path: Path) -> tuple[HandFault, ...]:
    """Return the faults of a JSON file: a list of objects with the fields of HandFault."""
    return tuple(HandFault.from_dict(fields) for fields in json.loads(path.read_text()))


def _equal(kernel: ast.FunctionDef, before: str) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements or expressions of a kernel that print as a text; those that are read.

    A bare call is a statement and an expression with the same text: the statement alone is yielded.
    """
    done = set[ast.AST]()
    for node in ast.walk(kernel):  # a statement comes before its expression
        if not isinstance(node, ast.stmt | ast.expr) or ast.unparse(node) != before:
            continue
        if isinstance(node, ast.Expr):
            done.add(node.value)
        if node not in done and not isinstance(getattr(node, "ctx", None), ast.Store):
            yield node


HAND_FAULTS = read_faults(Path(__file__).parents[1] / "docs" / "hand-faults.json")
