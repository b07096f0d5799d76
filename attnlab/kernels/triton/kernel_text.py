"""Text of a kernel: the source of its function from ``def`` on, without common indentation.

Lines of a text count from 1. The interpreted form of a function can be compiled from a changed text.
"""

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType
from typing import Any

HEADS = ("value", "test", "iter")  # expressions of a statement that can be changed

# The global names that rewritten kernels use, of every rewriter: all are different.
RAN_MARK = "__attnlab_ran__"
IF_MARK = "__attnlab_if__"
FOR_MARK = "__attnlab_for__"
AND_CALL = "__attnlab_and__"
OR_CALL = "__attnlab_or__"
CHAIN_CALL = "__attnlab_chain__"
FOR_CALL = "__attnlab_each__"
WHILE_CALL = "__attnlab_test__"
CONTROL = "__attnlab_lockstep__"
LOOP_MAKER = "__attnlab_loop__"
WHILE_MAKER = "__attnlab_while__"

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


def tree_with_names(text: str, names: Iterable[str]) -> ast.Module:
    """Return the syntax tree of a text, with keyword parameters for further names in it."""
    tree = ast.parse(text)
    assert isinstance(tree.body[0], ast.FunctionDef)
    arguments = tree.body[0].args
    for name in names:
        arguments.kwonlyargs.append(ast.arg(arg=name))
        arguments.kw_defaults.append(ast.Constant(value=0))
    return tree


def compile_tree(function: Any, tree: ast.Module) -> Any:
    """Return the interpreted form of a function of Triton with another syntax tree; mutates the tree."""
    rewriter = function.rewriter
    tree = rewriter.ast_transformer.visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, rewriter.def_file_lineno - 1)
    return rewriter._compile_and_exec(tree)


def row_starts(text: str) -> list[int]:
    """Return the first byte of each line of a text, and its length."""
    rows = text.encode().splitlines(keepends=True)
    return list(accumulate(map(len, rows), initial=0))


def with_defaults(compiled: Any, values: Mapping[str, Any]) -> Any:
    """Return a function with other defaults of keyword parameters."""
    one = FunctionType(
        compiled.__code__, compiled.__globals__, compiled.__name__, compiled.__defaults__
    )
    one.__kwdefaults__ = {**compiled.__kwdefaults__, **values}
    one.__annotations__ = compiled.__annotations__
    return one


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


# Roles of the lines of an attention kernel, derived from its syntax tree by data flow.
#
# A role has lines, for example those whose values feed the mask of the scores. Nothing is looked up by
# the names of variables.

_DEPTH = 6  # assignments that are followed back from a use

Distances = dict[int, int]  # of lines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Assignment:
    """One statement with a value: the names that it sets, those that it uses, and what it calls."""

    line: int
    targets: frozenset[str]
    used: frozenset[str]
    calls: tuple[ast.Call, ...]
    is_update: bool


def roles(text: str) -> dict[str, Distances]:
    """Return the lines of each role in the text of a kernel, from ``def`` on, with their distances.

    Lines count from 1. A distance is the number of assignments from a line to the use: the slice of the text
    backwards from it. A branch that decides about a line has the distance of the line plus one.

    - "mask": selections by ``tl.where``, and what feeds their conditions and the masks of loads.
    - "bounds": loops, and what feeds their ranges. "address": what feeds the addresses of loads.
    - "score": dot products, and what follows them up to an exponential.
    - "update": what a loop carries from one step to the next. "carried": what else feeds that directly.
    - "output": stores, and what feeds them after the last loop. "place": stores, and what feeds their
      addresses and masks, anywhere.
    """
    function = ast.parse(text).body[0]
    found = [_assignment(node) for node in ast.walk(function) if _has_value(node)]
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)]
    wheres = list(_calls(found, "where"))
    loads, stores = list(_calls(found, "load")), list(_calls(found, "store"))
    masks = [k.value for _, call in loads for k in call.keywords if k.arg == "mask"]
    stored_masks = [k.value for _, call in stores for k in call.keywords if k.arg == "mask"]
    conditions = [call.args[0] for _, call in wheres if call.args]
    heads = [loop.iter if isinstance(loop, ast.For) else loop.test for loop in loops]
    last = max((loop.end_lineno or 0 for loop in loops), default=0)
    stored = [argument for _, call in stores for argument in call.args]
    places = [call.args[0] for _, call in stores if call.args]
    after = [one for one in found if one.line > last]
    plain = {
        "mask": _near((one.line for one, _ in wheres), found, [*masks, *stored_masks, *conditions]),
        "bounds": _near((loop.lineno for loop in loops), found, heads),
        "address": _near(
            (one.line for one, _ in loads), found, [call.args[0] for _, call in loads if call.args]
        ),
        "score": dict.fromkeys(_scores(found), 0),
        "update": {line: 0 for loop in loops for line in _carried(loop)[0]},
        "carried": {line: 1 for loop in loops for line in _carried(loop)[1]},
        "output": _near((one.line for one, _ in stores), after, stored),
        "place": _near((one.line for one, _ in stores), found, [*places, *stored_masks]),
    }
    branches = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    return {role: _with_branches(lines, branches, found) for role, lines in plain.items()}


