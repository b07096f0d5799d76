"""Replay: run programs of recorded launches again, with kernels that may be edited.

The tensors of a launch get their first contents back before each run, so a run of few programs takes a
small part of the time of the call.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from attnlab.kernels.triton.interpreter import prepared
from attnlab.kernels.triton.kernel_text import called_functions
from attnlab.kernels.triton.lockstep.edits import EditRun, Writes
from attnlab.kernels.triton.lockstep.launch import Together
from attnlab.kernels.triton.probe import (
    LaunchLog,
    Line,
    Probe,
    Program,
    ProgramLog,
    bounds_of,
    joined,
    probing,
)
from attnlab.kernels.triton.run_log import Budget, RunLog, TooLong, limited

# How many times as many operations as the recorded run a run may have, and one with many edits. Of these,
# those that loop for long are left out.
_SLACK, _EDITS_SLACK = 20, 4
_SLACK_S, _SLACK_TIMES = 1.0, 2.0  # processor time: so much, and so many times that of the recorded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """A program that writes elements of the output, with the programs whose results it reads.

    - ``programs``: (index of the launch, log), the writing one last. ``cells``: [rows, heads] bool, what it
      writes.
    """

    programs: tuple[tuple[int, ProgramLog], ...]
    cells: torch.Tensor

    @property
    def lines(self) -> set[Line]:
        """Return the lines that any of the programs executed."""
        return {line for _, log in self.programs for line in log.lines}

    @property
    def steps(self) -> set[tuple[Line, Line]]:
        """Return the pairs of lines that ran one after the other."""
        return {step for _, log in self.programs for step in log.steps}

    @property
    def kernel(self) -> int:
        """Return the index of the launch that writes."""
        return self.programs[-1][0]

    @property
    def cost(self) -> int:
        """Return how many lines ran."""
        return sum(sum(log.lines.values()) for _, log in self.programs)


Path = tuple[tuple[int, Writes], ...]  # launches with what their programs stored


class _Notes:
    """Notes the addresses that are stored to."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        self._note = note

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Ignore a load."""

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Note a store."""
        self._note(np.atleast_1d(addresses)[np.atleast_1d(mask)])


