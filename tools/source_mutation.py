"""Mutate the kernels of a vLLM by rule: one small change of one expression per mutant.

The rules change comparisons, masks, arithmetic, constants, strides, initial values, rescaling, reductions and
selections: in Triton sources inside functions that are decorated with ``triton.jit``, in HIP sources inside
the part for gfx9.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_FUNCTIONS = {
    "tl.exp": "tl.exp2",
    "tl.exp2": "tl.exp",
    "tl.math.exp2": "tl.math.exp",
    "tl.max": "tl.min",
    "tl.min": "tl.max",
    "tl.maximum": "tl.minimum",
    "tl.minimum": "tl.maximum",
    "min": "max",
    "max": "min",
}

# Rules for HIP: what a regular expression matches, and what replaces it.
_HIP_RULES = (
    ("comparison", r"(?<=[\w)]) < (?=[\w(])", (" <= ",)),
    ("comparison", r"(?<=[\w)]) <= (?=[\w(])", (" < ",)),
    ("comparison", r"(?<=[\w)]) >= (?=[\w(])", (" > ",)),
    ("comparison", r"(?<=[\w)]) > (?=[\w(])", (" >= ",)),
    ("comparison", r" == ", (" != ",)),
    ("mask", r" && [\w ()<>=+*-]+(?=\))", ("",)),
    ("sum", r"(?<=[\w)]) \+ (?=[\w(])", (" - ",)),
    ("sum", r"(?<=[\w)]) - (?=[\w(])", (" + ",)),
    ("division", r"(?<=[\w)]) / (?=[\w(])", (" % ",)),
    ("division", r"(?<=[\w)]) % (?=[\w(])", (" / ",)),
    ("factor", r" \* \w+(?=[;,)\] ])", ("",)),
    ("constant", r"(?<== )[012](?=;)", ("1", "0")),
    ("stride", r"kv_block_stride", ("kv_head_stride",)),
    ("stride", r"kv_head_stride", ("kv_block_stride",)),
    ("initial", r"-FLT_MAX", ("0.0f",)),
    ("function", r"fmaxf(?=\()", ("fminf",)),
    ("function", r"__expf(?=\()", ("exp2f",)),
    ("function", r"MIN(?=\()", ("MAX",)),
)
_HIP_SECTION = re.compile(r"^#if defined\(__HIP__GFX9__\)$(.*?)^#elif", re.MULTILINE | re.DOTALL)
_HIP_SKIPPED = re.compile(r"^\s*(//|#|\*|static_assert|assert|template|constexpr)|^\S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of a source text: its rule, its line, and the bytes ``start`` to ``end`` to replace."""

    rule: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the source text with the change, with as many lines as before."""
        data = text.encode()
        first = data[: self.start].decode().rpartition("\n")[2]
        margin = first[: len(first) - len(first.lstrip())]  # a row without it would end a block
        rows = f"\n{margin}" * (self.before.count("\n") - self.after.count("\n"))
        after = f"{self.after[:-1]}{rows})" if self.after.endswith(")") else self.after + rows
        return (data[: self.start] + after.encode() + data[self.end :]).decode()

    @property
    def text(self) -> str:
        """Return the change in one line."""
        before, after = (" ".join(part.split()) for part in (self.before, self.after))
        return f"line {self.line}: {before} -> {after} ({self.rule})"


def mutants(text: str) -> list[Mutant]:
    """Return every mutant of a source text, in the order of the text."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and _is_kernel(function):
            found += list(_of_function(function, text))
    return sorted({(m.start, m.end, m.after): m for m in found}.values(), key=lambda m: m.start)


def hip_mutants(text: str) -> list[Mutant]:
    """Return every mutant of a HIP source text, in the order of the text."""
    section = _HIP_SECTION.search(text)
    if section is None:
        return []
    kernels = section[1].find("__global__")  # the functions before it convert formats
    found, start = [], section.start(1) + kernels
    line = text[:start].count("\n") + 1
    for source in section[1][kernels:].splitlines(keepends=True):
        if not _HIP_SKIPPED.match(source):
            found += list(_of_line(source, start, line))
        start, line = start + len(source), line + 1
    return found