def slice_of(text: str, line: int) -> Distances:
    """Return the lines that feed the statement at a line, with their distances; 0 is the statement.

    What feeds a loop is what feeds its range.
    """
    function = ast.parse(text).body[0]
    found = [_assignment(node) for node in ast.walk(function) if _has_value(node)]
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
    used = _names([loop.iter for loop in loops if loop.lineno == line])
    used = used.union(*(one.used for one in found if one.line == line))
    lines = {line: 0} | {at: d for at, d in _feeding(found, used).items() if at != line}
    branches = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    return _with_branches(lines, branches, found)


def overwriting(text: str) -> set[int]:
    """Return the lines that replace a value of the same block which was computed and not used."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for name in ("body", "orelse"):
            block = getattr(node, name, [])
            found |= _overwriting(block) if isinstance(block, list) else set()
    return found


def _overwriting(block: Sequence[ast.stmt]) -> set[int]:
    """Return the lines of plain assignments of a block that replace a value which no statement used."""
    unused, found = set[str](), set[int]()
    for statement in block:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        unused -= {node.id for node in names if isinstance(node.ctx, ast.Load)}
        targets = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.Assign):
            found |= {statement.lineno} if targets & unused else set()
            is_computed = not isinstance(statement.value, ast.Constant)
            unused = (unused - targets) | (targets if is_computed else set())
        else:
            unused -= targets
    return found


def _near(
    sinks: Iterable[int], found: Sequence[_Assignment], uses: Sequence[ast.expr]
) -> Distances:
    """Return the lines of uses, at the distance 0, and those that feed their names."""
    return _feeding(found, _names(uses)) | dict.fromkeys(sinks, 0)


def _with_branches(
    lines: Distances, branches: Sequence[ast.If], found: Sequence[_Assignment]
) -> Distances:
    """Return lines with the branches that decide about them, and what feeds those that are near."""
    added: Distances = {}
    for branch in branches:
        inside = [
            d for line, d in lines.items() if branch.lineno < line <= (branch.end_lineno or 0)
        ]
        if inside:
            added[branch.lineno] = min(inside) + 1
            for line, more in _feeding(found, _names([branch.test]), 2).items():
                added[line] = min(added.get(line, 99), min(inside) + 1 + more)
    return {**added, **lines}


def _has_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return)


def _assignment(node: ast.AST) -> _Assignment:
    """Return a statement with a value as what it sets and uses."""
    assert isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return)
    targets = [*node.targets] if isinstance(node, ast.Assign) else []
    targets += [node.target] if isinstance(node, ast.AugAssign) else []
    names = _names(targets)
    used = _names([node.value] if node.value is not None else [])
    calls = tuple(
        one for one in (ast.walk(node.value) if node.value else ()) if isinstance(one, ast.Call)
    )
    is_update = isinstance(node, ast.AugAssign) or bool(names & used)
    used |= names if isinstance(node, ast.AugAssign) else frozenset()
    return _Assignment(line=node.lineno, targets=names, used=used, calls=calls, is_update=is_update)


def _names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(
        one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)
    )


def _calls(found: Iterable[_Assignment], name: str) -> Iterator[tuple[_Assignment, ast.Call]]:
    """Yield the calls of ``tl.<name>`` with their statements."""
    for one in found:
        for call in one.calls:
            if ast.unparse(call.func).rpartition(".")[2] == name:
                yield one, call


def _feeding(found: Iterable[_Assignment], names: frozenset[str], depth: int = _DEPTH) -> Distances:
    """Return the lines that set some names, or what these are computed from, with the steps back to them."""
    found, lines, known = list(found), dict[int, int](), names
    for step in range(1, depth + 1):
        setting = [one for one in found if one.targets & names]
        lines = {**dict.fromkeys((one.line for one in setting), step), **lines}
        names = frozenset().union(*(one.used for one in setting)) - known
        known |= names
    return lines


def _scores(found: list[_Assignment]) -> set[int]:
    """Return dot products and what follows them, up to and with the first exponential."""
    names, lines = frozenset[str](), set[int]()
    for one in sorted(found, key=lambda one: one.line):
        words = {ast.unparse(call.func).rpartition(".")[2] for call in one.calls}
        has_exponential = any(word.startswith("exp") for word in words)
        if words & {"dot", "sum"} and not has_exponential:
            names, lines = names | one.targets, lines | {one.line}
        elif (one.used | one.targets) & names:
            lines.add(one.line)
            names = names if has_exponential else names | one.targets
    return lines


def _carried(loop: ast.For | ast.While) -> tuple[set[int], set[int]]:
    """Return the lines of a loop that update what it carries, and those that feed them directly.

    A line that computes the next value from the carried one, for a later assignment, is an update, too.
    """
    inside = [_assignment(node) for node in ast.walk(loop) if _has_value(node)]
    inside.sort(key=lambda one: one.line)
    carried, done = set[str](), set[str]()
    for one in inside:
        carried |= one.used - done
        done |= one.targets
    carried &= done
    updates = {one.line for one in inside if one.targets & carried or one.is_update}
    names = frozenset().union(*(one.used for one in inside if one.line in updates))
    feeding = [one for one in inside if one.targets & names]
    updates |= {one.line for one in feeding if one.used & carried}
    return updates, {one.line for one in feeding} - updates
