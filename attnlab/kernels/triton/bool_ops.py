"""``and`` and ``or`` of blocks in interpreted kernels.

Triton's compiler combines blocks element by element. In the interpreter, Python asks for the truth of the
first block and returns one of the two, so that half of a mask is lost.
"""

import ast
from collections.abc import Callable
from typing import Any

_AND, _OR = "__attnlab_and__", "__attnlab_or__"


def with_bool_ops(rewriter: Any) -> None:
    """Let a function's rewriter of Triton combine blocks. Mutates it, and the globals of its function."""
    base = type(rewriter.ast_transformer)

    class Transformer(base):  # type: ignore[misc, valid-type]
        """Replaces ``a and b`` by a call that combines blocks, and evaluates b only if it is needed."""

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            name = _AND if isinstance(node.op, ast.And) else _OR
            first, *rest = node.values
            later = [ast.Lambda(args=_NO_ARGUMENTS, body=one) for one in rest]
            call = ast.Call(func=ast.Name(name, ast.Load()), args=[first, *later], keywords=[])
            return ast.copy_location(call, node)

    rewriter.ast_transformer = Transformer()
    rewriter.fn.__globals__.update({_AND: _all, _OR: _any})


_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _all(first: Any, *rest: Callable[[], Any]) -> Any:
    for other in rest:
        first = (first != 0) & (other() != 0) if _is_block(first) else first and other()
    return first


def _any(first: Any, *rest: Callable[[], Any]) -> Any:
    for other in rest:
        first = (first != 0) | (other() != 0) if _is_block(first) else first or other()
    return first


def _is_block(value: Any) -> bool:
    """Answer whether a value is a block of Triton, not a scalar or a constant."""
    return bool(getattr(getattr(value, "type", None), "is_block", bool)())
