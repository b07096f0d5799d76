"""Text of a kernel: the source of its function from ``def`` on, without common indentation.

Lines of a text count from 1. The interpreted form of a function can be compiled from a changed text.
"""

import ast
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

_VARIANT = "_attnlab_variant"  # parameter of a compiled function
_HEADS = ("value", "test", "iter")  # expressions of a statement that can be changed
_MOST_BRANCHES = 40  # variants of a function; more are more functions

Observer = Callable[..., Any]
Change = tuple[int, int, str]  # first byte, the byte after the last, and the new text


def called_functions(function: Any) -> list[Any]:
    """Return a function of Triton and the device functions that it calls, each once."""
    todo, found = [function], list[Any]()
    while todo:
        one = todo.pop()
        if any(one.fn is other.fn for other in found):
            continue
        found.append(one)
        others = (one.fn.__globals__.get(name) for name in one.fn.__code__.co_names)
        own = (type(one).of(other) for other in others if hasattr(other, "rewriter"))
        todo += [other for other in own if type(other) is type(one)]
    return found


def text_of(function: Any) -> str:
    """Return the text of a function of Triton."""
    rewriter = function.rewriter
    if not rewriter.filename:
        rewriter.rewrite_ast()  # finds the line of the ``def``
    found: str = rewriter._prepare_source(inspect.getsourcelines(function.fn)[0])
    return found


def place_of(function: Any) -> tuple[str, int]:
    """Return the file and the first line of a function of Triton, the same in each module of the file."""
    code = function.fn.__code__
    return code.co_filename, code.co_firstlineno


def compile_text(function: Any, text: str) -> Any:
    """Return the interpreted form of a function of Triton with another text.

    Raises SyntaxError for a text that is no Python.
    """
    return compile_tree(function, ast.parse(text))


def compile_tree(function: Any, tree: ast.Module) -> Any:
    """Return the interpreted form of a function of Triton with another syntax tree; mutates the tree."""
    rewriter = function.rewriter
    tree = rewriter.ast_transformer.visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, rewriter.def_file_lineno - 1)
    return rewriter._compile_and_exec(tree)


class KernelTree:
    """The syntax tree of a kernel's text as the interpreter runs it, to compile with one statement changed.

    All variants of a statement are compiled at once, as branches of one expression; a parameter of the
    function selects one. This takes a small part of the time of one compilation per variant.
    """

    def __init__(self, function: Any, text: str) -> None:
        self._function, self._text = function, text
        self._rows = [0]
        for row in text.encode().splitlines(keepends=True):
            self._rows.append(self._rows[-1] + len(row))
        self._plain = list(statements(function_of(text).body))
        tree = ast.parse(text)
        self._tree = function.rewriter.ast_transformer.visit(tree)
        arguments = self._tree.body[0].args
        arguments.kwonlyargs.append(ast.arg(arg=_VARIANT))
        arguments.kw_defaults.append(ast.Constant(value=0))
        self._places = list(_places(self._tree.body[0].body))
        ast.fix_missing_locations(self._tree)
        ast.increment_lineno(self._tree, function.rewriter.def_file_lineno - 1)

    def variants(self, line: int, changes: Sequence[Change]) -> list[Any]:
        """Return the interpreted form with each of some changes of the statement at a line of the text.

        A change of what is no single expression of the statement, or a text that is no Python, gives None.
        """
        at = next(i for i, one in enumerate(self._plain) if one.lineno == line)
        heads = {
            name: root
            for name in _HEADS
            if isinstance(root := getattr(self._plain[at], name, None), ast.expr)
        }
        found: list[Any] = [None] * len(changes)
        for name, root in heads.items():
            begin, end = self._range(root)
            chosen = [
                (number, parsed)
                for number, change in enumerate(changes)
                if begin <= change[0] <= change[1] <= end
                and (parsed := self._parsed(begin, end, change)) is not None
            ]
            for first in range(0, len(chosen), _MOST_BRANCHES):
                self._compile(at, name, root, chosen[first : first + _MOST_BRANCHES], found)
        return found

    def _range(self, node: ast.expr) -> tuple[int, int]:
        """Return the first byte of an expression in the text and that after it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = self._rows[node.lineno - 1], self._rows[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def _parsed(self, begin: int, end: int, change: Change) -> ast.expr | None:
        data, (start, stop, after) = self._text.encode(), change
        whole = data[begin:start] + after.encode() + data[stop:end]
        try:
            return ast.parse(b"(" + whole + b")", mode="eval").body
        except SyntaxError:
            return None

    def _compile(
        self,
        at: int,
        name: str,
        root: ast.expr,
        chosen: Sequence[tuple[int, ast.expr]],
        found: list[Any],
    ) -> None:
        """Compile some variants of an expression together, and put the function of each into ``found``."""
        branches = copy.deepcopy(root)
        for number, parsed in reversed(chosen):
            test = ast.Compare(
                left=ast.Name(id=_VARIANT, ctx=ast.Load()),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=number)],
            )
            branches = ast.IfExp(test=test, body=parsed, orelse=branches)
        compiled = self._with_head(at, name, branches)
        for number, _ in chosen if compiled is not None else ():
            found[number] = _selected(compiled, number)

    def observed(self, line: int, changes: Sequence[Change], observer: Observer) -> Any:
        """Return the interpreted form that calls an observer for the value that a statement assigns or tests.

        The observer gets a function that computes the value, and one for each change; it returns the value.
        Returns None for a statement without such a value.
        """
        at = next(i for i, one in enumerate(self._plain) if one.lineno == line)
        one = self._plain[at]
        name = "test" if isinstance(one, ast.If | ast.While) else "value"
        root = getattr(one, name, None)
        if not isinstance(root, ast.expr) or isinstance(one, ast.Expr | ast.Return):
            return None
        span = self._range(root)
        inside = [span[0] <= begin <= end <= span[1] for begin, end, _ in changes]
        parsed = [
            self._parsed(*span, change) if is_inside else None
            for change, is_inside in zip(changes, inside, strict=True)
        ]
        values = [copy.deepcopy(root), *(one or ast.Constant(value=None) for one in parsed)]
        call = ast.Call(
            func=ast.Name(id=_VARIANT, ctx=ast.Load()),
            args=[ast.Lambda(args=_no_arguments(), body=value) for value in values],
            keywords=[],
        )
        compiled = self._with_head(at, name, call)
        return None if compiled is None else _selected(compiled, observer)

    def _with_head(self, at: int, name: str, head: ast.expr) -> Any:
        """Return the interpreted form with another expression of a statement; None if Python rejects it."""
        body, n = self._places[at]
        before, rewriter = body[n], self._function.rewriter
        new = copy.copy(self._plain[at])
        setattr(new, name, head)
        for block in ("body", "orelse"):
            if hasattr(new, block):
                setattr(new, block, [])  # those of the tree are translated already
        new = rewriter.ast_transformer.visit(new)
        for node in ast.walk(new):
            if isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.arg):
                node.lineno = node.end_lineno = before.lineno
                node.col_offset = node.end_col_offset = 0
        ast.fix_missing_locations(new)
        for block in ("body", "orelse"):
            if hasattr(new, block):
                setattr(new, block, getattr(before, block))
        body[n] = new
        try:
            return rewriter._compile_and_exec(self._tree)
        except Exception:  # the compiler rejects an expression
            return None
        finally:
            body[n] = before


def _no_arguments() -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _selected(compiled: Any, chosen: int | Observer) -> Any:
    """Return a function with the number of a variant, or an observer, as its last parameter."""
    one = FunctionType(
        compiled.__code__, compiled.__globals__, compiled.__name__, compiled.__defaults__
    )
    one.__kwdefaults__ = {**compiled.__kwdefaults__, _VARIANT: chosen}
    one.__annotations__ = compiled.__annotations__
    return one


def _places(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the place of every statement of a body, and of those inside it."""
    for n, statement in enumerate(body):
        yield body, n
        for name in ("body", "orelse"):
            yield from _places(getattr(statement, name, []))


