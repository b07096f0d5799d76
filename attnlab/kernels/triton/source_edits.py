"""Small changes of one expression of a kernel, to find the line where a change makes a wrong result right."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from attnlab.kernels.triton.kernel_text import function_of, statements

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-", "*"), ast.Sub: ("+",), ast.Mult: ("/", "+"), ast.Div: ("*",),
    ast.FloorDiv: ("%", "*"), ast.Mod: ("//",), ast.BitAnd: ("|",), ast.BitOr: ("&",),
}  # fmt: skip
_FUNCTIONS = {
    "tl.exp": ("tl.exp2",), "tl.exp2": ("tl.exp",), "tl.math.exp": ("tl.math.exp2",),
    "tl.math.exp2": ("tl.math.exp",), "tl.max": ("tl.min", "tl.sum"), "tl.min": ("tl.max",),
    "tl.sum": ("tl.max",), "tl.maximum": ("tl.minimum",), "tl.minimum": ("tl.maximum",),
    "min": ("max",), "max": ("min",),
}  # fmt: skip
_MOST_NAMES = 8  # of the same kind as a name
_MOST_DEAD = 2  # names before an expression that only branches that did not run use
_MOST_PARTS = 8  # factors, terms and conditions that are added to an expression

_NAME = re.compile(r"[A-Za-z_]\w*")

Change = tuple[int, str]  # cost and text


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of the text of a kernel: bytes ``start`` to ``end`` become ``after``.

    - ``line``: of the expression in the text, from 1; ``statement``: the first line of its statement.
    - ``cost``: 1 for another operator, number or operand, 2 for another name, 3 for an added part.
    - ``revives``: it uses a name that the kernel has and does not use; ``is_kin``: the statement has a name
      that shares a word with it.
    """

    line: int
    statement: int
    start: int
    end: int
    before: str
    after: str
    cost: int
    revives: bool = False
    is_kin: bool = False

    def apply(self, text: str) -> str:
        """Return the changed text."""
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    @property
    def text(self) -> str:
        """Return the change in words."""
        before, after = (" ".join(part.split()) for part in (self.before, _plain(self.after)))
        return f"`{after}` in place of `{before}`"


def edits(text: str, lines: Collection[int], cost: int, whole: str) -> list[Edit]:
    """Return the edits of one cost of some statements of a kernel, in the order of the text.

    ``lines``: the first lines of the statements. ``whole``: the text with all branches, which says what
    names are not used.
    """
    function = function_of(text)
    parts = _Parts(function, function_of(whole))
    starts = [0]
    for row in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found = dict[tuple[int, int, str], Edit]()
    for statement in statements(function.body):
        if statement.lineno not in lines:
            continue
        used = _words_of(statement)
        for node, after in _changes(statement, parts, cost):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = text.encode()[start:end].decode()
            if _plain(before) != _plain(after):
                revived = parts.revived(before, after)
                edit = Edit(
                    line=node.lineno,
                    statement=statement.lineno,
                    start=start,
                    end=end,
                    before=before,
                    after=after,
                    cost=cost,
                    revives=bool(revived),
                    is_kin=any(not used.isdisjoint(_words(name)) for name in revived),
                )
                found.setdefault((start, end, _plain(after)), edit)
    return list(found.values())


@lru_cache(maxsize=1 << 14)
def _plain(text: str) -> str:
    return ast.unparse(ast.parse(f"({text})", mode="eval"))


