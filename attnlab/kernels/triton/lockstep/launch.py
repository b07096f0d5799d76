"""Run the programs of a launch together, in batches.

A launch that lockstep does not run leaves its tensors as they were, and gives the reason. Nothing of such an
attempt is recorded: the launch then runs one program after another.
"""

import ast
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlab.kernels.child_process import fork
from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.coverage import is_measuring, marked_tree
from attnlab.kernels.triton.kernel_text import text_of
from attnlab.kernels.triton.lockstep import control
from attnlab.kernels.triton.lockstep.control import Batch, Diverged, Refused
from attnlab.kernels.triton.lockstep.memory import Part, Tensors, patch_memory
from attnlab.kernels.triton.lockstep.notes import Notes, Recorder
from attnlab.kernels.triton.lockstep.operations import Operations
from attnlab.kernels.triton.lockstep.rewriting import compile_lockstep
from attnlab.kernels.triton.probe import Probe, current_probe
from attnlab.kernels.triton.run_log import Memory, RunLog, limited

Program = tuple[int, int, int]

_ORDER = (0, 2, 1)  # of the grid's axes: programs of neighbouring heads, axis 1, are alike
MOST = 256  # programs of a batch, at first
_MOST_ELEMENTS = 1 << 20  # of the largest value of a batch
_BYTES = 512  # of memory per element of the largest value, with all others that live at a time

_ON: ContextVar[bool] = ContextVar("lockstep", default=True)
_FORMS: dict[tuple[Any, bool], Any] = {}  # compiled functions, or the reason of a refusal


def using_lockstep(is_on: bool) -> AbstractContextManager[bool]:
    """Run the programs of launches together inside the block, or one after another."""
    return setting(_ON, is_on)


def is_lockstep() -> bool:
    """Answer whether launches run their programs together here."""
    return _ON.get()


@dataclass(frozen=True, slots=True)
class Form:
    """A function of Triton as a batch runs it."""

    function: Any

    def rewrite(self) -> Any:
        """Return the rewritten function, or that of an active probe; raise Refused if it cannot be
        rewritten."""
        probe = current_probe()
        if probe is not None and (own := self._of_probe(probe)) is not None:
            return own
        is_marked = probe is None and is_measuring()
        key = (self.function.fn, is_marked)
        if key not in _FORMS:
            try:
                text = text_of(self.function)
                tree = marked_tree(self.function) if is_marked else ast.parse(text)
                _FORMS[key] = compile_lockstep(self.function, tree)
            except Refused as refused:
                _FORMS[key] = str(refused)
        found = _FORMS[key]
        if isinstance(found, str):
            raise Refused(f"{found} in {self.function.fn.__name__}")
        return found

    def _of_probe(self, probe: Probe) -> Any:
        """Return the function that a probe runs in place of this one, or None."""
        if self.function.fn in probe.together:
            return probe.together[self.function.fn]
        if self.function.fn in probe.edited:
            raise Refused("an edited function")
        return probe.of_text(self.function, compile_lockstep)


class Extension(Operations):
    """The patches of the language for a batch, after those of the lab's interpreter."""

    name = "lockstep"

    def patch_builder(self, scope: Any) -> None:
        """Patch the builder, once for a launch."""
        super().patch_builder(scope)
        patch_memory(self._interpreter, scope)


