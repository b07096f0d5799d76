"""Run many edits of a kernel at once: each edit is one more copy of the programs of a batch.

A function is compiled with many edits. The expression of an edited statement becomes a call of
:func:`attnlab.kernels.triton.lockstep.control.varied` with a function for each edit. So the copies of a program
share what is computed before the edits differ. The stores of each copy are kept apart.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.kernels.triton.kernel_text import HEADS, Change, row_starts, statements
from attnlab.kernels.triton.lockstep import control
from attnlab.kernels.triton.lockstep.control import Batch, Diverged, Refused
from attnlab.kernels.triton.lockstep.launch import Extension, Form, most_elements
from attnlab.kernels.triton.lockstep.memory import Store, Tensors
from attnlab.kernels.triton.lockstep.notes import Notes
from attnlab.kernels.triton.lockstep.operations import Operations
from attnlab.kernels.triton.lockstep.rewriting import CONTROL, compile_lockstep
from attnlab.kernels.triton.probe import LaunchLog
from attnlab.kernels.triton.run_log import Budget, Memory, TooLong, limited

Program = tuple[int, int, int]


def compile_edits(
    function: Any, text: str, changes: Mapping[int, tuple[int, Change]]
) -> tuple[Any, frozenset[int]]:
    """Return a function of Triton with edits, as a batch runs it, and the numbers of those that it has.

    ``changes``: by number of the edit, the line of the statement in the text, and what is changed. What is no
    single expression of a statement, or no Python, is left out. Raises Refused if lockstep cannot run the
    function.
    """
    tree, rows = ast.parse(text), row_starts(text)
    by_line: dict[int, list[tuple[int, Change]]] = {}
    for number, (line, change) in changes.items():
        by_line.setdefault(line, []).append((number, change))
    done = set[int]()
    assert isinstance(tree.body[0], ast.FunctionDef)
    for statement in list(statements(tree.body[0].body)):
        for name in HEADS if statement.lineno in by_line else ():
            root = getattr(statement, name, None)
            if isinstance(root, ast.expr):
                parsed = dict(_parsed(text.encode(), rows, root, by_line[statement.lineno]))
                if parsed:
                    setattr(statement, name, _varied(root, parsed, isinstance(statement, ast.Assign)))
                    done |= parsed.keys()
    return compile_lockstep(function, tree), frozenset(done)


def _parsed(
    data: bytes, rows: Sequence[int], root: ast.expr, changes: Sequence[tuple[int, Change]]
) -> Iterator[tuple[int, ast.expr]]:
    """Yield the changes of an expression of a text that are Python, with their numbers."""
    assert root.end_lineno is not None
    assert root.end_col_offset is not None
    begin, end = rows[root.lineno - 1] + root.col_offset, rows[root.end_lineno - 1] + root.end_col_offset
    for number, (start, stop, after) in changes:
        if begin <= start < stop <= end:
            whole = data[begin:start] + after.encode() + data[stop:end]
            try:
                yield number, ast.parse(b"(" + whole + b")", mode="eval").body
            except SyntaxError:
                continue


def _varied(root: ast.expr, others: Mapping[int, ast.expr], is_assigned: bool) -> ast.expr:
    """Return the call for an expression and its edits; numbers that are assigned become scalars of Triton."""
    call: Any = ast.parse(f"{CONTROL}.varied(0, 0)", mode="eval").body
    numbers, values = (ast.Tuple(elts=[], ctx=ast.Load()) for _ in range(2))
    for number, value in others.items():
        numbers.elts.append(ast.Constant(value=number))
        values.elts.append(_deferred(value, is_assigned))
    call.args = [_deferred(root, is_assigned), numbers, values]
    for node in ast.walk(call):
        if isinstance(node, ast.expr):
            ast.copy_location(node, root)
    return call


def _deferred(value: ast.expr, is_assigned: bool) -> ast.expr:
    text = "interpreter_semantic.to_tensor(0, False)" if is_assigned else "0"
    found: Any = ast.parse(f"lambda: {text}", mode="eval").body
    if is_assigned:
        found.body.args[0] = value
    else:
        found.body = value
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

    def apply(self) -> None:
        """Write to the tensors."""
        for one in self.stores:
            one.storage.bytes.view(one.bits.dtype)[one.index] = one.bits


Ended = tuple[int, Writes | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditRun:
    """Programs of a launch that run with each of several edits.

    An active probe has the edited function. ``prepare``: as in :class:`attnlab.kernels.triton.lockstep.launch.Together`.
    ``budget``: makes the limits of a batch.
    """

    launch: LaunchLog
    programs: Sequence[Program]
    prepare: Callable[[Any, Any], Any]
    budget: Callable[[], Budget]

    def run(self, edits: Sequence[int]) -> list[Ended]:
        """Return the edits that run together with others, each with what its programs store; None if it
        raises something.

        The tensors are not changed. What an edit does that is left out is not known.
        """
        todo = [np.arange(len(edits) * len(self.programs))]
        ended, raised = dict[int, list[Store]](), set[int]()
        try:
            kernel = Form(self.launch.function).rewrite()
        except Refused:
            return []
        while todo:
            places = todo.pop()
            if len(set(self._edits(edits, places).tolist())) > 1:
                self._step(kernel, edits, places, todo, ended, raised)
        found: list[Ended] = [(number, None) for number in sorted(raised)]
        for i, number in enumerate(edits):
            span = range(i * len(self.programs), (i + 1) * len(self.programs))
            if number not in raised and all(place in ended for place in span):
                found.append((number, Writes([one for place in span for one in ended[place]])))
        return found

    def _edits(self, edits: Sequence[int], places: Any) -> Any:
        return np.array(edits, dtype=np.int64)[places // len(self.programs)]

    def _step(
        self,
        kernel: Any,
        edits: Sequence[int],
        places: Any,
        todo: list[Any],
        ended: dict[int, list[Store]],
        raised: set[int],
    ) -> None:
        """Run a batch of copies of programs; add the stores of each to ``ended``, and edits that raise to
        ``raised``. If the batch does not end, add its parts to ``todo``."""
        from triton.runtime import interpreter

        numbers = self._edits(edits, places)
        ids = np.array(self.programs, dtype=np.int32)[places % len(self.programs)]
        notes = Notes(budget=self.budget())
        tensors = Tensors(Memory(self.launch.arguments), notes)
        extension = Extension(Operations(interpreter), tensors, interpreter)
        batch = Batch(ids, places, interpreter, limit=most_elements(), edits=numbers)
        control.begin(batch)
        try:
            with self.prepare(notes, extension), limited(notes.budget):
                kernel(**self.launch.converted)
            file = kernel.__code__.co_filename
            raised |= {n for n, error in batch.raised.items() if _is_of_kernel(error, file)}
            for at, place in enumerate(places.tolist()):
                if int(numbers[at]) not in batch.raised:
                    ended[place] = list(_of_program(tensors.stores, at))
        except Diverged as diverged:
            todo += [places[group] for group in diverged.groups]
        except TooLong:
            slow = set(numbers[batch.is_active].tolist())
            todo.append(places[[number not in slow for number in numbers.tolist()]])
        except Exception:  # of one of them, or of lockstep
            kinds = np.unique(numbers)
            is_first = numbers < kinds[len(kinds) // 2]
            todo += [places[is_first], places[~is_first]]
        finally:
            control.begin(None)


def _is_of_kernel(error: Exception, kernel: str) -> bool:
    """Answer whether an edited expression, or Triton's language, raised an error, and not lockstep.

    A program alone raises it, too: the language looks at types, which do not depend on the number of programs.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = Path("" if trace is None else trace.tb_frame.f_code.co_filename)
    return file.parent.parts[-2:] == ("triton", "language") or str(file) == str(kernel)


def _of_program(stores: Sequence[Store], program: int) -> Iterator[Store]:
    """Yield what a program of the batch stores; the stores are in the order of programs."""
    for one in stores:
        first, last = np.searchsorted(one.program, [program, program + 1])
        if first < last:
            span = slice(first, last)
            yield Store(one.storage, one.index[span], one.program[span], one.bits[span])
