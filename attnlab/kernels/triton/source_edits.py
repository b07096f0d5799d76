"""Small changes of one expression of a kernel, to find the line where a change makes a wrong result right."""

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

from attnlab.kernels.triton.kernel_text import Change, function_of, row_starts, slice_of, statements

# Parts of a kernel that an expression of it may lack: names, factors, terms, conditions and positions.

_MOST_NAMES = 8  # of the same kind as a name
_MOST_DEAD = 2  # names before an expression that only branches that did not run use
_MOST_INDICES = 6  # that other strides of an address are multiplied by
_MOST_PARTS = 14  # factors, terms and conditions that are added to an expression
_FEW_NAMES = 8  # of a kernel in which any name may be missing
_LOG2_E = 1.4426950408889634  # turns a score into one for exp2
_MOST_POSITIONS = 3  # position vectors of rows, and of keys, that a selection compares
_MOST_FACTORS = 6  # of a sum that a statement adds to
_MOST_SUBJECT = 60  # characters of an expression that a sentence repeats
_MOST_SIBLINGS = 4  # addresses of other tensors, that one may be computed like
_NAME = re.compile(r"[A-Za-z_]\w*")


class Parts:
    """What occurs in a kernel: names, and parts that an expression may lack."""

    def __init__(self, function: ast.FunctionDef, whole: ast.FunctionDef) -> None:
        nodes = [node for one in function.body for node in ast.walk(one)]
        arguments = [one.arg for one in (*whole.args.args, *whole.args.kwonlyargs)]
        every = [node for one in whole.body for node in ast.walk(one) if isinstance(node, ast.Name)]
        loaded = {node.id for node in every if isinstance(node.ctx, ast.Load)}
        stores = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        set_here = [n for n in stores if n.id != "_"]
        read_here = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        self._dead = [(node.lineno, node.id) for node in set_here if node.id not in read_here]
        self._strides = [name for name in arguments if "stride" in name]
        self._addresses = [
            (type(node), base, ast.unparse(node.value))
            for node in nodes
            if isinstance(node, ast.Assign | ast.AugAssign) and (base := _base(node)) in arguments
        ]
        self._rescales = dict.fromkeys(
            factor.id
            for node in nodes
            if isinstance(node, ast.Assign)
            for one in ast.walk(node.value)
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult)
            for kept, factor in ((one.left, one.right), (one.right, one.left))
            if isinstance(factor, ast.Name) and ast.unparse(kept) == ast.unparse(node.targets[0])
        )  # what a sum of a loop is multiplied by, before a term is added
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
        self._periods = [
            (node.right.lineno, ast.unparse(node.right))
            for node in nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        ]  # sizes of what an index counts, by which a part of an address may be multiplied
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
        own, parts = words(name), _parts(name)
        scored = sorted(
            (-len(own & words(other)), -len(parts & _parts(other)), other)
            for other in self._names
            if other != name and (other in self._strides) == (name in self._strides)
        )
        if not own:  # of names such as i_h and i_hv, or H and HV
            scored = sorted(
                (-1, -int(100 * SequenceMatcher(None, name, other).ratio()), other)
                for other in self._names
                if other != name and _kind(name) == _kind(other)
            )
        close = [other for score, _, other in scored if score < 0]
        unused = [other for other in close if other in self._unused]
        most = len(close) if name in self._strides else _MOST_NAMES
        return list(dict.fromkeys([*unused, *close[:most]]))

    def in_place_of(self, call: ast.Call) -> Iterator[str]:
        """Yield other names of the kind of a call's only argument, as of a tensor that is transposed."""
        if len(call.args) == 1 and isinstance(call.args[0], ast.Name) and not call.keywords:
            yield from self.related(call.args[0].id)

    def exchanged(self, root: ast.BinOp) -> Iterator[str]:
        """Yield an expression with two of its names exchanged, which share a part."""
        names = [one.id for one in ast.walk(root) if isinstance(one, ast.Name)]
        once = [name for name, count in Counter(names).items() if count == 1]
        pairs = [pair for pair in combinations(once, 2) if _parts(pair[0]) & _parts(pair[1])]
        for first, second in pairs[:_MOST_FACTORS]:
            parts = re.split(rf"\b({first}|{second})\b", ast.unparse(root))
            yield "".join({first: second, second: first}.get(one, one) for one in parts)

    def with_other_index(self, node: ast.BinOp) -> Iterator[str]:
        """Yield the product of an index and a stride with the index of the nearest other strides."""
        stride = node.right
        if (
            isinstance(node.op, ast.Mult)
            and isinstance(stride, ast.Name)
            and stride.id in self._strides
        ):
            others = _nearest(self._partners, node.left)[:_MOST_INDICES]
            yield from (f"(({one}) * {stride.id})" for one in others)

    def revived(self, before: str, after: str) -> set[str]:
        """Return the names that a text has in addition, and that the kernel does not use."""
        if not self._unused:
            return set()
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

    def _like_siblings(self, statement: ast.stmt) -> Iterator[tuple[ast.expr, str]]:
        """Yield the address of a statement computed as the most similar statements do for other tensors."""
        if not isinstance(statement, ast.Assign | ast.AugAssign):
            return
        base, own = _base(statement), ast.unparse(statement.value)
        if base not in {one for _, one, _ in self._addresses}:
            return
        others = {
            re.sub(rf"\b{other}\b", str(base), text)
            for kind, other, text in self._addresses
            if kind is type(statement)
        } - {own}
        alike = sorted(others, key=lambda one: (-SequenceMatcher(None, own, one).ratio(), one))
        yield from ((statement.value, one) for one in alike[:_MOST_SIBLINGS])

    def of_target(
        self, statement: ast.stmt, cost: int
    ) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """Yield a statement without effect, one that rescales or subtracts what it adds to, or an address
        like others."""
        if cost == 2:
            yield from self._like_siblings(statement)
        if isinstance(statement, ast.Assign) and cost == 2:
            target = ast.unparse(statement.targets[0])
            if any(name == target and line < statement.lineno for line, name in self._stored):
                yield statement.value, target
        if cost == 1:
            yield from self._rescaled(statement)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            if cost == 2:
                yield statement.value, f"(-({ast.unparse(statement.value)}))"
            if cost == 3:
                yield from _with_factors(
                    statement, _nearest(self._factors, statement)[:_MOST_FACTORS]
                )

    def _rescaled(self, statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """Yield what a statement adds to, rescaled as another sum is, or by a name that nothing reads."""
        dead = _nearest([one for one in self._dead if one[0] < statement.lineno], statement)
        names = dict.fromkeys([*self._rescales, *dead[:_MOST_DEAD]])
        factors = [text for one in names for text in (f"{one}[:, None]", one)]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            yield from _with_factors(statement, factors)
        elif isinstance(statement, ast.Assign):
            target = ast.unparse(statement.targets[0])
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Name) and node.id == target:
                    yield from ((node, f"({target} * {one})") for one in factors)

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
        of_strides = [*self._partners, *self._periods]
        factors = _nearest(of_strides if is_stride else self._factors, node)
        yield from (f"(({text}) * ({one}))" for one in factors)
        terms = _nearest(self._terms, node)
        yield from (f"(({text}) + ({one}))" for one in terms)
        if isinstance(node, ast.Name) and not is_stride:
            kin = [one for one in self._names if _parts(one) & _parts(node.id) and one != node.id]
            near = kin[:_MOST_NAMES] if len(self._names) > _FEW_NAMES else self._names
            yield from (f"(({text}) {sign} {one})" for sign in "-+/" for one in near)
            yield from (
                f"tl.{name}({text}, {one})"
                for name in ("maximum", "minimum")
                for one in self.related(node.id)[:_MOST_SIBLINGS]
            )
        elif not is_stride:
            yield from (f"(({text}) - ({one}))" for one in terms[:_MOST_FACTORS])
            yield f"(({text}) * {_LOG2_E})"
        yield from (f"(({text}) + 1)", f"(({text}) - 1)")