def _changes(statement: ast.stmt, parts: "_Parts", cost: int) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions of a statement with what may replace them, for one cost."""
    for name in ("value", "test", "iter"):
        root = getattr(statement, name, None)
        if not isinstance(root, ast.expr):
            continue
        for node in ast.walk(root):
            if isinstance(node, ast.expr) and cost == 1:
                yield from ((node, after) for after in _other_operators(node))
            if isinstance(node, ast.Name) and cost == 2:
                yield from ((node, after) for after in parts.related(node.id))
        for node in _terms(root) if cost > 1 else ():
            added = parts.unused(node) if cost == 2 else parts.added(node)
            yield from ((node, after) for after in added)


def _terms(root: ast.expr) -> Iterator[ast.expr]:
    """Yield what a part may be added to: an expression, its terms, its conditions, and its bounds."""
    yield root
    if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Add | ast.Sub | ast.BitAnd):
        yield from _terms(root.left)
        yield from _terms(root.right)
    elif isinstance(root, ast.Call):
        for one in root.args:
            yield from _terms(one)
        yield from (one.value for one in root.keywords if one.arg == "mask")
    elif isinstance(root, ast.Compare):
        yield from (root.left, *root.comparators)


def _other_operators(node: ast.expr) -> Iterator[str]:
    """Yield an expression with another operator or number, or without an operand."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield from (f"(({left}) {sign} ({right}))" for sign in _COMPARISONS)
        signs = ("<", ">=") if isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE) else ()
        yield from (
            f"(({left}) {sign} ({right}) {step})" for sign in signs for step in ("+ 1", "- 1")
        )
    elif isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield from (f"(({left}) {sign} ({right}))" for sign in _OPERATORS.get(type(node.op), ()))
        yield from (f"({left})", f"({right})")
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, int | float)
        yield from (f"({node.value + 1})", f"({node.value - 1})")
        yield from ("float('-inf')", "2") if node.value == 0 else ()


def _other_calls(node: ast.Call) -> Iterator[str]:
    """Yield a call of a related function, or the branches of a selection."""
    name, arguments = ast.unparse(node.func), [ast.unparse(one) for one in node.args]
    every = ", ".join([*arguments, *(ast.unparse(one) for one in node.keywords)])
    yield from (f"{other}({every})" for other in _FUNCTIONS.get(name, ()))
    if name == "tl.where" and len(arguments) == 3:
        condition, first, second = arguments
        yield from (f"({first})", f"({second})", f"tl.where({condition}, {second}, {first})")
    if name.endswith("cdiv") and len(arguments) == 2:
        yield f"(({arguments[0]}) // ({arguments[1]}))"
    if name == "float" and arguments == ["'-inf'"]:
        yield "0.0"


class _Parts:
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
        self._terms = _operands(nodes, ast.Add)
        self._conditions = [
            (node.lineno, ast.unparse(node))
            for node in nodes
            if isinstance(node, ast.expr) and _is_condition(node)
        ]

    def related(self, name: str) -> list[str]:
        """Return other names of the same kind: strides, or names that share a word."""
        words = _words(name)
        scored = sorted(
            (-len(words & _words(other)), other)
            for other in self._names
            if other != name and (other in self._strides) == (name in self._strides)
        )
        close = [other for score, other in scored if score < 0]
        unused = [other for other in close if other in self._unused]
        return list(dict.fromkeys([*unused, *close[:_MOST_NAMES]]))

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
        yield from (f"(({text}) * {one})" for one in _nearest(self._factors, node))
        yield from (f"(({text}) + {one})" for one in _nearest(self._terms, node))
        yield from (f"(({text}) + 1)", f"(({text}) - 1)")


def _words_of(statement: ast.stmt) -> set[str]:
    """Return the words of the names of a statement, without those of the statements inside it."""
    roots = [getattr(statement, name, None) for name in ("value", "test", "iter")]
    names = [n.id for root in roots if root for n in ast.walk(root) if isinstance(n, ast.Name)]
    return set[str]().union(*(_words(name) for name in names))


def _words(name: str) -> set[str]:
    return {word for word in name.lower().split("_") if len(word) > 2}


def _is_condition(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Name) and "mask" in node.id)


def _operands(nodes: Sequence[ast.AST], operator: type[ast.operator]) -> list[tuple[int, str]]:
    """Return the short operands of an operator with their lines."""
    return [
        (side.lineno, ast.unparse(side))
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, operator)
        for side in (node.left, node.right)
        if isinstance(side, ast.Name | ast.Subscript)
    ]


def _nearest(found: Sequence[tuple[int, str]], node: ast.expr) -> list[str]:
    """Return the distinct texts of the lines nearest to an expression."""
    ranked = sorted(found, key=lambda one: abs(one[0] - node.lineno))
    return list(dict.fromkeys(text for _, text in ranked if text != ast.unparse(node)))[
        :_MOST_PARTS
    ]
