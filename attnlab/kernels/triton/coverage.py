"""Coverage: which statements ran in interpreted kernels and in the functions that launch them, and which
outcomes their branches had.

The syntax tree of a function gets a call before each statement and around each condition. So an outcome of
a conditional expression, and a loop without an iteration, are visible; coverage.py records lines, and sees
neither. A kernel that is not measured runs as before.

A point is a statement, as "LINE", or an outcome of a branch, as "LINE.N+" or "LINE.N-": the N-th condition
of the line was true or false, or the N-th loop had an iteration or none. A chain of comparisons is one
condition; the operands of ``and`` and ``or`` are not counted apart.
"""

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.kernel_text import FOR_MARK, IF_MARK, RAN_MARK, compile_tree, text_of

Points = set[str]
_KINDS = {ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.For: "for"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch of a function.

    - ``line``: of its condition or loop; ``text``: the condition, or what the loop runs over.
    - ``kind``: "if", "while" or "for".
    - ``then``, ``otherwise``: first and last line of the block of each outcome; (0, 0) if there is none.
    """

    line: int
    kind: str
    text: str
    then: tuple[int, int]
    otherwise: tuple[int, int]


class Marker(ast.NodeTransformer):
    """Adds marks to functions. It keeps what it marked.

    - ``statements``: the lines of statements. ``branches``: by name, "LINE.N".
    - ``offset``: what is added to a line of the tree for the line of the file.
    """

    def __init__(self, offset: int = 0) -> None:
        self.statements: set[int] = set()
        self.branches: dict[str, Branch] = {}
        self._offset = offset
        self._on_line = Counter[int]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._marked(node.body)
        return node

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> ast.AST:
        name = self._named(node, node.test)
        self.generic_visit(node)
        node.test = _call(IF_MARK, name, node.test)
        return node

    visit_IfExp = visit_While = visit_If

    def visit_For(self, node: ast.For) -> ast.AST:
        name = self._named(node, node.iter)
        self.generic_visit(node)
        node.iter = _call(FOR_MARK, name, node.iter)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, self._marked(value))
            elif isinstance(value, list):
                setattr(node, name, [_visited(self, one) for one in value])
            else:
                setattr(node, name, _visited(self, value))
        return node

    def _named(self, node: ast.If | ast.IfExp | ast.While | ast.For, condition: ast.expr) -> str:
        """Return the name of a branch, and keep it."""
        line = condition.lineno + self._offset
        name = f"{line}.{self._on_line[line]}"
        self._on_line[line] += 1
        self.branches[name] = Branch(
            line=line,
            kind=_KINDS[type(node)],
            text=ast.unparse(condition),
            then=self._block(node.body),
            otherwise=self._block(node.orelse),
        )
        return name

    def _block(self, block: list[ast.stmt] | ast.expr) -> tuple[int, int]:
        if not isinstance(block, list) or not block:
            return 0, 0
        last = block[-1].end_lineno or block[-1].lineno
        return block[0].lineno + self._offset, last + self._offset

    def _marked(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Return a block with a mark before each statement that is not a text."""
        found: list[ast.stmt] = []
        for statement in block:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                line = statement.lineno + self._offset
                self.statements.add(line)
                mark = ast.Expr(_call(RAN_MARK, str(line)))
                found.append(ast.copy_location(mark, statement))
            found.append(self.visit(statement))
        return found


def _visited(marker: Marker, value: Any) -> Any:
    return marker.visit(value) if isinstance(value, ast.AST) else value


def _call(function: str, point: str, *rest: ast.expr) -> ast.Call:
    arguments = [ast.Constant(point), *rest]
    return ast.Call(func=ast.Name(function, ast.Load()), args=arguments, keywords=[])


def mark_functions(tree: ast.Module) -> None:
    """Add marks to the functions at the top level of a module. Mutates the tree."""
    marker = Marker()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            marker.visit(node)
    ast.fix_missing_locations(tree)


_SEEN: dict[str, Points] = {}  # by file; cleared by each measurement, never replaced
_MEASURING: ContextVar[bool] = ContextVar("measuring", default=False)
_FACTS: dict[str, set[str]] = {}  # by parameter of the op
_MARKED: dict[Any, Any] = {}  # the marked form of a kernel's function


def marks(file: str) -> dict[str, Any]:
    """Return the globals that marked functions of a file need."""
    seen = _SEEN.setdefault(file, set())

    def branch(name: str, value: Any) -> bool:
        outcome = bool(value)
        seen.add(f"{name}{'+' if outcome else '-'}")
        return outcome

    def loop(name: str, items: Iterable[Any]) -> Iterator[Any]:
        entered = False
        for one in items:
            if not entered:
                entered = True
                seen.add(f"{name}+")
            yield one
        if not entered:
            seen.add(f"{name}-")

    return {RAN_MARK: seen.add, IF_MARK: branch, FOR_MARK: loop}


def marked_kernel(function: Any) -> Callable[..., Any]:
    """Return the interpreted form of a function of Triton with marks."""
    if function.fn not in _MARKED:
        _MARKED[function.fn] = compile_tree(function, marked_tree(function))
    found: Callable[..., Any] = _MARKED[function.fn]
    return found


def marked_tree(function: Any) -> ast.Module:
    """Return the syntax tree of a function of Triton with marks; its module gets what they need."""
    tree = ast.parse(text_of(function))
    rewriter = function.rewriter
    Marker(rewriter.def_file_lineno - 1).visit(tree.body[0])
    function.fn.__globals__.update(marks(rewriter.filename))
    return tree


def is_measuring() -> bool:
    """Answer whether this is inside a :func:`measuring` block."""
    return _MEASURING.get()


def note_arguments(facts: Mapping[str, Iterable[str]]) -> None:
    """Add facts about an op's arguments, by parameter; nothing outside a :func:`measuring` block."""
    if _MEASURING.get():
        for name, several in facts.items():
            _FACTS.setdefault(name, set()).update(several)


@dataclass(slots=True)
class Measured:
    """What was measured in a block: ``points`` by file, and facts about ``arguments`` by parameter."""

    points: dict[str, Points] = field(default_factory=dict)
    arguments: dict[str, set[str]] = field(default_factory=dict)


@contextmanager
def measuring() -> Iterator[Measured]:
    """Measure inside the block. What it yields is filled at its end."""
    for seen in _SEEN.values():
        seen.clear()
    _FACTS.clear()
    found = Measured()
    try:
        with setting(_MEASURING, True):
            yield found
    finally:
        found.points |= {file: set(seen) for file, seen in _SEEN.items() if seen}
        found.arguments |= _FACTS