def _with_factors(
    statement: ast.AugAssign, factors: Sequence[str]
) -> Iterator[tuple[ast.stmt, str]]:
    """Yield a statement that adds, with what it adds to multiplied by each of some factors first."""
    target, text = ast.unparse(statement.target), ast.unparse(statement.value)
    yield from ((statement, f"{target} = {target} * {one} + ({text})") for one in factors)


def _base(statement: ast.Assign | ast.AugAssign) -> str | None:
    """Return the name that a statement adds to: its target, or the first term of the sum that it assigns."""
    one = statement.target if isinstance(statement, ast.AugAssign) else statement.value
    is_sum = isinstance(one, ast.BinOp)
    while isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add):
        one = one.left
    is_address = is_sum or isinstance(statement, ast.AugAssign)
    return one.id if is_address and isinstance(one, ast.Name) else None


def _kind(name: str) -> str:
    """Return what short names that mean alike have in common: a prefix, or that they are sizes."""
    return name.partition("_")[0] if "_" in name else "size" if name.isupper() else name


@lru_cache(maxsize=1 << 10)
def words(name: str) -> set[str]:
    return {word for word in name.lower().split("_") if len(word) > 2}


@lru_cache(maxsize=1 << 10)
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
# Functions that may stand around an expression by mistake.
_MAXIMA = ("tl.max", "tl.maximum", "tl.min", "tl.minimum")
_UNWRAPPED = ("tl.min", "tl.max", "tl.minimum", "tl.maximum", "min", "max", "tl.abs", "tl.floor")
_COST_OF_PLACES = 2  # of an edit of cost 1 in several places
_NEVER = "the branch in {lines} never taken"
_LONGER = "twice as many iterations of this loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of the text of a kernel: bytes ``start`` to ``end`` become ``after``.

    - ``line``: of the expression in the text, from 1; ``statement``: the first line of its statement.
    - ``cost``: 1 for another operator, number or operand, or a rescaled sum, 2 for another name, 3 for an
      added part.
    - ``revives``: it uses a name that the kernel has and does not use; ``is_kin``: the statement has a name
      that shares a word with it. ``more``: further places that become ``after``, too.
    - ``words``: what the edit does, if its text does not say it, with "{lines}" for ``lines`` of the text,
      the first and the last one.
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
    words: str = ""
    lines: tuple[int, int] = (0, 0)

    def apply(self, text: str) -> str:
        """Return the changed text."""
        data = text.encode()
        for start, end in sorted([(self.start, self.end), *self.more], reverse=True):
            data = data[:start] + self.after.encode() + data[end:]
        return data.decode()

    def condition(self, text: str) -> tuple[int, int] | None:
        """Return where the changed text has the condition that the edit changes: its first byte and that
        after it. It is the smallest one around the edit, or the first inside it; None if there is none."""
        if self.more:
            return None
        changed = self.apply(text)
        rows, end = row_starts(changed), self.start + len(self.after.encode())
        after = self.after.strip()
        first = self.start + self.after.index(after) + len(after) - len(after.lstrip("( "))
        last = end - len(after) + len(after.rstrip(") "))
        spans = [
            span_of(one, rows)
            for one in ast.walk(ast.parse(changed))
            if isinstance(one, ast.expr) and _edits_is_condition(one)
        ]
        around = [one for one in spans if one[0] <= first and last <= one[1]]
        inside = [one for one in spans if self.start <= one[0] and one[1] <= end]
        return min(around, key=lambda one: one[1] - one[0]) if around else min(inside, default=None)

    def moved(self, text: str, whole: str) -> "Edit":
        """Return the edit for another text whose rows are the same in the places of the edit."""
        rows, others = (row_starts(one) for one in (text, whole))

        def place(at: int) -> int:
            row = bisect_right(rows, at) - 1
            return others[row] + at - rows[row]

        more = tuple((place(start), place(end)) for start, end in self.more)
        return replace(self, start=place(self.start), end=place(self.end), more=more)

    def is_in_test(self, text: str) -> bool:
        """Answer whether it changes the test of a branch or of a conditional expression of a text."""
        nodes = ast.walk(ast.parse(text))
        return self._is_in(text, [one.test for one in nodes if isinstance(one, ast.If | ast.IfExp)])

    def is_in_maximum(self, text: str) -> bool:
        """Answer whether it changes a maximum or a minimum of tiles, or what one is taken of."""
        calls = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call))
        return self._is_in(text, [one for one in calls if ast.unparse(one.func) in _MAXIMA])

    def widened(self, text: str) -> "Edit | None":
        """Return the edit that goes further in the same direction, if there is one.

        It adds the double of what the edit adds or multiplies by. In place of a name alone at which a loop
        begins or ends, it begins the loop at 0, or ends it at the double of the new end. In place of a number
        from which the end of a loop is computed, it has the double of a larger one.
        """
        before, after = (_plain(part) for part in (self.before, self.after))
        match expression_of(after):
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() as op, right) if (
                ast.unparse(left) == before
            ):
                more = ast.BinOp(left, op, ast.BinOp(ast.Constant(2), ast.Mult(), right))
                return replace(self, after=f"({ast.unparse(more)})")
            case ast.Constant(int(number)) if next(self.longer_loops(text), None) is not None:
                given = expression_of(before)
                is_larger = isinstance(given, ast.Constant) and given.value in range(number)
                return replace(self, after=f"({2 * number})") if is_larger else None
        if not before.isidentifier():
            return None
        loops = (one.iter for one in ast.walk(ast.parse(text)) if isinstance(one, ast.For))
        for bounds in (one.args[:2] for one in loops if isinstance(one, ast.Call)):
            if self._is_in(text, bounds[-1:]):
                return replace(self, after=f"(2 * ({after}))")
            if self._is_in(text, bounds[:-1]):
                return replace(self, after="(0)")
        return None

    def longer_loops(self, text: str) -> Iterator["Edit"]:
        """Yield the edits with which a loop has twice as many iterations, if this one may change its end.

        The nearest loop by data flow comes first.
        """
        loops = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.For)]
        fed = [(slice_of(text, one.lineno).get(self.statement), one) for one in loops]
        for _, loop in sorted((d, n) for n, (d, _) in enumerate(fed) if d is not None):
            node = fed[loop][1]
            if isinstance(node.iter, ast.Call) and node.iter.args:
                end = node.iter.args[:2][-1]
                longer = self._in_place_of(text, end, f"(2 * ({ast.unparse(end)}))")
                yield replace(longer, line=node.lineno, words=_LONGER)

    def assigned(self, text: str) -> "Edit | None":
        """Return the edit that leaves out the assignment that this one changes, if that is in a branch."""
        branches = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.If))
        for node in (one for branch in branches for one in (*branch.body, *branch.orelse)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                start, end = span_of(node.value, row_starts(text))
                if start <= self.start and self.end <= end:
                    before, after = text.encode()[start:end].decode(), node.targets[0].id
                    return replace(self, start=start, end=end, before=before, after=after, more=())
        return None

    def switches(self, text: str) -> Iterator["Edit"]:
        """Yield the edits that leave out one alternative of a choice, if this one changes what it depends on.

        In an if statement, the branch never runs. In a conditional expression, and in ``tl.where``, the other
        operand is always taken.
        """
        choices = ((node, _choice(node)) for node in ast.walk(ast.parse(text)))
        around = [(node, found) for node, found in choices if self._is_in(text, found[:1])]
        if not around:
            return
        node, (test, *operands) = min(around, key=lambda one: len(ast.unparse(one[0])))
        if isinstance(node, ast.If):
            for after, branch in (("(False)", node.body), ("(True)", node.orelse)):
                if branch:
                    lines = branch[0].lineno, branch[-1].end_lineno or branch[-1].lineno
                    yield replace(self._in_place_of(text, test, after), words=_NEVER, lines=lines)
        elif isinstance(node, ast.expr):
            yield from (self._in_place_of(text, node, f"({ast.unparse(one)})") for one in operands)

    def of_argument(self, text: str) -> "tuple[str, Edit] | None":
        """Return an argument of the text's function and the edit that has another value wherever it is
        read, if that may do what this edit does; else None.

        This edit replaces the argument, or changes how it enters a product, a sum or a comparison. A pointer
        is read by a load. The other value is computed from arguments, so it is one for the whole launch.
        """
        before, after = expression_of(self.before), expression_of(self.after)
        if before is None or after is None or self.more:
            return None
        function, rows = function_of(text), row_starts(text)
        own = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
        uses = Counter(one.id for one in ast.walk(function) if isinstance(one, ast.Name))
        for read, new in _as_value(before, after):
            name, used = _read_name(read), {n.id for n in ast.walk(new) if isinstance(n, ast.Name)}
            if name not in own or not used <= {*own, "tl"}:
                continue
            form = ast.unparse(read)
            places = [
                span_of(one, rows)
                for one in ast.walk(function)
                if isinstance(one, ast.expr) and ast.unparse(one) == form
            ]
            if len(places) != uses[name]:  # it is read in another way, too
                continue
            (start, end), *more = places
            return name, replace(
                self,
                start=start,
                end=end,
                before=form,
                after=f"({ast.unparse(new)})",
                more=tuple(more),
                words="",
            )
        return None

    def _in_place_of(self, text: str, node: ast.expr, after: str) -> "Edit":
        """Return an edit of the same cost in place of a node around this one."""
        start, end = span_of(node, row_starts(text))
        return Edit(
            line=node.lineno,
            statement=self.statement,
            start=start,
            end=end,
            before=text.encode()[start:end].decode(),
            after=after,
            cost=self.cost,
        )

    def _is_in(self, text: str, expressions: Sequence[ast.expr]) -> bool:
        """Answer whether the edit is inside one of some expressions of a text."""
        rows = row_starts(text)
        spans = (span_of(one, rows) for one in expressions)
        return any(start <= self.start and self.end <= end for start, end in spans)

    @property
    def changes(self) -> list[Change]:
        """Return the bytes that the edit replaces in each place, and the new text."""
        return [(*span, self.after) for span in ((self.start, self.end), *self.more)]

    @property
    def text(self) -> str:
        """Return the change in words."""
        before, after = (" ".join(part.split()) for part in (self.before, _plain(self.after)))
        places = f" in {len(self.more) + 1} places" if self.more else ""
        return f"`{after}` in place of `{before}`{places}"

    @property
    def subject(self) -> str:
        """Return what the edit replaces, in words."""
        before = " ".join(self.before.split())
        return f"`{before}`" if len(before) <= _MOST_SUBJECT else "an expression of this line"


def edits(text: str, lines: Collection[int], cost: int, whole: str) -> list[Edit]:
    """Return the edits of one cost of some statements of a kernel, in the order of the text.

    ``lines``: the first lines of the statements. ``whole``: the text with all branches, which says what
    names are not used.
    """
    return _edits(text, frozenset(lines), cost, whole)


@lru_cache(maxsize=8)
def _parts_of(text: str, whole: str) -> tuple[ast.FunctionDef, Parts]:
    """Return the syntax tree of a text, and what occurs in it."""
    function = function_of(text)
    return function, Parts(function, function_of(whole))


@lru_cache(maxsize=8)
def _edits(text: str, lines: frozenset[int], cost: int, whole: str) -> list[Edit]:
    """Return what :func:`edits` does."""
    function, parts = _parts_of(text, whole)
    starts, data = row_starts(text), text.encode()
    found = dict[tuple[int, int, str], Edit]()
    plain = _plain if cost < 3 else str  # what is added differs as a text, too; there is much of it
    for statement in statements(function.body):
        if statement.lineno not in lines:
            continue
        used = _words_of(statement)
        for node, after in _changes(statement, parts, cost):
            start, end = span_of(node, starts)
            before = data[start:end].decode()
            if plain(before) != plain(after):
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
                found.setdefault((start, end, plain(after)), edit)
    if cost == 1:
        return list(found.values())
    repeated = _edits(text, lines, 1, whole) if cost == _COST_OF_PLACES else []
    return [*found.values(), *_in_all_places(repeated)]


def _choice(node: ast.AST) -> list[ast.expr]:
    """Return the test of an if statement, or that of an expression and its two operands; [] of others."""
    match node:
        case ast.If(test):
            return [test]
        case ast.IfExp(test, body, orelse):
            return [test, body, orelse]
        case ast.Call(func, [test, body, orelse]) if ast.unparse(func) == "tl.where":
            return [test, body, orelse]
    return []


def _edits_is_condition(node: ast.expr) -> bool:
    """Answer whether an expression is a comparison or joins some, by its form."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitAnd | ast.BitOr)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not | ast.Invert)
    return isinstance(node, ast.Compare | ast.BoolOp)


def _as_value(before: ast.expr, after: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield an operand of one expression, and what in its place gives the other expression."""
    yield before, after
    match before, after:
        case (
            ast.Compare(smaller, [sign], [larger]),
            ast.Compare(new_smaller, [new_sign], [new_larger]),
        ) if type(sign) is type(new_sign):
            if ast.unparse(smaller) == ast.unparse(new_smaller):
                yield larger, new_larger
            if ast.unparse(larger) == ast.unparse(new_larger):
                yield smaller, new_smaller
    if not isinstance(before, ast.BinOp):
        return
    left, right, kept = ast.unparse(before.left), ast.unparse(before.right), ast.unparse(after)
    is_product = isinstance(before.op, ast.Mult | ast.Div)
    if not is_product and not isinstance(before.op, ast.Add | ast.Sub):
        return
    neutral = ast.Constant(1 if is_product else 0)
    is_commutative = isinstance(before.op, ast.Mult | ast.Add)
    if kept == left:
        yield before.right, neutral
    if kept == right and is_commutative:
        yield before.left, neutral
    match before.op, after:
        case (ast.Mult() | ast.Div(), ast.BinOp(a, ast.Mult() | ast.Div() as op, b)) | (
            ast.Add() | ast.Sub(),
            ast.BinOp(a, ast.Add() | ast.Sub() as op, b),
        ) if ast.unparse(a) == left:
            is_same = type(op) is type(before.op)
            inverse = ast.BinOp(neutral, ast.Div() if is_product else ast.Sub(), b)
            yield before.right, b if is_same else inverse
        case ast.Mult() | ast.Add(), ast.BinOp(a, op, b) if (
            type(op) is type(before.op) and ast.unparse(b) == right
        ):
            yield before.left, a


def _read_name(node: ast.expr) -> str:
    """Return the name that an expression is, or loads from; "" for another one."""
    match node:
        case ast.Name(name) | ast.Call(ast.Attribute(ast.Name("tl"), "load"), [ast.Name(name)]):
            return name
    return ""


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


def span_of(node: ast.expr | ast.stmt, rows: Sequence[int]) -> tuple[int, int]:
    """Return the first byte of a node, and that after it."""
    end = rows[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    return rows[node.lineno - 1] + node.col_offset, end


def expression_of(text: str) -> ast.expr | None:
    """Return a text as an expression, which may have several lines, or None if it is none."""
    try:
        return ast.parse(f"({text})", mode="eval").body
    except SyntaxError:
        return None


@lru_cache(maxsize=1 << 16)
def _plain(text: str) -> str:
    return text if text.isidentifier() else ast.unparse(expression_of(text) or ast.parse(text))


def _changes(
    statement: ast.stmt, parts: Parts, cost: int
) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the expressions of a statement with what may replace them, for one cost."""
    yield from parts.of_target(statement, cost)
    for name in ("value", "test", "iter"):
        root = getattr(statement, name, None)
        if not isinstance(root, ast.expr):
            continue
        for node in ast.walk(root) if cost < 3 else ():
            if isinstance(node, ast.expr):
                yield from _replaced(node, parts, cost)
        for node in _terms(root) if cost > 1 else ():
            added = parts.unused(node) if cost == 2 else parts.added(node)
            yield from ((node, after) for after in added)
        if cost == 2 and isinstance(root, ast.BinOp):
            yield from ((root, after) for after in parts.exchanged(root))
        if cost == 3 and isinstance(statement, ast.Assign):
            yield from ((root, after) for after in parts.selected(root))


def _replaced(node: ast.expr, parts: Parts, cost: int) -> Iterator[tuple[ast.expr, str]]:
    """Yield an expression with another operator or function for cost 1, with other names for cost 2."""
    if cost == 1:
        yield from ((node, after) for after in _other_operators(node))
        if isinstance(node, ast.Call):
            yield from ((node.func, other) for other in _FUNCTIONS.get(ast.unparse(node.func), ()))
    elif isinstance(node, ast.Name):
        yield from ((node, after) for after in parts.related(node.id))
    elif isinstance(node, ast.BinOp):
        yield from ((node, after) for after in parts.with_other_index(node))
    elif isinstance(node, ast.Call):
        yield from ((node, after) for after in parts.in_place_of(node))


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
        if isinstance(node.op, ast.Add):
            yield from (f"tl.{name}({left}, {right})" for name in ("maximum", "minimum"))
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
    if name in _UNWRAPPED:
        yield from (f"({one})" for one in arguments[:2])
    if len(arguments) == 2 and name not in _FUNCTIONS:
        named = [ast.unparse(one) for one in node.keywords]
        yield f"{name}({', '.join([arguments[1], arguments[0], *named])})"
    if name == "tl.where" and len(arguments) == 3:
        condition, first, second = arguments
        yield from (f"({first})", f"({second})", f"tl.where({condition}, {second}, {first})")
    if "cdiv" in name and len(arguments) == 2:
        yield f"(({arguments[0]}) // ({arguments[1]}))"
    if name == "float" and arguments == ["'-inf'"]:
        yield "0.0"


def _words_of(statement: ast.stmt) -> set[str]:
    """Return the words of the names of a statement, without those of the statements inside it."""
    roots = [getattr(statement, name, None) for name in ("value", "test", "iter")]
    names = [n.id for root in roots if root for n in ast.walk(root) if isinstance(n, ast.Name)]
    return set[str]().union(*(words(name) for name in names))
