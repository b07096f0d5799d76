"""Small changes of one expression of a kernel, to find the line where a change makes a wrong result right."""

import ast
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from attnlab.kernels.triton.edit_parts import Parts, words
from attnlab.kernels.triton.kernel_text import Change, function_of, statements

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
_COST_OF_PLACES = 2  # of an edit of cost 1 in several places


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of the text of a kernel: bytes ``start`` to ``end`` become ``after``.

    - ``line``: of the expression in the text, from 1; ``statement``: the first line of its statement.
    - ``cost``: 1 for another operator, number or operand, 2 for another name, 3 for an added part.
    - ``revives``: it uses a name that the kernel has and does not use; ``is_kin``: the statement has a name
      that shares a word with it. ``more``: further places that become ``after``, too.
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
    more: tuple[tuple[int, int], ...] = ()

    def apply(self, text: str) -> str:
        """Return the changed text."""
        data = text.encode()
        for start, end in sorted([(self.start, self.end), *self.more], reverse=True):
            data = data[:start] + self.after.encode() + data[end:]
        return data.decode()

    def moved(self, text: str, whole: str) -> "Edit":
        """Return the edit for another text whose rows are the same in the places of the edit."""
        rows, others = (_starts(one) for one in (text, whole))

        def place(at: int) -> int:
            row = bisect_right(rows, at) - 1
            return others[row] + at - rows[row]

        more = tuple((place(start), place(end)) for start, end in self.more)
        return replace(self, start=place(self.start), end=place(self.end), more=more)

    def is_in_test(self, text: str) -> bool:
        """Answer whether it changes the test of a branch or of a conditional expression of a text."""
        rows = _starts(text)
        tests = (
            one.test for one in ast.walk(ast.parse(text)) if isinstance(one, ast.If | ast.IfExp)
        )
        return any(
            rows[one.lineno - 1] + one.col_offset <= self.start
            and self.end <= rows[(one.end_lineno or 0) - 1] + (one.end_col_offset or 0)
            for one in tests
        )

    @property
    def change(self) -> Change:
        """Return the bytes that the edit replaces, as begin and end, and the new text; of an edit of several
        places, none."""
        return (0, 0, "") if self.more else (self.start, self.end, self.after)

    @property
    def text(self) -> str:
        """Return the change in words."""
        before, after = (" ".join(part.split()) for part in (self.before, _plain(self.after)))
        places = f" in {len(self.more) + 1} places" if self.more else ""
        return f"`{after}` in place of `{before}`{places}"


def edits(text: str, lines: Collection[int], cost: int, whole: str) -> list[Edit]:
    """Return the edits of one cost of some statements of a kernel, in the order of the text.

    ``lines``: the first lines of the statements. ``whole``: the text with all branches, which says what
    names are not used.
    """
    function = function_of(text)
    parts = Parts(function, function_of(whole))
    starts = _starts(text)
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
                    is_kin=any(not used.isdisjoint(words(name)) for name in revived),
                )
                found.setdefault((start, end, _plain(after)), edit)
    if cost == 1:
        return list(found.values())
    repeated = edits(text, lines, 1, whole) if cost == _COST_OF_PLACES else []
    return [*found.values(), *_in_all_places(repeated)]


def _starts(text: str) -> list[int]:
    """Return the first byte of each line of a text, and its length."""
    rows = text.encode().splitlines(keepends=True)
    return list(accumulate(map(len, rows), initial=0))


def _in_all_places(found: Sequence[Edit]) -> Iterator[Edit]:
    """Yield the edits that are possible in several places, in all of them at once."""
    groups: dict[tuple[str, str], list[Edit]] = {}
    for edit in found:
        groups.setdefault((_plain(edit.before), _plain(edit.after)), []).append(edit)
    for first, *others in groups.values():
        spans = sorted((one.start, one.end) for one in (first, *others))
        if others and all(a[1] <= b[0] for a, b in pairwise(spans)):
            more = tuple((one.start, one.end) for one in others)
            yield replace(first, cost=_COST_OF_PLACES, more=more)


@lru_cache(maxsize=1 << 14)
def _plain(text: str) -> str:
    try:
        return ast.unparse(ast.parse(f"({text})", mode="eval"))
    except SyntaxError:  # a statement
        return ast.unparse(ast.parse(text))


def _changes(
    statement: ast.stmt, parts: Parts, cost: int
) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the expressions of a statement with what may replace them, for one cost."""
    yield from parts.of_target(statement, cost)
    for name in ("value", "test", "iter"):
        root = getattr(statement, name, None)
        if not isinstance(root, ast.expr):
            continue
        for node in ast.walk(root):
            if isinstance(node, ast.expr) and cost == 1:
                yield from ((node, after) for after in _other_operators(node))
            if isinstance(node, ast.Call) and cost == 1:
                others = _FUNCTIONS.get(ast.unparse(node.func), ())
                yield from ((node.func, other) for other in others)
            if isinstance(node, ast.Name) and cost == 2:
                yield from ((node, after) for after in parts.related(node.id))
        for node in _terms(root) if cost > 1 else ():
            added = parts.unused(node) if cost == 2 else parts.added(node)
            yield from ((node, after) for after in added)
        if cost == 3 and isinstance(statement, ast.Assign):
            yield from ((root, after) for after in parts.selected(root))


def _terms(root: ast.expr) -> Iterator[ast.expr]:
    """Yield what a part may be added to: an expression, its terms, its conditions, and its bounds."""
    yield root
    if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Add | ast.Sub | ast.BitAnd):
        yield from _terms(root.left)
        yield from _terms(root.right)
    elif isinstance(root, ast.Call):
        for one in root.args:
            yield from _terms(one)
        for keyword in root.keywords:
            if keyword.arg in ("mask", "acc"):
                yield from _terms(keyword.value)
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
        if isinstance(node.op, ast.FloorDiv):
            yield f"tl.cdiv({left}, {right})"
        if isinstance(node.op, ast.Sub):
            yield f"(({right}) - ({left}))"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, int | float)
        yield from (f"({node.value + 1})", f"({node.value - 1})")
        yield from ("float('-inf')", "2") if node.value == 0 else ()


def _other_calls(node: ast.Call) -> Iterator[str]:
    """Yield a call of a related function, or the branches of a selection."""
    name, arguments = ast.unparse(node.func), [ast.unparse(one) for one in node.args]
    if len(arguments) == 2 and name not in _FUNCTIONS:
        named = [ast.unparse(one) for one in node.keywords]
        yield f"{name}({', '.join([arguments[1], arguments[0], *named])})"
    if name == "tl.where" and len(arguments) == 3:
        condition, first, second = arguments
        yield from (f"({first})", f"({second})", f"tl.where({condition}, {second}, {first})")
    if name.endswith("cdiv") and len(arguments) == 2:
        yield f"(({arguments[0]}) // ({arguments[1]}))"
    if name == "float" and arguments == ["'-inf'"]:
        yield "0.0"


def _words_of(statement: ast.stmt) -> set[str]:
    """Return the words of the names of a statement, without those of the statements inside it."""
    roots = [getattr(statement, name, None) for name in ("value", "test", "iter")]
    names = [n.id for root in roots if root for n in ast.walk(root) if isinstance(n, ast.Name)]
    return set[str]().union(*(words(name) for name in names))
