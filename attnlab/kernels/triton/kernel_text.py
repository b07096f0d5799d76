"""Text of a kernel: the source of its function from ``def`` on, without common indentation.

Lines of a text count from 1. The interpreted form of a function can be compiled from a changed text.
"""

import ast
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any


def text_of(function: Any) -> str:
    """Return the text of a function of Triton."""
    rewriter = function.rewriter
    if not rewriter.filename:
        rewriter.rewrite_ast()  # finds the line of the ``def``
    found: str = rewriter._prepare_source(inspect.getsourcelines(function.fn)[0])
    return found


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

    Only the changed statement is translated, which takes a third of the time of the whole text.
    """

    def __init__(self, function: Any, text: str) -> None:
        self._function, self._text = function, text
        rewriter = function.rewriter
        plain = ast.parse(text)
        self._shift = rewriter.def_file_lineno - 1
        self._tree = rewriter.ast_transformer.visit(plain)
        self._places = list(_places(self._tree.body[0].body))
        ast.fix_missing_locations(self._tree)
        ast.increment_lineno(self._tree, self._shift)

    def compiled(self, text: str, line: int) -> Any:
        """Return the interpreted form with another text that differs in the statement at a line of the text.

        Raises SyntaxError for a text that is no Python.
        """
        changed = list(_places(function_of(text).body))
        at = next(i for i, (body, n) in enumerate(changed) if body[n].lineno == line)
        if len(changed) != len(self._places):
            return compile_text(self._function, text)
        (new_body, new_n), (body, n) = changed[at], self._places[at]
        before, new = body[n], new_body[new_n]
        if isinstance(new, ast.If | ast.While | ast.For):
            for name in ("body", "orelse"):
                setattr(new, name, [])  # those of the tree are translated already
        new = self._function.rewriter.ast_transformer.visit(new)
        ast.fix_missing_locations(new)
        ast.increment_lineno(new, self._shift)
        if isinstance(new, ast.If | ast.While | ast.For):
            for name in ("body", "orelse"):
                setattr(new, name, getattr(before, name))
        body[n] = new
        try:
            return self._function.rewriter._compile_and_exec(self._tree)
        finally:
            body[n] = before


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