def function_of(text: str) -> ast.FunctionDef:
    """Return the syntax tree of a text."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside them."""
    for statement in body:
        yield statement
        for name in ("body", "orelse"):
            yield from statements(getattr(statement, name, []))


def statement_lines(text: str) -> dict[int, int]:
    """Return, for each line of a text, the first line of its innermost statement."""
    found: dict[int, int] = {}
    for statement in statements(function_of(text).body):
        last = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.For | ast.While | ast.If):
            last = statement.body[0].lineno - 1
        found |= dict.fromkeys(range(statement.lineno, last + 1), statement.lineno)
    return found


def enclosing_statement(text: str, line: int) -> range:
    """Return the lines of the innermost statement of a module at a line; of a block, those of its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if line <= last:
                found = range(node.lineno, max(last, node.lineno) + 1)
    return found


def statement_texts(text: str) -> dict[int, str]:
    """Return the text of each statement by its first line; of a block, that of its head."""
    found: dict[int, str] = {}
    for statement in statements(function_of(text).body):
        heads = [getattr(statement, name, None) for name in ("test", "target", "iter")]
        is_block = isinstance(statement, ast.For | ast.While | ast.If)
        parts = [one for one in heads if one is not None] if is_block else [statement]
        found.setdefault(statement.lineno, " ".join(ast.unparse(part) for part in parts))
    return found


def branch_lines(text: str) -> set[int]:
    """Return the lines of the statements of a text that branch."""
    found = statements(function_of(text).body)
    return {one.lineno for one in found if isinstance(one, ast.If | ast.While)}


def without_unused(text: str, lines: Collection[int]) -> str:
    """Return a text with ``pass`` in place of branches in which none of ``lines`` is; the other lines keep
    their numbers. It compiles faster. Loops are kept: a fault may be why one did not run."""
    rows = text.splitlines(keepends=True)
    for statement in statements(function_of(text).body):
        if rows[statement.lineno - 1].strip() in ("", "pass"):
            continue  # in a branch that is left out
        if not isinstance(statement, ast.If):
            continue
        for name in ("body", "orelse"):
            block: Sequence[ast.stmt] = getattr(statement, name, [])
            if not block:
                continue
            first, last = block[0].lineno, block[-1].end_lineno or block[-1].lineno
            is_elif = name == "orelse" and rows[first - 1].lstrip().startswith("elif")
            if is_elif or any(first <= at <= last for at in lines):
                continue
            indent = " " * block[0].col_offset
            rows[first - 1 : last] = [f"{indent}pass\n", *["\n"] * (last - first)]
    return "".join(rows)