def _of_line(source: str, start: int, line: int) -> Iterator[Mutant]:
    """Yield the mutants of one line of HIP; ``start`` is its first character's index."""
    for rule, pattern, replacements in _HIP_RULES:
        for match in re.finditer(pattern, source):
            for after in replacements:
                if after != match[0]:
                    changed = source[: match.start()] + after + source[match.end() :]
                    yield Mutant(
                        rule=rule,
                        line=line,
                        start=start,
                        end=start + len(source),
                        before=source,
                        after=changed,
                    )


def sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` mutants: the rule first, then one of its mutants, so that every rule occurs."""
    rng = random.Random(seed)
    by_rule: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_rule.setdefault(mutant.rule, []).append(mutant)
    for group in by_rule.values():
        rng.shuffle(group)
    drawn: list[Mutant] = []
    while len(drawn) < min(count, len(found)):
        rules = sorted(rule for rule, group in by_rule.items() if group)
        rng.shuffle(rules)
        drawn += [by_rule[rule].pop() for rule in rules]
    return drawn[:count]


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _of_function(function: ast.FunctionDef, text: str) -> Iterator[Mutant]:
    """Yield the mutants of one kernel."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    strides = [arg.arg for arg in function.args.args if "stride" in arg.arg]

    def make(rule: str, node: ast.expr | ast.stmt, after: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        before = text.encode()[start:end].decode()
        return Mutant(rule=rule, line=node.lineno, start=start, end=end, before=before, after=after)

    for statement in function.body:
        for node in ast.walk(statement):
            for rule in _RULES:
                for changed, after in rule(node, strides):
                    yield make(rule.__name__.strip("_"), changed, f"({after})" if after else "")


_Change = tuple[ast.expr, str]


def _comparison(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Move a bound by one, or negate an equality."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, f"({left}) {_COMPARE[type(node.ops[0])]} ({right})"


def _mask(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Leave out one condition of a mask."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield node, ast.unparse(node.left)
        yield node, ast.unparse(node.right)


def _sum(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Exchange plus and minus, or leave out the second term."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield node, f"({ast.unparse(node.left)}) {sign} ({ast.unparse(node.right)})"
        yield node, ast.unparse(node.left)


def _division(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Exchange the quotient and the remainder."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
        sign = "%" if isinstance(node.op, ast.FloorDiv) else "//"
        yield node, f"({ast.unparse(node.left)}) {sign} ({ast.unparse(node.right)})"


def _factor(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Leave out a factor: a scale, a stride, or the rescaling of a sum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield node, ast.unparse(node.left)
        if isinstance(node.op, ast.Mult):
            yield node, ast.unparse(node.right)


def _constant(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Change a small integer by one."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield node, str(1 if node.value == 0 else node.value - 1)


def _stride(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Use another stride of the kernel."""
    if isinstance(node, ast.Name) and node.id in strides and len(strides) > 1:
        yield node, strides[(strides.index(node.id) + 1) % len(strides)]


def _initial(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Start a sum at 1, or a maximum at 0."""
    if isinstance(node, ast.Call):
        text = ast.unparse(node)
        if text.startswith("tl.zeros("):
            yield node, f"{text} + 1"
        if text.startswith("float('-inf')"):
            yield node, "0.0"


def _function(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Call a related function."""
    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in _FUNCTIONS:
        yield node.func, _FUNCTIONS[name]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.cdiv" and len(node.args) == 2:
        yield node, f"({ast.unparse(node.args[0])}) // ({ast.unparse(node.args[1])})"


def _selection(node: ast.AST, strides: Sequence[str]) -> Iterator[_Change]:
    """Take one branch of a selection always."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.where" and len(node.args) == 3:
        yield node, ast.unparse(node.args[1])
        yield node, ast.unparse(node.args[2])


_RULES: tuple[Callable[[ast.AST, Sequence[str]], Iterator[_Change]], ...] = (
    _comparison,
    _mask,
    _sum,
    _division,
    _factor,
    _constant,
    _stride,
    _initial,
    _function,
    _selection,
)
