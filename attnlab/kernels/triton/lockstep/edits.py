"""Run many edits of a kernel at once: each edit is one more copy of the programs of a batch.

A function is compiled once for many edits. The expression of an edited statement becomes a call of
:func:`attnlab.kernels.triton.lockstep.control.varied`, which asks a :class:`Site` for the function of each
edit. So the copies of a program share what is computed before the edits differ. The stores of each copy are
kept apart.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnlab.kernels.triton.kernel_text import (
    CONTROL,
    HEADS,
    Change,
    row_starts,
    statements,
    tree_with_names,
    with_defaults,
)
from attnlab.kernels.triton.lockstep import control
from attnlab.kernels.triton.lockstep.control import Batch, Diverged, NoAddress, Part, Refused
from attnlab.kernels.triton.lockstep.launch import Form, extension_of, most_elements
from attnlab.kernels.triton.lockstep.memory import Store, Tensors
from attnlab.kernels.triton.lockstep.notes import Notes
from attnlab.kernels.triton.lockstep.rewriting import (
    compile_lockstep,
    loaded,
    lockstep_transformer,
    stored,
    with_range,
)
from attnlab.kernels.triton.probe import LaunchLog
from attnlab.kernels.triton.run_log import Budget, Memory, TooLong, limited, raised_in

Program = tuple[int, int, int]
_SITES = "__attnlab_sites__"  # a parameter of a function with edits
_NO_EDIT = -1  # the number of the unchanged programs
_MOST = 64  # edits of a batch


def compile_edits(
    function: Any, text: str, changes: Mapping[int, Sequence[Change]]
) -> tuple[Any, frozenset[int]]:
    """Return a function of Triton with edits, as a batch runs it, and the numbers of those that it has.

    ``changes``: of each edit, by its number. An edit of more than expressions of statements, or that is no
    Python, is left out. Raises Refused if lockstep cannot run the function.
    """
    tree, rows = tree_with_names(text, [_SITES]), row_starts(text)
    assert isinstance(tree.body[0], ast.FunctionDef)
    heads = [
        _Head(
            statement, name, root, rows[root.lineno - 1] + root.col_offset, rows[last - 1] + after
        )
        for statement in statements(tree.body[0].body)
        for name in HEADS
        if isinstance(root := getattr(statement, name, None), ast.expr)
        and (last := root.end_lineno) is not None
        and (after := root.end_col_offset) is not None
    ]
    given = tree.body[0].args
    arguments = [one.arg for one in (*given.args, *given.kwonlyargs)]
    variables = {*arguments, *stored(tree.body[0].body)}
    edited = [dict[int, ast.expr]() for _ in heads]
    done = set[int]()
    for number, several in changes.items():
        places = [_head_of(heads, change) for change in several]
        parsed = {
            at: heads[at].parsed(text, [c for c, i in zip(several, places, strict=True) if i == at])
            for at in set(places)
            if at is not None
        }
        if None not in places and None not in parsed.values():
            done.add(number)
            for at, value in parsed.items():
                edited[at][number] = value
    sites = list[Site]()
    for head, others in zip(heads, edited, strict=True):
        if others:
            site = Site(head=head, function=function, edits=others, variables=variables)
            setattr(head.statement, head.name, site.call(len(sites)))
            sites.append(site)
    return with_defaults(compile_lockstep(function, tree), {_SITES: sites}), frozenset(done)


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """An expression of a statement, and where it begins and ends in the text, in bytes."""

    statement: ast.stmt
    name: str
    root: ast.expr
    begin: int
    end: int

    def parsed(self, text: str, changes: Sequence[Change]) -> Any:
        """Return the expression with some changes, or None if it is no Python."""
        data = text.encode()[: self.end]
        for start, stop, after in sorted(changes, reverse=True):
            data = data[:start] + after.encode() + data[stop:]
        try:
            return ast.parse(b"(" + data[self.begin :] + b")", mode="eval").body
        except SyntaxError:
            return None


def _head_of(heads: Sequence[_Head], change: Change) -> int | None:
    """Return the index of the expression that has all of a change, or None."""
    start, stop, _ = change
    return next((i for i, one in enumerate(heads) if one.begin <= start < stop <= one.end), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """An expression of a function, ``head``, and what stands in its place with each of some edits.

    ``variables``: those of the function.
    """

    head: _Head
    function: Any
    edits: Mapping[int, ast.expr]
    variables: set[str]
    _parts: dict[int, Part] = field(default_factory=dict)

    def call(self, index: int) -> ast.expr:
        """Return the call for the expression and its edits; ``index`` is that of this site."""
        names = sorted(self.variables & loaded(ast.Tuple([self.head.root, *self.edits.values()])))
        text = f"{CONTROL}.varied(locals(), 0, {_SITES}[{index}], lambda: ({', '.join(names)}))"
        call: Any = ast.parse(text, mode="eval").body
        call.args[1] = self._deferred(self.head.root)
        for node in ast.walk(call):
            if isinstance(node, ast.expr):
                ast.copy_location(node, self.head.root)
        return call  # type: ignore[no-any-return]

    def part(self, number: int) -> Part:
        """Return the names of the variables that an edited expression reads, and it as their function."""
        if number not in self._parts:
            rewriter, value = self.function.rewriter, self._deferred(self.edits[number])
            value = lockstep_transformer(type(rewriter.ast_transformer)).visit(value)
            line = self.head.root.lineno + rewriter.def_file_lineno - 1
            for node in ast.walk(value):
                if isinstance(node, ast.expr):
                    node.lineno = node.end_lineno = line
                    node.col_offset = node.end_col_offset = 0
            code = compile(
                ast.Expression(ast.fix_missing_locations(value)), rewriter.filename, "eval"
            )
            self._parts[number] = eval(code, self.function.fn.__globals__)
        return self._parts[number]

    def _deferred(self, value: ast.expr) -> Any:
        """Return the expression for the names of the variables that one reads, and it as their function.

        Numbers that are assigned become scalars of Triton, and conditions bools.
        """
        around = f"{CONTROL}.decided(0)" if self.head.name == "test" else "0"
        if isinstance(self.head.statement, ast.Assign):
            around = "interpreter_semantic.to_tensor(0, False)"
        names = sorted(self.variables & loaded(value))
        text = f"({tuple(names)!r}, lambda {', '.join(names)}: {around})"
        found: Any = ast.parse(text, mode="eval").body
        function = found.elts[1]
        if self.head.name == "iter":
            value = with_range(value)
        if around != "0":
            function.body.args[0] = value
        else:
            function.body = value
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """What the programs stored with one edit, in the order in which one after the other stores it."""

    stores: list[Store]

    def addresses(self) -> Iterator[Any]:
        """Yield the addresses that are written, uint64."""
        for one in self.stores:
            size = one.bits.dtype.itemsize
            yield np.uint64(one.storage.own) + one.index.astype(np.uint64) * np.uint64(size)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the places and the bits that are stored."""
        return tuple(
            (one.storage.own, one.index.tobytes(), one.bits.tobytes()) for one in self.stores
        )

    def apply(self) -> None:
        """Write to the tensors."""
        for one in self.stores:
            one.storage.bytes.view(one.bits.dtype)[one.index] = one.bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditRun:
    """Programs of a launch that run with each of several edits.

    An active probe has the edited function. ``prepare``: as in
    :class:`attnlab.kernels.triton.lockstep.launch.Together`. ``budget``: makes the limits of a batch.
    """

    launch: LaunchLog
    programs: Sequence[Program]
    prepare: Callable[[Any, Any], Any]
    budget: Callable[[], Budget]

    def run(self, edits: Sequence[int]) -> dict[int, Writes | None]:
        """Return the edits that run together with their neighbours, each with what its programs store.

        None stands for an edit that raises something.

        The tensors are not changed. What an edit does that is left out is not known.
        """
        edits, count = [*edits, _NO_EDIT], len(self.programs)
        every = np.arange(len(edits) * count)
        todo = [(every[i : i + _MOST * count], False) for i in range(0, len(every), _MOST * count)]
        ended, raised = dict[int, list[Store]](), set[int]()
        try:
            kernel = Form(self.launch.function).rewrite()
        except Refused:
            return {}
        while todo:
            self._step(kernel, edits, *todo.pop(), todo, ended, raised)
        found: dict[int, Writes | None] = dict.fromkeys(raised)
        for i, number in enumerate(edits[:-1]):
            span = range(i * count, (i + 1) * count)
            if number not in raised and all(place in ended for place in span):
                found[number] = Writes([one for place in span for one in ended[place]])
        return found

    def _edits(self, edits: Sequence[int], places: Any) -> Any:
        return np.array(edits, dtype=np.int64)[places // len(self.programs)]

    def _step(
        self,
        kernel: Any,
        edits: Sequence[int],
        places: Any,
        is_alike: bool,
        todo: list[tuple[Any, bool]],
        ended: dict[int, list[Store]],
        raised: set[int],
    ) -> None:
        """Run a batch of copies of programs; add the stores of each to ``ended``, and edits that raise to
        ``raised``. If the batch does not end, add its parts to ``todo``.

        ``is_alike``: the edits have values of one type, so that the language raises for all or none.
        """
        from triton.runtime import interpreter

        numbers, file = self._edits(edits, places), kernel.__code__.co_filename
        kinds = np.unique(numbers)
        ids = np.array(self.programs, dtype=np.int32)[places % len(self.programs)]
        budget = self.budget()
        notes = Notes(budget=budget)
        tensors = Tensors(Memory(self.launch.arguments), notes)
        batch = Batch(
            ids, places, interpreter, tensors, limit=most_elements(), edits=numbers, budget=budget
        )
        control.begin(batch)
        try:
            with self.prepare(notes, extension_of(interpreter)), limited(budget):
                kernel(**self.launch.converted)
            raised |= {n for n, error in batch.raised.items() if _is_of_kernel(error, file)}
            unclear = set(batch.raised).union(batch.skipped, *batch.apart)
            for at, place in enumerate(places.tolist()):
                if int(numbers[at]) not in unclear:
                    ended[place] = list(_of_program(tensors.stores, at))
            for group in batch.apart:
                left = np.isin(numbers, [*set(group) - batch.raised.keys()])
                todo += [(places[left], True)] if left.any() else []
        except Diverged as diverged:
            todo += [(places[group], is_alike) for group in diverged.groups]
        except TooLong:
            slow = numbers[batch.is_active].tolist()
            left = ~np.isin(numbers, [*slow, *batch.skipped])
            todo += [(places[left], is_alike)] if left.any() else []
        except Exception as error:  # of one of them, or of lockstep
            is_first = numbers < kinds[len(kinds) // 2]
            if (is_alike or len(kinds) == 1) and _is_of_kernel(error, file):
                raised |= {*kinds.tolist()}
            elif len(kinds) > 1:
                todo += [(places[is_first], is_alike), (places[~is_first], is_alike)]
        finally:
            control.begin(None)


def _is_of_kernel(error: Exception, kernel: str) -> bool:
    """Answer whether an edited expression, or Triton's language, raised an error, and not lockstep.

    A program alone raises it, too: the language looks at types, which are those of one program.
    """
    file = raised_in(error)
    is_known = isinstance(error, NameError | NoAddress)  # also a variable that is not set yet
    return is_known or file.parent.parts[-2:] == ("triton", "language") or str(file) == kernel


def _of_program(stores: Sequence[Store], program: int) -> Iterator[Store]:
    """Yield what a program of the batch stores; the stores are in the order of programs."""
    for one in stores:
        first, last = np.searchsorted(one.program, [program, program + 1])
        if first < last:
            span = slice(first, last)
            yield Store(one.storage, one.index[span], one.program[span], one.bits[span])