@functools.cache
def extension_of(interpreter: Any) -> Extension:
    """Return the patches for an interpreter."""
    return Extension(interpreter)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Together:
    """A launch whose programs run together.

    - ``function``: of Triton. ``converted``: its arguments as a program gets them. ``programs``: those that
      run, in order. ``reads``: records what they access, or None.
    - ``prepare``: patches the language for a log and an extension, inside a ``with`` block. ``observed``: the
      log of the launch. ``processes``: as in :class:`attnlab.kernels.triton.launch_plan.LaunchPlan`,
      which share what is left after ``alone_s`` seconds. ``on_stored``: called with the addresses of stored
      elements (uint64), if the programs run together in one process.
    """

    function: Any
    arguments: Mapping[str, Any]
    converted: Mapping[str, Any]
    programs: Sequence[Program]
    reads: Recorder | None
    prepare: Callable[[Any, Any], Any]
    on_programs: Callable[[int, int], None]
    observed: RunLog
    processes: int = 1
    alone_s: float = math.inf
    on_stored: Callable[[Any], None] | None = None

    def run(self) -> str:
        """Run all programs; return "", or why they must run one after another.

        Mutates the tensors and ``observed`` only in the first case.
        """
        from triton.runtime import interpreter

        if any(hasattr(value, "block_shape") for value in self.arguments.values()):
            return "a tensor descriptor"
        notes = Notes(budget=self.observed.budget)
        tensors = Tensors(Memory(self.arguments), notes, self.reads, is_shared=self.processes > 1)
        try:
            kernel = Form(self.function).rewrite()
            with self.prepare(tensors.notes, extension_of(interpreter)):
                self._run_all(Runner(kernel, self.converted, self.programs, interpreter, tensors))
        except (Failed, Refused) as failed:
            tensors.undo()
            return str(failed)
        finally:
            control.begin(None)
        tensors.notes.tell(self.observed)
        if self.on_stored is not None:
            for addresses in tensors.stored_addresses():
                self.on_stored(addresses)
        return ""

    def _run_all(self, runner: "Runner") -> None:
        """Run all batches: in this process for a short time, then the rest in several."""
        todo, start = runner.batches(), time.perf_counter()
        while todo and (
            self.processes == 1
            or not runner.done  # the copies must have the stored tensors
            or time.perf_counter() - start < self.alone_s
        ):
            if runner.step(todo):
                self.on_programs(runner.done, len(self.programs))
        if not todo:
            return
        before = runner.tensors.stored_elements()
        copies = [
            fork(functools.partial(runner.run_part, todo[i :: self.processes]))
            for i in range(1, self.processes)
        ]
        mine, first = todo[:: self.processes], runner.done
        share = (len(self.programs) - first) / max(1, sum(map(len, mine)))
        try:
            while mine:
                if runner.step(mine):
                    done = first + int((runner.done - first) * share)
                    self.on_programs(min(done, len(self.programs)), len(self.programs))
        except BaseException:
            for one in copies:
                one.kill()
            raise
        finally:
            ended = [one.result() for one in copies]
        for part, error in ended:
            if error is not None:
                raise Failed(str(error))
            runner.tensors.take(part, before)
        runner.tensors.check_apart()


@dataclass(slots=True, eq=False)
class Runner:
    """Runs batches of a launch's programs. ``done``: the number of programs that ended."""

    kernel: Any
    converted: Mapping[str, Any]
    programs: Sequence[Program]
    interpreter: Any
    tensors: Tensors
    done: int = 0

    def batches(self) -> list[Any]:
        """Return the batches, the last one first: arrays of positions in ``programs``."""
        ids = np.array(self.programs, dtype=np.int32)
        order = np.lexsort([ids[:, axis] for axis in reversed(_ORDER)])
        return [order[i : i + MOST] for i in reversed(range(0, len(order), MOST))]

    def step(self, todo: list[Any]) -> bool:
        """Run the last batch of ``todo``, or replace it by its parts; return whether it ended.

        Raises Failed if the launch must run one program after another.
        """
        numbers = todo.pop()
        ids = np.array([self.programs[i] for i in numbers], dtype=np.int32)
        limit = most_elements()
        control.begin(Batch(ids, numbers, self.interpreter, self.tensors, limit=limit))
        self.tensors.forget()
        try:
            with limited(self.tensors.notes.budget):
                self.kernel(**self.converted)
            self.tensors.commit()
        except Diverged as diverged:
            todo += [numbers[group] for group in reversed(diverged.groups)]
            return False
        except Refused as refused:
            raise Failed(str(refused)) from refused
        except MemoryError as error:
            if len(numbers) == 1:
                raise Failed("too little memory") from error
            todo += np.array_split(numbers, 2)
            return False
        except Exception as error:  # the same program alone raises it, or does not
            raise Failed(f"{type(error).__name__}: {error}") from error
        self.done += len(numbers)
        return True

    def run_part(self, todo: list[Any]) -> Part:
        """Run batches in a copy of the process; return what they did, or why not."""
        self.tensors.is_copy = True
        try:
            while todo:
                self.step(todo)
        except Failed as failed:
            return Part(failed=str(failed))
        return self.tensors.part()


class Failed(Exception):
    """A batch cannot run together; the text says why."""


def most_elements() -> int:
    """Return how many elements the largest value of a batch may have, for the memory that is free."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return _MOST_ELEMENTS
    return max(1, min(_MOST_ELEMENTS, free // _BYTES))