class Replay:
    """Recorded launches of a call with an output [rows, heads, head_size], and their units.

    ``output``: the argument that is the output, by default the first written one with this shape.
    ``is_judged_alone``: a judge of the output reads other tensors that the launches write, such as scales, so
    that runs of several edits at once, which keep the output alone, do not do.
    """

    is_judged_alone = False

    def __init__(
        self, launches: Sequence[LaunchLog], shape: torch.Size, output: torch.Tensor | None = None
    ) -> None:
        self.launches, self._shape = launches, shape
        self._written = _written(launches)
        fitting = (fit(t, shape) for fit in (_rows_of, _first_elements) for t in self._written)
        self.output = next((rows for rows in fitting if rows is not None), None)
        if output is not None:
            self.output = output
            if all(one.data_ptr() != output.data_ptr() for one in self._written):
                self._written.append(output)
        elif self.output is None and (missed := _named_output(launches, shape)) is not None:
            self.output = _rows_of(missed, shape)
            self._written.append(missed)
        self.units = [] if self.output is None else list(self._units(self.output))
        self.idle = list(self._idle())
        self._functions = [
            {one.fn for one in called_functions(launch.function)} for launch in launches
        ]
        self._states: dict[tuple[tuple[int, ...] | None, int], list[torch.Tensor]] = {}

    def _idle(self) -> Iterator[Unit]:
        """Yield the programs that store nothing in the output, and nothing that is read for it."""
        none = torch.zeros(self._shape[:2], dtype=torch.bool)
        used = {(at, log.program) for unit in self.units for at, log in unit.programs}
        for index, launch in enumerate(self.launches):
            for log in launch.programs:
                if (index, log.program) not in used:
                    yield Unit(programs=((index, log),), cells=none)

    def _units(self, output: torch.Tensor) -> Sequence[Unit]:
        scratch = [t for t in self._written if t.data_ptr() != output.data_ptr()]
        stored, loaded = [], []
        for launch in self.launches:
            stored.append([_inside(log.stores, scratch) for log in launch.programs])
            loaded.append([_inside(log.loads, scratch) for log in launch.programs])
        units = []
        for index, launch in enumerate(self.launches):
            for number, log in enumerate(launch.programs):
                cells = self._cells(log, output)
                if not bool(cells.any()):
                    continue
                wanted, programs = loaded[index][number], [(index, log)]
                for earlier in reversed(range(index)):
                    for at, addresses in enumerate(stored[earlier]):
                        if len(wanted) and np.isin(addresses, wanted).any():
                            programs.append((earlier, self.launches[earlier].programs[at]))
                            wanted = np.union1d(wanted, loaded[earlier][at])
                units.append(Unit(programs=tuple(reversed(programs)), cells=cells))
        return units

    def _cells(self, log: ProgramLog, output: torch.Tensor) -> torch.Tensor:
        """Return which rows and heads a program stores, [rows, heads] bool."""
        rows, heads, head_size = self._shape
        cells = torch.zeros(rows, heads, dtype=torch.bool)
        found = _inside(log.stores, [output])
        if len(found):
            index = torch.from_numpy(_elements(output, found))
            index = index[index < rows * heads * head_size].unique()
            cells.view(-1)[(index // head_size).unique()] = True
        return cells

    def run(
        self,
        units: Sequence[Unit] | None,
        edited: Mapping[Any, Callable[[], Any]],
        together: Mapping[Any, Any] | None = None,
    ) -> torch.Tensor:
        """Return the output [rows, heads, head_size] after the programs of some units, None for all programs.

        Rows that these do not write are as before the call. Launches before the first one that has an edited
        function run only once. ``edited``: makes each edited function. ``together``: these in the form in
        which a batch of programs runs them; without it, programs with an edited function run one after
        another.

        Raises what an edited kernel raises, or TooLong if it needs many times the operations of the
        recorded run, or too much processor time.
        """
        assert self.output is not None
        reached = (
            at for at, functions in enumerate(self._functions) if not functions.isdisjoint(edited)
        )
        first = next(reached, 0)
        self._restore(units, first)
        self._run(units, edited, range(first, len(self.launches)), together)
        return self.contents()

    def _run(
        self,
        units: Sequence[Unit] | None,
        edited: Mapping[Any, Callable[[], Any]],
        launches: range,
        together: Mapping[Any, Any] | None = None,
    ) -> None:
        """Run programs of some launches, all programs in lockstep if possible; writes their tensors."""
        from triton.runtime import interpreter

        with probing(Probe(edited=edited, together=together or {})):
            for at in launches:
                launch, programs = self.launches[at], self._programs(units, at)
                if not programs:
                    continue
                observed = RunLog(budget=_budget(launch, programs))
                notes = _Notes(self._note_stores)
                if units is None and not self._run_together(launch, programs, observed):
                    continue
                kernel = launch.function.rewrite()
                with prepared(kernel, launch.arguments, launch.sizes, observed, trace=notes):
                    for program in programs:
                        interpreter.interpreter_builder.set_grid_idx(*program)
                        with limited(observed.budget):
                            kernel(**launch.converted)

    def _programs(self, units: Sequence[Unit] | None, at: int) -> list[Program]:
        """Return the programs that some units, None for all, have in a launch, in order."""
        if units is None:
            return sorted({log.program for log in self.launches[at].programs})
        return sorted({log.program for unit in units for i, log in unit.programs if i == at})

    def _run_together(
        self, launch: LaunchLog, programs: Sequence[Program], observed: RunLog
    ) -> str:
        """Run programs of a launch in lockstep; return "", or why they must run one after another."""
        return Together(
            function=launch.function,
            arguments=launch.arguments,
            converted=launch.converted,
            programs=programs,
            reads=None,
            prepare=partial(prepared, launch.function.fn, launch.arguments, launch.sizes),
            on_programs=lambda done, total: None,
            observed=observed,
            on_stored=self._note_stores,
        ).run()

    def run_edits(
        self, units: Sequence[Unit], function: Any, kernel: Any, edits: Sequence[int]
    ) -> dict[int, torch.Tensor | None]:
        """Return the outputs after the programs of some units, as :meth:`run`, with each of several edits.

        ``kernel``: the form of ``function`` with all of them, of
        :func:`attnlab.kernels.triton.lockstep.edits.compile_edits`. Edits that cannot run together are left
        out. None stands for one that raises something. Edits that store the same have one output.
        """
        having = [
            at
            for at, some in enumerate(self._functions)
            if function.fn in some and self._programs(units, at)
        ]
        forms = {function.fn: kernel}
        return self._branches(units, forms, having, edits, ()) if having else {}

    def _branches(
        self,
        units: Sequence[Unit],
        forms: Mapping[Any, Any],
        having: Sequence[int],
        edits: Sequence[int],
        path: Path,
    ) -> dict[int, torch.Tensor | None]:
        """Return the outputs with edits that did the same in the launches before those of ``having``.

        ``path``: those of the launches that have the edited function, with what they stored.
        """
        at, *later = having
        launch, found = self.launches[at], dict[int, torch.Tensor | None]()
        programs = self._programs(units, at)
        if not self._follow(units, path, at):
            return dict.fromkeys(edits)
        edited = EditRun(
            launch=launch,
            programs=programs,
            prepare=partial(prepared, launch.function.fn, launch.arguments, launch.sizes),
            budget=lambda: _budget(launch, programs, _EDITS_SLACK),
        )
        with probing(Probe(together=forms)):
            ran = edited.run(edits)
        alike = dict[Any, tuple[Writes, list[int]]]()
        for number, writes in ran.items():
            if writes is None:
                found[number] = None
            else:
                alike.setdefault(writes.key, (writes, []))[1].append(number)
        for writes, numbers in alike.values():
            whole = (*path, (at, writes))
            if later:
                found |= self._branches(units, forms, later, numbers, whole)
            else:
                is_done = self._follow(units, whole, len(self.launches))
                found |= dict.fromkeys(numbers, self.contents() if is_done else None)
        return found

    def _follow(self, units: Sequence[Unit], path: Path, end: int) -> bool:
        """Run the launches before ``end``, in which those of ``path`` store what it says; return whether
        none raises something."""
        begins = [*(at for at, _ in path), end]
        self._restore(units, begins[0])
        for (at, writes), following in zip(path, begins[1:], strict=True):
            for addresses in writes.addresses():
                self._note_stores(addresses)
            writes.apply()
            try:
                self._run(units, {}, range(at + 1, following))
            except (Exception, TooLong):  # for numbers that no right kernel stores
                return False
        return True

    def contents(self) -> torch.Tensor:
        """Return a copy of the output as the last run left it, [rows, heads, head_size]."""
        assert self.output is not None
        rows = self._shape[0]
        return self.output[:rows].reshape(self._shape).clone()

    def _note_stores(self, addresses: Any) -> None:
        """Note tensors to restore, too: an edited kernel may store to an input."""
        left = addresses
        for tensor in self._written:
            left = left[~_is_among(left, tensor)]
        if not len(left):
            return
        for launch in self.launches:
            for value in launch.arguments.values():
                if isinstance(value, torch.Tensor) and len(_among(left, value)):
                    left = left[~_is_among(left, value)]
                    self._written.append(value)
                    self._states.clear()

    @torch.inference_mode()  # an op may have made its tensors so, and only so can they be written
    def _restore(self, units: Sequence[Unit] | None, first: int) -> None:
        """Give the tensors the contents that they have before a launch of the unchanged kernels."""
        key = (None if units is None else tuple(map(id, units)), first)
        if first and key not in self._states:
            self._restore(units, 0)
            self._run(units, {}, range(first))
            self._states[key] = [tensor.clone() for tensor in self._written]
        for at, tensor in enumerate(self._written):
            address = tensor.data_ptr()
            if first:
                before = self._states[key][at]
            else:  # a launch may have got it in another shape
                found = (one.before.get(address) for one in self.launches)
                before = next(one for one in found if one is not None)
            tensor.copy_(before.reshape(tensor.shape))


def _written(launches: Sequence[LaunchLog]) -> list[torch.Tensor]:
    """Return the tensors that any program stores to, each once."""
    tensors = {  # of several views, the first, which LaunchLog.before has
        value.data_ptr(): value
        for launch in reversed(launches)
        for value in launch.arguments.values()
        if isinstance(value, torch.Tensor) and value.numel()
    }
    firsts = np.array(
        [
            addresses[0]
            for launch in launches
            for log in launch.programs
            for parts in log.stores.values()
            for addresses in parts
        ],
        dtype=np.uint64,
    )
    return [t for t in tensors.values() if len(_among(firsts, t))]


def _named_output(launches: Sequence[LaunchLog], shape: torch.Size) -> torch.Tensor | None:
    """Return the argument that is the output by its name and shape, for programs that store outside it."""
    for launch in reversed(launches):
        for name, value in launch.arguments.items():
            if (
                isinstance(value, torch.Tensor)
                and "out" in name.lower()
                and _rows_of(value, shape) is not None
            ):
                return value
    return None


def _rows_of(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Return a tensor that fits an output, without leading dimensions of 1; None if it does not fit."""
    while tensor.is_floating_point() and tensor.dim() > 1:
        if tensor.shape[0] >= shape[0] and tensor.shape[1:].numel() == shape[1:].numel():
            return tensor
        if tensor.shape[0] != 1:
            return None
        tensor = tensor[0]
    return None


def _first_elements(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Return the first elements of each head of a tensor with more than an output has, as the latent of MLA
    may have; None if it does not fit."""
    if not tensor.is_floating_point() or not tensor.is_contiguous() or not tensor.dim():
        return None
    *rows, size = tensor.shape
    if len(shape) != 3 or math.prod(rows) != math.prod(shape[:2]) or size <= shape[2]:
        return None
    return tensor.view(*shape[:2], size)[..., : shape[2]]


def _among(addresses: Any, tensor: torch.Tensor) -> Any:
    """Return the addresses that are in a tensor."""
    return addresses[_is_among(addresses, tensor)]


def _is_among(addresses: Any, tensor: torch.Tensor) -> Any:
    """Return which addresses are in a tensor."""
    begin, end = bounds_of(tensor)
    return (addresses >= begin) & (addresses < end)


def _inside(parts: Mapping[Line, Sequence[Any]], tensors: Sequence[torch.Tensor]) -> Any:
    """Return the recorded addresses that are in some tensors, sorted."""
    every = joined(parts)
    inside = [_is_among(every, tensor) for tensor in tensors]
    return every[np.logical_or.reduce(inside)] if inside else every[:0]


def _elements(tensor: torch.Tensor, addresses: Any) -> Any:
    """Return the indices of addresses in a tensor, counted in the order of its dimensions, int64."""
    rest = (addresses - np.uint64(tensor.data_ptr())).astype(np.int64) // tensor.element_size()
    index, sizes = np.zeros_like(rest), list(tensor.shape)
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        at, rest = np.divmod(rest, max(1, tensor.stride(dim)))
        index += at * int(np.prod(sizes[dim + 1 :]))
    return index


def _budget(launch: LaunchLog, programs: Collection[Program], slack: int = _SLACK) -> Budget:
    """Return what a run of some programs of a launch may use."""
    logs = [log for log in launch.programs if log.program in programs]
    return Budget(
        operations=slack * (1 + sum(log.operations for log in logs)),
        seconds=_SLACK_S + _SLACK_TIMES * sum(log.seconds for log in logs),
    )
