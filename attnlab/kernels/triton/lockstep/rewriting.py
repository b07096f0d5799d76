"""Rewrite a kernel's function so that all programs of a batch run it together.

Branches, loops, conditional expressions, ``and``, ``or``, ``not`` and chained comparisons become calls of
:mod:`attnlab.kernels.triton.lockstep.control`. Only variables that are read later are merged or carried.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attnlab.kernels.triton.kernel_text import CONTROL, FOR_MARK, IF_MARK, RAN_MARK
from attnlab.kernels.triton.lockstep import control
from attnlab.kernels.triton.lockstep.control import Refused

_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.While, ast.Return, ast.Pass,
    ast.Assert, ast.Break, ast.Continue,
)  # fmt: skip
# The same for an int of Python and a scalar of Triton; the last two unless a number is negative.
_EXACT = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_JUMPS = (ast.Return, ast.Break, ast.Continue)

Names = set[str]


def check_statements(function: ast.FunctionDef) -> None:
    """Raise Refused for what cannot be rewritten."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.stmt)
            and node is not function
            and not isinstance(node, _STATEMENTS)
        ):
            raise Refused(f"a statement {type(node).__name__.lower()}")
        if isinstance(node, ast.For | ast.While) and node.orelse:
            raise Refused("a loop with else")
        if isinstance(node, ast.NamedExpr):
            raise Refused("an assignment expression")
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            raise Refused("an assignment to a part of a value")


