"""Probe: record which source lines each program of a launch executes, and what these lines access.

A probe also replaces kernels by edited ones. It is active inside a ``with probing(probe)`` block; launches
outside one cost nothing more. Lines are recorded with ``sys.settrace``, in the code of interpreted kernels
only; a trace function that was set before is restored.
"""

import ast
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.kernel_text import (
    compile_tree,
    place_of,
    tree_with_names,
    with_defaults,
)
from attnlab.kernels.triton.run_log import Budget, RunLog

Program = tuple[int, int, int]
Line = tuple[str, int]  # file and line
_MOST_TEXTS = 512  # compiled texts of functions
_NO_LINE: Line = ("", 0)


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramLog:
    """What one program of a launch did.

    - ``lines``: how often each line ran; ``steps``: pairs of lines of one function that ran one after the
      other, so that both outcomes of a branch differ.
    - ``loads``, ``stores``: by line, the unique addresses (uint64) that were not masked off. ``order``: the
      lines of all loads, in order.
    - ``values``: as ``stores``, the value of each of these addresses; of several, the last.
    - ``operations``: of the interpreter; ``seconds``: of processor time.
    """

    program: Program
    lines: dict[Line, int] = field(default_factory=dict)
    steps: set[tuple[Line, Line]] = field(default_factory=set)
    loads: dict[Line, list[Any]] = field(default_factory=dict)
    order: list[Line] = field(default_factory=list)
    stores: dict[Line, list[Any]] = field(default_factory=dict)
    values: dict[Line, list[Any]] = field(default_factory=dict)
    operations: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchLog:
    """One launch: the function, its arguments by name, as given and as converted, and its programs.

    ``before``: clones of the tensors that kernels may write, from before the first launch that got them, by
    address; none if only accesses are recorded. The class has the interface of
    :class:`attnlab.kernels.triton.run_log.Trace`.
    """

    function: Any
    arguments: Mapping[str, Any]
    converted: Mapping[str, Any]
    sizes: Program
    programs: list[ProgramLog] = field(default_factory=list)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    _line: Line = _NO_LINE

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load of the current line; ``addresses`` uint64, ``mask`` bool of the same shape."""
        live = np.unique(np.atleast_1d(addresses)[np.atleast_1d(mask)])
        if live.size:
            self.programs[-1].loads.setdefault(self._line, []).append(live)
            self.programs[-1].order.append(self._line)

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Record a store and its values; as :meth:`loaded`."""
        is_live = np.atleast_1d(mask)
        live, last = np.unique(np.atleast_1d(addresses)[is_live][::-1], return_index=True)
        if live.size:
            given = np.broadcast_to(np.atleast_1d(values), is_live.shape)[is_live][::-1]
            self.programs[-1].stores.setdefault(self._line, []).append(live)
            self.programs[-1].values.setdefault(self._line, []).append(given[last])

    def end(self) -> None:
        """Do nothing: :meth:`running` ends a program."""

    def add(self, program: Program, loads: Any, stores: Any) -> None:
        """Add a program with the addresses that it loads and stores (uint64)."""
        log = ProgramLog(program=program, loads={_NO_LINE: [loads]})
        if stores.size:
            log.stores, log.values = {_NO_LINE: [stores]}, {_NO_LINE: [np.zeros(stores.size)]}
        self.programs.append(log)

    @contextmanager
    def running(self, program: Program, codes: set[CodeType], observed: RunLog) -> Iterator[None]:
        """Record the lines of a program, in functions with one of ``codes``, and its operations."""
        log = ProgramLog(program=program)
        operations, began = observed.operations, time.process_time()
        self.programs.append(log)

        def called(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_code not in codes:
                return None
            previous: Line | None = None

            def stepped(frame: FrameType, event: str, arg: Any) -> Any:
                nonlocal previous
                if event == "line":
                    line = (frame.f_code.co_filename, frame.f_lineno)
                    self._line = line
                    log.lines[line] = log.lines.get(line, 0) + 1
                    if previous is not None:
                        log.steps.add((previous, line))
                    previous = line
                elif event == "return" and frame.f_back is not None:
                    self._line = (frame.f_back.f_code.co_filename, frame.f_back.f_lineno)
                return stepped

            return stepped

        outer = sys.gettrace()
        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(outer)
            log.operations = observed.operations - operations
            log.seconds = time.process_time() - began


@dataclass(slots=True, kw_only=True, eq=False)
class Probe:
    """What launches do in addition while the probe is active.

    - ``records``: whether ``launches`` gets a log of each launch. With ``accesses``, the log says of each
      program only what it loads and stores, under no line if the programs run together: then no two of them
      store different bits in one element.
    - ``edited``: what makes the functions that run in place of a kernel's or a device function's own, by its
      original. ``together``: such functions in the form in which a batch of programs runs them.
    - ``texts``: texts that run in place of those of functions, by file and first line. They replace the
      function in every module that was loaded from the file: a source is loaded for each platform.
      ``names``: values of further names in these texts.
    - ``budget``: what the launches may use together; they raise TooLong beyond it.
    """

    records: bool = False
    accesses: bool = False
    edited: Mapping[Any, Callable[[], Any]] = field(default_factory=dict)
    together: Mapping[Any, Any] = field(default_factory=dict)
    texts: Mapping[Line, str] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    launches: list[LaunchLog] = field(default_factory=list)
    codes: set[CodeType] = field(default_factory=set)

    def rewritten(self, original: Any, function: Any) -> Any:
        """Return what runs as ``original``, a function of Triton, whose interpreted form is ``function``."""
        found = self.edited.get(original.fn, lambda: function)()
        found = self.of_text(original, compile_tree) or found
        self.codes.add(found.__code__)
        return found

    def of_text(self, function: Any, compile: Callable[[Any, ast.Module], Any]) -> Any:
        """Return what runs in place of a function by its text, None if there is no text; ``compile``: makes
        it from a syntax tree."""
        text = self.texts.get(place_of(function)) if self.texts else None
        if text is None:
            return None
        compiled = _of_text(function, compile, text, tuple(self.names))
        return with_defaults(compiled, self.names) if self.names else compiled

    def begin(
        self,
        function: Any,
        arguments: Mapping[str, Any],
        converted: Mapping[str, Any],
        sizes: Program,
    ) -> LaunchLog | None:
        """Begin the log of a launch, if launches are recorded."""
        if not (self.records or self.accesses):
            return None
        log = LaunchLog(function=function, arguments=arguments, converted=converted, sizes=sizes)
        known = {address for launch in self.launches for address in launch.before}
        for value in arguments.values() if self.records else ():
            if isinstance(value, torch.Tensor) and value.data_ptr() not in known:
                log.before[value.data_ptr()] = value.clone()
        self.launches.append(log)
        return log


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _of_text(function: Any, compile: Any, text: str, names: tuple[str, ...]) -> Any:
    return compile(function, tree_with_names(text, names))


_PROBE: ContextVar[Probe | None] = ContextVar("probe", default=None)


def current_probe() -> Probe | None:
    """Return the active probe, or None."""
    return _PROBE.get()


def probing(probe: Probe) -> AbstractContextManager[Probe]:
    """Make a probe active inside the block."""
    return setting(_PROBE, probe)


# What the programs of recorded launches store: which elements of a tensor, and whether they agree.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorStores:
    """The stores to one tensor.

    - ``name``: of the argument of the kernel that stores. ``tensor``: what it is.
    - ``stored``: the addresses of its elements that any program stores to (uint64).
    - ``conflicts``: the source lines, "file:line", whose stores put another value into an element than an
      earlier program did, with the addresses of these elements (uint64). On a GPU, the order of the programs
      decides which value stays.
    """

    name: str
    tensor: torch.Tensor
    stored: Any
    conflicts: Mapping[str, Any]

    @property
    def unwritten(self) -> torch.Tensor:
        """Return which elements of the tensor no program stores to, bool, with its shape."""
        return ~self.holds(self.stored)

    def holds(self, addresses: Any) -> torch.Tensor:
        """Return which elements of the tensor are at ``addresses`` (uint64), bool, with its shape."""
        return Elements(self.tensor).at(addresses)


class Elements:
    """The elements of a tensor by address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        index = torch.zeros(tensor.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            shape = [size if at == dim else 1 for at in range(tensor.dim())]
            index += stride * torch.arange(size).view(shape)
        own = tensor.data_ptr() + index.numpy().ravel() * tensor.element_size()
        self._own, self._first, self._element = np.unique(
            own.astype(np.uint64), return_index=True, return_inverse=True
        )

    def at(self, addresses: Any) -> torch.Tensor:
        """Return which elements are at ``addresses`` (uint64), bool, with the shape of the tensor."""
        found = np.zeros(len(self._own), dtype=np.bool_)
        found[self._places(addresses)] = True
        return torch.from_numpy(found[self._element]).view(self.shape)

    def indices(self, addresses: Any) -> Any:
        """Return the indices of the elements at unique ``addresses``, in the order of the dimensions."""
        if len(self._own) < len(self._element):  # several elements are in one place
            return np.flatnonzero(self.at(addresses))
        return self._first[self._places(addresses)]

    def _places(self, addresses: Any) -> Any:
        place = np.minimum(np.searchsorted(self._own, addresses), len(self._own) - 1)
        return place[self._own[place] == addresses]


def tensors_in(launches: Sequence[LaunchLog]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among the arguments of launches that have elements, each with its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for launch in launches:
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor) and value.numel():
                found.setdefault(value.data_ptr(), (name, value))
    return [*found.values()]


def bounds_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and that after its last element."""
    last = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def joined(parts: Mapping[Line, Sequence[Any]]) -> Any:
    """Return the addresses of all lines of a log, sorted (uint64)."""
    arrays = [one for some in parts.values() for one in some]
    return np.unique(np.concatenate(arrays)) if arrays else np.zeros(0, dtype=np.uint64)


def stores_of(launches: Sequence[LaunchLog]) -> list[TensorStores]:
    """Return the stores to each tensor that a program of the launches stores to."""
    programs = [log for launch in launches for log in launch.programs if log.stores]
    found = []
    for name, tensor in tensors_in(launches):
        stored, conflicts = _merged(programs, bounds_of(tensor))
        if stored:
            found.append(
                TensorStores(
                    name=name,
                    tensor=tensor,
                    stored=_array(stored),
                    conflicts={place: _array(conflicts[place]) for place in sorted(conflicts)},
                )
            )
    return found


def _array(addresses: set[int]) -> Any:
    return np.fromiter(addresses, dtype=np.uint64, count=len(addresses))


def _merged(
    programs: Sequence[ProgramLog], span: tuple[int, int]
) -> tuple[set[int], dict[str, set[int]]]:
    """Return the addresses in a range that are stored to, and those of conflicts by line."""
    before: dict[int, Any] = {}
    conflicts: dict[str, set[int]] = {}
    for log in programs:
        own: dict[int, Any] = {}
        for place, addresses, values in _stores(log, span):
            pairs = [*zip(addresses.tolist(), values.tolist(), strict=True)]
            others = {at for at, value in pairs if at in before and not _same(before[at], value)}
            if others:
                conflicts.setdefault(place, set()).update(others)
            own |= pairs
        before |= own
    return set(before), conflicts


def _stores(log: ProgramLog, span: tuple[int, int]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the stores of a program in a range: "file:line", addresses, values."""
    for (file, line), parts in log.stores.items():
        for addresses, values in zip(parts, log.values[file, line], strict=True):
            inside = (addresses >= span[0]) & (addresses < span[1])
            if inside.any():
                yield f"{Path(file).name}:{line}", addresses[inside], values[inside]


def _same(one: Any, other: Any) -> bool:
    """Answer whether two values are equal; NaN equals NaN."""
    return bool(one == other or (one != one and other != other))
