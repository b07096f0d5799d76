"""Parts of a kernel that an expression of it may lack: names, factors, terms, conditions and positions."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

_MOST_NAMES = 8  # of the same kind as a name
_MOST_DEAD = 2  # names before an expression that only branches that did not run use
_MOST_PARTS = 14  # factors, terms and conditions that are added to an expression
_FEW_NAMES = 8  # of a kernel in which any name may be missing
_LOG2_E = 1.4426950408889634  # turns a score into one for exp2
_MOST_POSITIONS = 3  # position vectors of rows, and of keys, that a selection compares
_MOST_FACTORS = 6  # of a sum that a statement adds to
_NAME = re.compile(r"[A-Za-z_]\w*")


class Parts:
    """What occurs in a kernel: names, and parts that an expression may lack."""

    def __init__(self, function: ast.FunctionDef, whole: ast.FunctionDef) -> None:
        nodes = [node for one in function.body for node in ast.walk(one)]
        arguments = [one.arg for one in (*whole.args.args, *whole.args.kwonlyargs)]
        every = [node for one in whole.body for node in ast.walk(one) if isinstance(node, ast.Name)]
        loaded = {node.id for node in every if isinstance(node.ctx, ast.Load)}
        set_here = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        read_here = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        self._dead = [(node.lineno, node.id) for node in set_here if node.id not in read_here]
        self._strides = [name for name in arguments if "stride" in name]
        used = [node.id for node in nodes if isinstance(node, ast.Name)]
        self._names = list(dict.fromkeys([*arguments, *used]))
        self._unused = [
            name
            for name in dict.fromkeys([*arguments, *(n.id for n in every)])
            if name not in loaded
        ]
        self._factors = _operands(nodes, ast.Mult)
        self._terms = _operands(nodes, ast.Add | ast.Sub)
        self._rows, self._keys = (
            [
                (one.lineno, ast.unparse(one))
                for one in nodes
                if isinstance(one, ast.expr) and _is_position(one, axis)
            ]
            for axis in (0, 1)
        )
        self._stored = [(node.lineno, node.id) for node in set_here]
        self._conditions = [
            (node.lineno, text)
            for node in nodes
            if isinstance(node, ast.expr) and _is_condition(node)
            for text in _orientations(node)
        ]
        self._dead_here = [name for name in self._unused if name not in arguments][:_MOST_FACTORS]
        self._partners = [
            (side.lineno, ast.unparse(side))
            for node in nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            for side, other in ((node.left, node.right), (node.right, node.left))
            if isinstance(other, ast.Name) and other.id in self._strides
        ]

    def related(self, name: str) -> list[str]:
        """Return other names of the same kind: strides, or names that share a word; those that share most
        first, short parts such as "v" and "0" included."""
        own = words(name)
        scored = sorted(
            (-len(own & words(other)), -len(_parts(name) & _parts(other)), other)
            for other in self._names
            if other != name and (other in self._strides) == (name in self._strides)
        )
        close = [other for score, _, other in scored if score < 0]
        unused = [other for other in close if other in self._unused]
        most = len(close) if name in self._strides else _MOST_NAMES
        return list(dict.fromkeys([*unused, *close[:most]]))

    def revived(self, before: str, after: str) -> set[str]:
        """Return the names that a text has in addition, and that the kernel does not use."""
        added = set(_NAME.findall(after)) - set(_NAME.findall(before))
        return added.intersection(self._unused)

    def unused(self, node: ast.expr) -> Iterator[str]:
        """Yield the expression with a name that the kernel does not use: at all, or in what ran."""
        text = ast.unparse(node)
        dead = [one for one in self._dead if one[0] < node.lineno]
        for name in dict.fromkeys([*self._unused, *_nearest(dead, node)[:_MOST_DEAD]]):
            yield from (f"(({text}) {sign} {name})" for sign in "*+&")
            yield from (f"tl.where({name}, {text}, float('-inf'))", name)
        both = [(a, b) for a in self._dead_here for b in self._dead_here if a != b]
        yield from (f"(({text}) * tl.dot({a}, {b}))" for a, b in both)
        if "stride" in text or "ptr" in text:
            strides = [name for name in self._strides if name in self._unused]
            partners = _nearest(self._partners, node)[:_MOST_NAMES]
            yield from (f"(({text}) + ({a}) * {b})" for b in strides for a in partners)

    def of_target(
        self, statement: ast.stmt, cost: int
    ) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """Yield a statement without effect, or one that rescales or subtracts what it adds to."""
        if isinstance(statement, ast.Assign) and cost == 2:
            target = ast.unparse(statement.targets[0])
            if any(name == target and line < statement.lineno for line, name in self._stored):
                yield statement.value, target
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target, text = ast.unparse(statement.target), ast.unparse(statement.value)
            if cost == 2:
                yield statement.value, f"(-({text}))"
            factors = _nearest(self._factors, statement)[:_MOST_FACTORS] if cost == 3 else ()
            yield from ((statement, f"{target} = {target} * {one} + ({text})") for one in factors)

    def selected(self, node: ast.expr) -> Iterator[str]:
        """Yield an expression where a condition of the kernel holds, or a row's position is not before a
        key's, and -inf elsewhere."""
        text = ast.unparse(node)
        rows, keys = (_nearest(found, node)[:_MOST_POSITIONS] for found in (self._rows, self._keys))
        conditions = _nearest(self._conditions, node)[:_MOST_FACTORS]
        causal = [f"({row}) >= ({key})" for row in rows for key in keys]
        yield from (f"tl.where({one}, {text}, float('-inf'))" for one in (*conditions, *causal))

    def added(self, node: ast.expr) -> Iterator[str]:
        """Yield the expression with one more factor, term or condition, those of the nearest lines."""
        text = ast.unparse(node)
        if (
            isinstance(node, ast.Compare)
            or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd))
            or "mask" in text
        ):
            yield from (f"(({text}) & ({one}))" for one in _nearest(self._conditions, node))
            return
        is_stride = isinstance(node, ast.Name) and node.id in self._strides
        factors = _nearest(self._partners if is_stride else self._factors, node)
        yield from (f"(({text}) * ({one}))" for one in factors)
        terms = _nearest(self._terms, node)
        yield from (f"(({text}) + ({one}))" for one in terms)
        if isinstance(node, ast.Name) and not is_stride:
            kin = [one for one in self._names if _parts(one) & _parts(node.id) and one != node.id]
            near = kin[:_MOST_NAMES] if len(self._names) > _FEW_NAMES else self._names
            yield from (f"(({text}) {sign} {one})" for sign in "-+/" for one in near)
        elif not is_stride:
            yield from (f"(({text}) - ({one}))" for one in terms[:_MOST_FACTORS])
            yield f"(({text}) * {_LOG2_E})"
        yield from (f"(({text}) + 1)", f"(({text}) - 1)")


