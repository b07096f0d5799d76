"""Run the programs of a launch together, in batches.

A launch that lockstep does not run leaves its tensors as they were, and gives the reason. Nothing of such an
attempt is recorded: the launch then runs one program after another.
"""

import ast
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlab.kernels.triton.coverage import is_measuring, marked_tree
from attnlab.kernels.triton.kernel_text import text_of
from attnlab.kernels.triton.lockstep import control
from attnlab.kernels.triton.lockstep.control import Batch, Diverged, Refused
from attnlab.kernels.triton.lockstep.memory import MOST_PROGRAMS, Tensors, patch_memory
from attnlab.kernels.triton.lockstep.notes import Notes
from attnlab.kernels.triton.lockstep.operations import Operations
from attnlab.kernels.triton.lockstep.reads import Reads
from attnlab.kernels.triton.lockstep.rewriting import compile_lockstep
from attnlab.kernels.triton.run_log import Memory, RunLog, Trace

Program = tuple[int, int, int]

_ORDER = (0, 2, 1)  # of the grid's axes: programs of neighbouring heads, axis 1, are alike
_MOST = 1024  # programs of a batch
_MOST_ELEMENTS = 1 << 20  # of the largest value of a batch
_BYTES = 512  # of memory per element of the largest value, with all others that live at a time

_ON: ContextVar[bool] = ContextVar("lockstep", default=True)
_FORMS: dict[tuple[Any, bool], Any] = {}  # compiled functions, or the reason of a refusal


@contextmanager
def lockstep(is_on: bool) -> Iterator[None]:
    """Run the programs of launches together inside the block, or one after another."""
    token = _ON.set(is_on)
    try:
        yield
    finally:
        _ON.reset(token)


def is_lockstep() -> bool:
    """Answer whether launches run their programs together here."""
    return _ON.get()


@dataclass(frozen=True, slots=True)
class Form:
    """A function of Triton as a batch runs it."""

    function: Any

    def rewrite(self) -> Any:
        """Return the rewritten function; raise Refused if it cannot be rewritten."""
        key = (self.function.fn, is_measuring())
        if key not in _FORMS:
            try:
                text = text_of(self.function)
                tree = marked_tree(self.function) if is_measuring() else ast.parse(text)
                _FORMS[key] = compile_lockstep(self.function, tree)
            except Refused as refused:
                _FORMS[key] = str(refused)
        found = _FORMS[key]
        if isinstance(found, str):
            raise Refused(f"{found} in {self.function.fn.__name__}")
        return found


@dataclass(slots=True, eq=False)
class Extension:
    """The patches of the language for a batch, after those of the lab's interpreter."""

    operations: Operations
    tensors: Tensors
    interpreter: Any

    def patch_language(self, scope: Any) -> None:
        """Patch the language that the functions of a module see."""
        self.operations.patch_language(scope)

    def patch_builder(self, scope: Any) -> None:
        """Patch the builder, once for a launch."""
        self.operations.patch_builder(scope)
        patch_memory(self.interpreter, scope, self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Together:
    """A launch whose programs run together.

    - ``function``: of Triton. ``converted``: its arguments as a program gets them. ``programs``: those that
      run, in order. ``trace``: the regions whose accesses are recorded, with ``reads`` that it changes.
    - ``prepare``: patches the language for a log and an extension, inside a ``with`` block. ``observed``: the
      log of the launch.
    """

    function: Any
    arguments: Mapping[str, Any]
    converted: Mapping[str, Any]
    programs: Sequence[Program]
    trace: Trace | None
    prepare: Callable[[Any, Any], Any]
    on_programs: Callable[[int, int], None]
    observed: RunLog

    def run(self) -> str:
        """Run all programs; return "", or why they must run one after another.

        Mutates the tensors, ``trace`` and ``observed`` only in the first case.
        """
        from triton.runtime import interpreter

        if any(hasattr(value, "block_shape") for value in self.arguments.values()):
            return "a tensor descriptor"
        reads = None if self.trace is None else Reads(self.trace.regions)
        tensors = Tensors(Memory(self.arguments), Notes(), reads)
        extension = Extension(Operations(interpreter), tensors, interpreter)
        try:
            kernel = Form(self.function).rewrite()
            with self.prepare(tensors.notes, extension), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                done = 0
                for size in self._batches(kernel, interpreter, tensors):
                    done += size
                    self.on_programs(done, len(self.programs))
        except _Failed as failed:
            tensors.undo()
            return str(failed)
        except Refused as refused:
            return str(refused)
        finally:
            control.begin(None)
        tensors.notes.tell(self.observed)
        if reads is not None and self.trace is not None:
            for key, slots in reads.by_program():
                self.trace.reads.setdefault(key, set()).update(slots)
        return ""

    def _batches(self, kernel: Any, interpreter: Any, tensors: Tensors) -> Iterator[int]:
        """Run the programs in batches; yield the number of programs of each that ended."""
        ids = np.array(self.programs, dtype=np.int32)
        order = np.lexsort([ids[:, axis] for axis in reversed(_ORDER)])
        todo = [
            order[i : i + _MOST] for i in reversed(range(0, len(order), min(_MOST, MOST_PROGRAMS)))
        ]
        limit = most_elements()
        while todo:
            numbers = todo.pop()
            batch = Batch(ids[numbers], numbers, interpreter, limit=limit)
            control.begin(batch)
            tensors.forget()
            try:
                kernel(**self.converted)
                tensors.commit()
            except Diverged as diverged:
                todo += [numbers[group] for group in reversed(diverged.groups)]
                continue
            except Refused as refused:
                raise _Failed(str(refused)) from refused
            except MemoryError as error:
                if len(numbers) == 1:
                    raise _Failed("too little memory") from error
                todo += np.array_split(numbers, 2)
                continue
            except Exception as error:  # the same program alone raises it, or does not
                raise _Failed(f"{type(error).__name__}: {error}") from error
            yield len(numbers)


class _Failed(Exception):
    """A batch failed."""


def most_elements() -> int:
    """Return how many elements the largest value of a batch may have, for the memory that is free."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _MOST_ELEMENTS
    return max(1, min(_MOST_ELEMENTS, free // _BYTES))