def stored(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that statements or targets assign, in order."""
    return list(dict.fromkeys(name for node in nodes for name in _stored(node)))


def _stored(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Tuple | ast.List | ast.Starred):
        yield from stored(ast.iter_child_nodes(node))
    elif isinstance(node, ast.stmt):  # other expressions assign nothing
        for field in ("targets", "target", "body", "orelse"):
            part: Any = getattr(node, field, [])
            yield from stored(part if isinstance(part, list) else [part])


def loaded(node: ast.AST | None) -> Names:
    """Return the names that an expression reads."""
    if node is None:
        return set()
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }


class Liveness:
    """Which variables may be read after each statement of a function.

    - ``after``: by statement, the names that may be read when it has ended.
    - ``at_end``: by loop, the names that may be read when an iteration has ended.
    - ``otherwise``: by ``if``, the names that may be read at the begin of its ``else``.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.after: dict[ast.stmt, Names] = {}
        self.at_end: dict[ast.stmt, Names] = {}
        self.otherwise: dict[ast.stmt, Names] = {}
        self._jumps: list[tuple[Names, Names]] = []  # read after break and after continue, by loop
        self._loaded = functools.cache(loaded)
        self._before(function.body, set())

    def _before(self, block: Sequence[ast.stmt], after: Names) -> Names:
        for statement in reversed(block):
            self.after[statement] = after
            after = self._through(statement, after)
        return after

    def _through(self, node: ast.stmt, after: Names) -> Names:
        """Return what may be read before a statement, from what may be read after it."""
        if isinstance(node, ast.If):
            self.otherwise[node] = self._before(node.orelse, after)
            return self._loaded(node.test) | self._before(node.body, after) | self.otherwise[node]
        if isinstance(node, ast.For | ast.While):
            return self._loop(node, after)
        if isinstance(node, ast.Break):
            return after | self._jumps[-1][0]
        if isinstance(node, ast.Continue):
            return after | self._jumps[-1][1]
        if isinstance(node, ast.AugAssign):
            return after | self._loaded(node.value) | set(stored([node]))
        return (after - set(stored([node]))) | self._loaded(node)

    def _loop(self, node: ast.For | ast.While, after: Names) -> Names:
        test = self._loaded(node.test) if isinstance(node, ast.While) else set()
        target = set(stored([node.target])) if isinstance(node, ast.For) else set()
        end = after | test
        while True:
            self._jumps.append((after, end))
            begin = self._before(node.body, end)
            self._jumps.pop()
            if (begin - target) <= end:
                break
            end = end | (begin - target)
        self.at_end[node] = end
        return end | (self._loaded(node.iter) if isinstance(node, ast.For) else set())


def is_exact(node: ast.For) -> bool:
    """Answer whether the variable of a loop may be a scalar of Triton instead of an int of Python.

    A true quotient is not the same, for example. Divisions of negative integers differ, too; they are refused
    when they occur.
    """
    if not isinstance(node.target, ast.Name):
        return False
    parents = {child: one for body in node.body for one in ast.walk(body)
               for child in ast.iter_child_nodes(one)}  # fmt: skip
    for child in parents:
        if isinstance(child, ast.Name) and child.id == node.target.id:
            at: ast.AST = child
            while isinstance(parents.get(at), ast.BinOp | ast.UnaryOp):
                at = parents[at]
                sign = getattr(at, "op", None)
                if not isinstance(sign, (*_EXACT, ast.USub)):
                    return False
            if not _takes_a_scalar(parents.get(at)):
                return False
    return True


def _takes_a_scalar(node: ast.AST | None) -> bool:
    """Answer whether an expression or statement takes a scalar of Triton like an int of Python."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, _EXACT)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    return isinstance(node, ast.Compare | ast.Assign | ast.Subscript)


class Rewriter(ast.NodeTransformer):
    """Replaces what decides which statements run; the interpreter's own transformer combines conditions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        check_statements(node)
        self._number = 0
        self._live = Liveness(node)
        node.decorator_list = []
        node.body = self._block(node.body)
        return node

    def _block(self, block: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in block:
            visited = self.visit(statement)
            new = visited if isinstance(visited, list) else [visited]
            found += [ast.copy_location(one, statement) for one in new]
        return found

    def _name(self) -> str:
        self._number += 1
        return f"__attnlab_{self._number}"

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        parts, after = [*node.body, *node.orelse], self._live.after[node]
        read = after | self._live.otherwise[node]
        names = tuple(n for n in stored(parts) if n in read)
        masks = not _has_jump(parts)
        test = self._test(node.test)
        body, orelse = self._block(node.body), self._block(node.orelse)
        name, targets = self._name(), _targets(names)
        begin = _parsed(f"{name} = {CONTROL}.Branch(0, {names!r}, locals(), {masks})")
        begin.value.args[0] = test
        then, flip, other, end = (
            _parsed(f"if {name}.{condition}: {what}")
            for condition, what in (
                ("then", "pass"),
                ("differs", f"{targets}{name}.flip({names!r}, locals())"),
                ("otherwise", "pass"),
                ("differs", f"{targets}{name}.end({names!r}, locals())"),
            )
        )
        then.body = body
        other.body = orelse or [ast.Pass()]
        return [begin, then, flip, other, end]

    def visit_For(self, node: ast.For) -> ast.AST:
        masks = not _has_jump(node.body) and self._keeps_target(node)
        exact, marks = is_exact(node), ""
        items: Any = node.iter
        if _is_call(items, FOR_MARK):
            marks = f", ({RAN_MARK}, {items.args[0].value!r})"
            items = items.args[1]
        items = with_range(self.visit(items))
        text = f"{CONTROL}.loop(0, {masks}, {exact}{marks})"
        node.iter = _call_with(items, text, node.iter)
        node.body = self._iteration(node, masks)
        return node

    def _keeps_target(self, node: ast.For) -> bool:
        """Answer whether nothing reads the loop's variable after an iteration."""
        names = set(stored([node.target]))
        return isinstance(node.target, ast.Name) and names.isdisjoint(
            self._live.at_end[node] | set(stored(node.body))
        )

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        masks, name = not _has_jump(node.body), self._name()
        test = self._test(node.test)
        begin = _parsed(f"{name} = {CONTROL}.While({masks})")
        node.body = self._iteration(node, masks)
        node.test = _call_with(test, f"{name}.goes_on(0)", node.test)
        return [begin, node]

    def _iteration(self, node: ast.For | ast.While, masks: bool) -> list[ast.stmt]:
        """Return the body of a loop, with the variables that it carries kept for masked programs."""
        names = tuple(n for n in stored(node.body) if n in self._live.at_end[node])
        body = self._block(node.body)
        if not names or not masks:
            return body
        name = self._name()
        first = _parsed(f"{name} = {CONTROL}.save({names!r}, locals())")
        last = _parsed(
            f"if {name} is not None: "
            f"{_targets(names)}{CONTROL}.restore({name}, {names!r}, locals())"
        )
        ast.copy_location(first, node)
        ast.copy_location(last, node.body[-1])
        return [first, *body, last]

    def _test(self, test: Any) -> Any:
        """Return a condition that Python does not ask for its truth."""
        if _is_call(test, IF_MARK):
            text = f"{CONTROL}.marked({RAN_MARK}, {test.args[0].value!r}, 0)"
            return _call_with(self.visit(test.args[1]), text, test)
        return self.visit(test)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        call = _expression(f"{CONTROL}.chosen(0, lambda: 0, lambda: 0)")
        call.args[0] = self._test(node.test)
        call.args[1].body, call.args[2].body = self.visit(node.body), self.visit(node.orelse)
        return ast.copy_location(call, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return _call_with(node.operand, f"{CONTROL}.negated(0)", node)


def lockstep_transformer(base: type) -> Any:
    """Return the transformer of the syntax tree of a function, based on that of the lab's interpreter."""
    return type("LockstepTransformer", (Rewriter, base), {})()


def _has_jump(block: Iterable[ast.stmt]) -> bool:
    return any(isinstance(one, _JUMPS) for node in block for one in ast.walk(node))


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == name


def with_range(items: Any) -> Any:
    """Return what a loop goes through, with the range of a batch in place of Python's."""
    if _is_call(items, "range"):
        items.func = _expression(f"{CONTROL}.Range")
    return items


def _targets(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names) + "= " if names else ""


def _parsed(text: str) -> Any:
    return ast.parse(text).body[0]


def _expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


def _call_with(argument: ast.expr, text: str, place: ast.AST) -> Any:
    """Return a call in the place of a node, with an expression in place of its argument 0."""
    call = _expression(text)
    at = next(i for i, one in enumerate(call.args) if ast.unparse(one) == "0")
    call.args[at] = argument
    return ast.copy_location(call, place)


def compile_lockstep(function: Any, tree: ast.Module) -> Any:
    """Return the form of a function of Triton that a batch of programs runs, from its syntax tree, which it
    mutates.

    Raises Refused for what cannot be rewritten.
    """
    rewriter = function.rewriter
    tree = lockstep_transformer(type(rewriter.ast_transformer)).visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, rewriter.def_file_lineno - 1)
    function.fn.__globals__[CONTROL] = control
    return rewriter._compile_and_exec(tree)
