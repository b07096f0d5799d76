"""``and``, ``or`` and chained comparisons of blocks in interpreted kernels.

Triton's compiler combines blocks element by element. In the interpreter, Python asks for the truth of the
first block and returns one of the two, so that half of a mask is lost. The rewriter of Triton 3.6 to 3.8 does
not visit the value of an assignment; this one does.
"""

import ast
import functools
from collections.abc import Callable
from typing import Any

_AND, _OR, _CHAIN = "__attnlab_and__", "__attnlab_or__", "__attnlab_chain__"


def with_bool_ops(rewriter: Any) -> None:
    """Let a function's rewriter of Triton combine blocks. Mutates it, and the globals of its function."""
    base = type(rewriter.ast_transformer)

    class Transformer(base):  # type: ignore[misc, valid-type]
        """Replaces ``a and b``, and ``a < b < c``, by a call that combines blocks.

        It evaluates an operand only if it is needed.
        """

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            node.value = self.visit(node.value)
            found: ast.AST = super().visit_Assign(node)
            return found

        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) == 1:
                return node
            parts: list[ast.expr] = [node.left]
            for sign, right in zip(node.ops, node.comparators, strict=True):
                pair = [ast.arg(arg="a"), ast.arg(arg="b")]
                left, other = (ast.Name(one.arg, ast.Load()) for one in pair)
                compared = ast.Compare(left=left, ops=[sign], comparators=[other])
                parts += [
                    ast.Lambda(args=_arguments(pair), body=compared),
                    ast.Lambda(args=_arguments([]), body=right),
                ]
            call = ast.Call(func=ast.Name(_CHAIN, ast.Load()), args=parts, keywords=[])
            return ast.copy_location(call, node)

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            name = _AND if isinstance(node.op, ast.And) else _OR
            first, *rest = node.values
            later = [ast.Lambda(args=_arguments([]), body=one) for one in rest]
            call = ast.Call(func=ast.Name(name, ast.Load()), args=[first, *later], keywords=[])
            return ast.copy_location(call, node)

    rewriter.ast_transformer = Transformer()
    rewriter.fn.__globals__.update({_AND: _all, _OR: _any, _CHAIN: _chain})


def _arguments(names: list[ast.arg]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])


def _all(first: Any, *rest: Callable[[], Any]) -> Any:
    for other in rest:
        first = (first != 0) & (other() != 0) if _is_block(first) else first and other()
    return first


def _any(first: Any, *rest: Callable[[], Any]) -> Any:
    for other in rest:
        first = (first != 0) | (other() != 0) if _is_block(first) else first or other()
    return first


def _chain(left: Any, *rest: Callable[..., Any]) -> Any:
    """Return ``left < a < b …``; ``rest``: each comparison, and a function that returns its right side."""
    found: Any = True
    for compare, right in zip(rest[::2], rest[1::2], strict=True):
        if not _is_block(found) and not found:
            return found
        left, before = right(), left
        one = compare(before, left)
        found = one if found is True else _all(found, functools.partial(_same, one))
    return found


def _same(value: Any) -> Any:
    return value


def _is_block(value: Any) -> bool:
    """Answer whether a value is a block of Triton, not a scalar or a constant."""
    return bool(getattr(getattr(value, "type", None), "is_block", bool)())