def words(name: str) -> set[str]:
    return {word for word in name.lower().split("_") if len(word) > 2}


def _parts(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _orientations(condition: ast.expr) -> Iterator[str]:
    """Yield the text of a condition, and of a vector of rows that of columns, or the other way round."""
    text = ast.unparse(condition)
    yield text
    for one, other in (("[:, None]", "[None, :]"), ("[None, :]", "[:, None]")):
        if isinstance(condition, ast.Subscript) and text.endswith(one):
            yield text.removesuffix(one) + other


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Name) and "mask" in node.id)


def _is_position(node: ast.AST, axis: int) -> bool:
    """Answer whether an expression is a vector of names along an axis of a block, or a sum with one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (node.left, node.right)
        return any(_is_position(one, axis) for one in sides) and all(
            isinstance(one, ast.Name) or _is_position(one, axis) for one in sides
        )
    shape = ("(:, None)", "(None, :)")[axis]
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and ast.unparse(node.slice) == shape
        and "mask" not in node.value.id
    )


def _is_part(node: ast.expr) -> bool:
    """Answer whether an expression is short: a name, an index of one, a float, or a product of these."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_part(node.left) and _is_part(node.right)
    is_float = isinstance(node, ast.Constant) and type(node.value) is float
    return isinstance(node, ast.Name | ast.Subscript) or is_float


def _operands(nodes: Sequence[ast.AST], operator: Any) -> list[tuple[int, str]]:
    """Return the short operands of an operator with their lines."""
    return [
        (side.lineno, ast.unparse(side))
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, operator)
        for side in (node.left, node.right)
        if _is_part(side)
    ]


def _nearest(found: Sequence[tuple[int, str]], node: ast.expr | ast.stmt) -> list[str]:
    """Return the distinct texts of the lines nearest to an expression."""
    ranked, own = sorted(found, key=lambda one: abs(one[0] - node.lineno)), ast.unparse(node)
    return list(dict.fromkeys(text for _, text in ranked if text != own))[:_MOST_PARTS]
