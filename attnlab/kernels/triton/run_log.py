"""RunLog: launches, int32 overflows and out-of-bounds accesses of an interpreted call.

A product of two int32 values overflows silently, under the interpreter and on a GPU. A stride that the
kernel annotates as tl.int64 makes the product int64 on both. So a product that overflows here also
overflows on a GPU, in the lanes that are not masked.
"""

import functools
import importlib.util
import math
import signal
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch

from attnlab.kernels.replaced import setting
from attnlab.tensors.call import KernelCall

# Limits of an interpreted run: operations of the interpreter, and seconds of processor time.
#
# A trial edit can loop for ever, with or without an access to memory. Operations and iterations of loops are
# counted, so that the same edits are stopped on every machine. What is left, such as one long operation, is
# stopped by a timer, where there is one.

_OFTEN = 64  # operations between two looks at the clock
_PARTS = 4  # a block may use a quarter of the operations and the time that are left
_AGAIN_S = 0.05  # until the timer interrupts again what it could not interrupt
# Functions of Triton and of the lab that change Triton's language, and must not be interrupted.
_PATCHING = {"patch_module", "restore"}


class TooLong(BaseException):
    """A run exceeds its Budget. It is not an Exception, so that a kernel does not catch it."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """What a run may use: operations of the interpreter, and seconds of processor time from now on."""

    operations: int
    seconds: float = math.inf
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._end = time.process_time() + self.seconds

    @property
    def left_s(self) -> float:
        """Return the processor time that is left, in seconds."""
        return self._end - time.process_time()

    @contextmanager
    def part(self) -> Iterator[None]:
        """Let a block use a quarter of what is left; what comes after the block has all of it again."""
        operations, left_s = self.operations, self.left_s
        self.operations = operations // _PARTS
        self._end = time.process_time() + left_s / _PARTS
        try:
            yield
        finally:
            self.operations = operations
            self._end = time.process_time() + left_s

    def spend(self) -> None:
        """Count an operation; raise TooLong if there was one too many, or if the time is over."""
        self.operations -= 1
        if self.operations < 0 or (not self.operations % _OFTEN and self.left_s < 0):
            raise TooLong


_RUNNING: list["OperationLog"] = []  # the logs of the launches that run, the innermost last
_RERUN_S: ContextVar[float] = ContextVar("rerun_s", default=math.inf)


@dataclass(slots=True)
class OperationLog:
    """Counts the operations of a launch, and notes products of int32 numbers that overflow.

    ``operations``: the number of operations of the interpreter; ``budget``: a limit of them, or None.
    """

    operations: int = 0
    budget: Budget | None = None

    def operated(self, number: int = 1) -> None:
        """Count operations."""
        self.operations += number
        if self.budget is not None:
            for _ in range(number):
                self.budget.spend()

    def multiply(self, left: Any, right: Any) -> Any:
        """Return left × right as NumPy computes it; note an int32 overflow."""
        product = np.multiply(left, right)
        if product.dtype == np.int32:
            wrong = np.multiply(left, right, dtype=np.int64) != product
            if wrong.any():
                self._overflowed(left, right, np.atleast_1d(wrong))
        return product

    def _overflowed(self, left: Any, right: Any, wrong: Any) -> None:
        """Note the overflow of a product in the elements ``wrong``, bool."""
        raise NotImplementedError


@contextmanager
def counting(log: OperationLog) -> Iterator[None]:
    """Count the iterations of loops inside the block as operations of a log."""
    _RUNNING.append(log)
    try:
        yield
    finally:
        _RUNNING.pop()


def running_log() -> OperationLog:
    """Return the log of the launch that runs."""
    return _RUNNING[-1]


def iterated(value: Any = None) -> Any:
    """Count an iteration of a kernel's loop; return the value, an integer as a :class:`LoopIndex`."""
    if _RUNNING:
        _RUNNING[-1].operated()
    return LoopIndex(value) if type(value) is int else value


class LoopIndex(int):
    """The variable of a loop over a range: a number that can be converted, as Triton's int32 scalar."""

    def to(self, dtype: Any, **options: Any) -> Any:
        """Return the number as a scalar of Triton."""
        from triton.runtime.interpreter import TensorHandle, tl

        handle = TensorHandle(np.array([self], dtype=np.int32), tl.int32)
        return tl.tensor(handle, tl.int32).to(dtype, **options)


def limiting_reruns(seconds: float) -> AbstractContextManager[float]:
    """Let the launches of a call take so much processor time inside the block; else the call fails.

    A kernel that ends for one call may loop for ever for a call with other lengths.
    """
    return setting(_RERUN_S, seconds)


def rerun_budget() -> Budget | None:
    """Return what the launches of a call may use by :func:`limiting_reruns`, or None for no limit."""
    seconds = _RERUN_S.get()
    return None if seconds == math.inf else Budget(operations=sys.maxsize, seconds=seconds)


@contextmanager
def limited(budget: Budget | None) -> Iterator[None]:
    """Raise TooLong in the block when the time of a budget is over, also in a loop without an operation.

    The timer is that of the process, so it needs the main thread, and no profiler that uses it. Without it,
    only operations are stopped.
    """
    if budget is None or budget.seconds == math.inf or not _has_timer():
        yield
        return
    is_active = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_active and budget.left_s <= 0 and not _is_patching(frame):
            raise TooLong

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, max(budget.left_s, 1e-6), _AGAIN_S)
    try:
        yield
    finally:
        is_active = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _has_timer() -> bool:
    return (
        hasattr(signal, "SIGPROF")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    )


def _is_patching(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _PATCHING:
            return True
        frame = frame.f_back
    return False


# Record which slots of a paged cache each program of a launch loads, and for which rows.
#
# Whether a read is right depends on the sequence that it is for. So reads are recorded by program, and a
# program is identified by the rows that it accesses: rows of a query that it loads, or of an output that it
# stores.
# :func:`attnlab.lab.result.traced` assigns rows and slots to sequences; this module has no notion of one.
#
# Tensors are identified by their shapes, not by identity: ops may copy the cache into another layout, or
# the query into another dtype. A load that is masked off is not a read. Without tracing, nothing here is
# called.

Key = tuple[str, tuple[int, ...]]  # name of the kernel's argument, rows of the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The shapes by which a call's tensors are found among a kernel's arguments.

    - ``rows``: (num_tokens, elements per row) of a query or an output.
    - ``new``: addresses of the new keys and values, which may have the same shape but are neither.
    - ``caches``: shapes of a key or value cache; for each, its block dimension and its slot dimension.
    """

    rows: tuple[int, int]
    new: tuple[int, int]
    caches: dict[tuple[int, ...], tuple[int, int]]

    @classmethod
    def of(cls, call: KernelCall) -> "Watched":
        """Return the shapes of a call, with its caches in both of vLLM's layouts, and one slot after another.

        An op without an x-split cache may have its heads before its slots. Interleaved values
        (``interleave_v``) are not traced; their keys are.
        """
        blocks, kv_heads, head_size, block_size = call.value_cache.shape
        caches = {
            tuple(call.key_cache.shape): (0, 3),
            (blocks, kv_heads, head_size, block_size): (0, 3),
            (blocks, block_size, kv_heads, head_size): (0, 1),
            (blocks * block_size, kv_heads, head_size): (0, 0),
        }
        if call.interleave_v:
            del caches[tuple(call.value_cache.shape)]
        if call.spec.cache_layout == "flash":
            caches[blocks, kv_heads, block_size, head_size] = (0, 2)
        return cls(
            rows=(call.query.shape[0], call.query.shape[1:].numel()),
            new=(call.key.data_ptr(), call.value.data_ptr()),
            caches=caches,
        )

    def dims(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the dimension of rows, or those of blocks and slots; None for any other tensor."""
        if tuple(tensor.shape) in self.caches:
            return self.caches[tuple(tensor.shape)]
        is_rows = tensor.dim() > 1 and (tensor.shape[0], tensor.shape[1:].numel()) == self.rows
        if not is_rows or not tensor.is_floating_point() or tensor.data_ptr() in self.new:
            return None
        return (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The memory of a tensor, and how to compute a row or a slot from an address.

    ``begin``, ``end``: addresses. ``places``: (stride in bytes, size, factor of the index) per dimension,
    the largest stride first.
    """

    name: str
    is_cache: bool
    begin: int
    end: int
    places: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> "Region":
        bytes_ = tensor.element_size()
        factors = dict.fromkeys(range(tensor.dim()), 0)
        factors[dims[-1]] = 1
        if len(set(dims)) == 2:
            factors[dims[0]] = tensor.shape[dims[1]]
        strides = [stride * bytes_ for stride in tensor.stride()]
        places = sorted(
            zip(strides, tensor.shape, factors.values(), strict=True), key=lambda place: -place[0]
        )
        last = sum(stride * (size - 1) for stride, size, _ in places) + bytes_
        begin = tensor.data_ptr()
        return cls(
            name=name, is_cache=len(dims) == 2, begin=begin, end=begin + last, places=tuple(places)
        )

    def indices(self, addresses: Any) -> list[int]:
        """Return the rows, or the slots as block × block_size + slot, of uint64 addresses."""
        inside = addresses[(addresses >= self.begin) & (addresses < self.end)]
        index = self.index_of(inside)
        found: list[int] = np.unique(index[index >= 0]).tolist()
        return found

    def index_of(self, addresses: Any) -> Any:
        """Return the row or slot of each address (uint64), int64; -1 for an address of no element."""
        rest = addresses.astype(np.int64) - self.begin
        good = (rest >= 0) & (rest < self.end - self.begin)
        index = np.zeros_like(rest)
        for stride, size, factor in self.places:
            at, rest = np.divmod(rest, max(1, stride))
            good &= at < size  # an address between two elements belongs to another tensor
            if factor:
                index += at * factor
        return np.where(good, index, -1)


@dataclass(slots=True)
class Trace:
    """Recorder of the accesses of a launch's programs, which run one after the other.

    :meth:`end` adds the slots that a program loaded to ``reads``, by argument name and the program's rows.
    """

    reads: dict[Key, set[int]]
    regions: list[Region] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)
    _slots: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, watched: Watched, arguments: Mapping[str, Any], reads: dict[Key, set[int]]
    ) -> "Trace":
        """Return the trace of a launch; ``arguments`` by name. The trace changes ``reads``."""
        tensors = {n: value for n, value in arguments.items() if isinstance(value, torch.Tensor)}
        dims = {name: watched.dims(tensor) for name, tensor in tensors.items()}
        regions = [Region.of(n, tensors[n], found) for n, found in dims.items() if found]
        return cls(reads=reads, regions=regions)

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load; ``addresses`` uint64, ``mask`` bool of the same shape."""
        self._record(addresses, mask, reads=True)

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Record the rows of a store; as :meth:`loaded`. ``values`` are not recorded."""
        self._record(addresses, mask, reads=False)

    def _record(self, addresses: Any, mask: Any, reads: bool) -> None:
        live = np.atleast_1d(addresses)[np.atleast_1d(mask)]
        if not live.size:
            return
        low, high = live.min(), live.max()
        for region in self.regions:
            if high < region.begin or low >= region.end or (region.is_cache and not reads):
                continue
            found = region.indices(live)
            if not region.is_cache:
                self._rows.update(found)
            elif found:
                self._slots.setdefault(region.name, set()).update(found)

    def end(self) -> None:
        """End a program: add its slots to ``reads`` under its rows."""
        rows = tuple(sorted(self._rows))
        for name, slots in self._slots.items():
            self.reads.setdefault((name, rows), set()).update(slots)
        self._rows, self._slots = set(), {}


# Memory: the tensors that a launch may access. Accesses outside them are masked off and reported.
#
# On a GPU such an access reads whatever is there, or ends the process. Under the interpreter it would crash
# Python, or read another tensor, depending on where the process has put its tensors. So kernels get
# addresses that depend on the order of the arguments alone, with 16 TiB between two tensors.

_FIRST = 1 << 48  # above every address of a process
_APART = 1 << 44  # an int32 offset times a stride is far smaller
_OUTSIDE: ContextVar[float | None] = ContextVar("outside", default=0)
_LEAST_OUTSIDE = 56  # as a byte in float8_e4m3fn, 1.0; the numbers 56 to 63 are 1.0 to 1.875
# The number at an address has the upper bits of this product. It is the same for all tensors, since 32 bits
# of an address in elements do not say which of them is near.
_SPREAD, _SPREAD_BITS, _NUMBER_BITS = 2654435761, 32, 3


def other_outside(number: float | None = None) -> AbstractContextManager[float | None]:
    """Let loads outside of all tensors return ``number`` inside the block, in place of 0.

    By default, numbers from 56 to 63 that depend on the address: keys that are all one number have equal
    scores, as keys of 0 have.
    A result that changes depends on memory that belongs to no tensor of the launch. Of NaN, integers get 1.
    """
    return setting(_OUTSIDE, number)


def outside_number() -> float | None:
    """Return the number of :func:`other_outside` here, None if it depends on the address."""
    return _OUTSIDE.get()


class Accesses(Protocol):
    """Records loads and stores: addresses (uint64), and a mask (bool) and stored values of the same shape."""

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load."""

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Record a store."""


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among arguments by name, also those in tuples and in Triton's tensor descriptors."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from tensors_of({f"{name}[{i}]": one for i, one in enumerate(value)})
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            yield name, base


class Memory:
    """The tensors among a kernel's arguments, by address; ``trace``, if given, records accesses to them.

    A tensor has the address that the kernel gets (:meth:`address`) and its own, which loads and stores need
    and which pointers stored in a tensor have.
    """

    def __init__(self, arguments: Mapping[str, Any], trace: Accesses | None = None) -> None:
        self.trace = trace
        extents: dict[int, tuple[int, str]] = {}
        for name, value in tensors_of(arguments):
            if value.nbytes:
                storage = value.untyped_storage()
                extents.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        self._given = {own: _FIRST + i * _APART for i, own in enumerate(extents)}
        found = [(own, own, *extent) for own, extent in extents.items()]
        found += [(self._given[own], own, *extent) for own, extent in extents.items()]
        self._bases = [base for base, *_ in sorted(found)]
        self._own = [own for _, own, *_ in sorted(found)]
        self._sizes = [size for *_, size, _ in sorted(found)]
        self._names = [name for *_, name in sorted(found)]

    def address(self, tensor: torch.Tensor) -> int:
        """Return the address that a kernel gets for a tensor."""
        own = tensor.untyped_storage().data_ptr()
        return self._given.get(own, own) + tensor.data_ptr() - own

    def extent(self, low: int, high: int) -> tuple[int, int, int] | None:
        """Return the storage with all bytes of [low, high), or None: its address for the kernel, its own
        address, and its size in bytes."""
        i = bisect_right(self._bases, low) - 1
        if i < 0 or high > self._bases[i] + self._sizes[i]:
            return None
        return self._bases[i], self._own[i], self._sizes[i]

    def inside(self, addresses: Any, mask: Any, size: int) -> tuple[Any, Any, str]:
        """Return the tensors' own addresses, the mask without elements that are not in a tensor, and a
        description of the first of these.

        The description is "" if all are in tensors. ``addresses``: uint64; ``mask``: bool, same shape;
        ``size``: of an element, in bytes; an element must be in one tensor.
        """
        live = addresses if mask.all() else addresses[mask]
        if not live.size:
            return addresses, mask, ""
        found = self.extent(int(live.min()), int(live.max()) + size)
        if found is not None:
            return addresses - np.uint64(found[0] - found[1]), mask, ""
        bases, own = (np.array(some, dtype=np.uint64) for some in (self._bases, self._own))
        ends = bases + np.array(self._sizes, dtype=np.uint64)
        at = np.searchsorted(bases, addresses, side="right") - 1
        left = ends[np.maximum(at, 0)] - addresses  # wraps for an address after the end
        good = (at >= 0) & (addresses < ends[np.maximum(at, 0)]) & (left >= np.uint64(size))
        lost = np.atleast_1d(addresses)[np.atleast_1d(mask & ~good)]
        moved = np.where(good, addresses - (bases - own)[np.maximum(at, 0)], np.uint64(0))
        return moved, mask & good, self._place(int(lost[0]), size) if lost.size else ""

    def _place(self, address: int, size: int) -> str:
        """Return the position of an element relative to the nearest tensor."""
        before = [base - address for base in self._bases]
        after = [address - base - size for base, size in zip(self._bases, self._sizes, strict=True)]
        if not before:
            return "memory, but no argument is a tensor"
        away, i = min((max(b, a), i) for i, (b, a) in enumerate(zip(before, after, strict=True)))
        if away < 0:
            return f"{size} bytes, {size + away} of them after the end of {self._names[i]}"
        if before[i] > 0:
            return f"{away} bytes before {self._names[i]}"
        return f"{away} bytes after the end of {self._names[i]}"


def numbers_outside(at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what loads of a dtype get outside of all tensors; of one byte, its bits as a number.

    ``at``: int64, the elements counted from the start of a tensor's memory.
    """
    number = _OUTSIDE.get()
    if number is None:
        found: torch.Tensor = _numbers(at)
        return found.to(torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    fill = number if dtype.is_floating_point or not math.isnan(number) else 1
    return torch.full_like(at, fill, dtype=dtype)


def _numbers(elements: Any) -> Any:
    """Return the numbers at addresses in elements, whichever tensor is near: integers, of the same type."""
    low = (elements * _SPREAD) & ((1 << _SPREAD_BITS) - 1)
    return (low >> (_SPREAD_BITS - _NUMBER_BITS)) + _LEAST_OUTSIDE


def values_outside(values: Any, asked: Any, inside: Any, addresses: Any, size: int) -> Any:
    """Return loaded values with those outside of all tensors replaced, if :func:`other_outside` asks for it.

    ``asked``: the mask of the load; ``inside``: without addresses that are in no tensor. ``addresses``:
    uint64, those of the kernel; ``size``: of an element, in bytes.
    """
    number = _OUTSIDE.get()
    if number == 0:
        return values
    if number is None:
        with np.errstate(over="ignore"):
            fill = _numbers(addresses // np.uint64(size)).astype(values.dtype)
    else:
        is_number = values.dtype.kind == "f" or not math.isnan(number)
        fill = values.dtype.type(number if is_number else 1)
    return np.where(asked & ~inside, fill, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch of a kernel: its name and grid."""

    kernel: str
    grid: tuple[int, int, int]

    def text(self) -> str:
        """Return the launch as text, without trailing grid dimensions of 1."""
        sizes = list(self.grid)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        return f"{self.kernel}[{', '.join(map(str, sizes))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """A source line of a kernel where a product of two int32 values overflowed."""

    file: str
    line: int
    left: int
    right: int

    @classmethod
    def of(cls, left: Any, right: Any, wrong: Any) -> "Wrap":
        """Return the overflow of left × right in the first of the elements ``wrong``, at the current line."""
        one, other = (np.broadcast_to(n, wrong.shape)[wrong][0] for n in (left, right))
        file, line = kernel_line()
        return cls(file=file, line=line, left=int(one), right=int(other))

    def text(self) -> str:
        """Return the overflow as one sentence."""
        product = self.left * self.right
        return (
            f"{Path(self.file).name}:{self.line} multiplies in int32: "
            f"{self.left} × {self.right} = {product} exceeds 2^31"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A source line of a kernel that accessed memory outside all of its tensors.

    ``verb`` is "reads" or "writes"; ``place`` names the nearest tensor and the distance.
    """

    file: str
    line: int
    verb: str
    place: str

    def text(self) -> str:
        """Return the access as text."""
        return f"{Path(self.file).name}:{self.line} {self.verb} {self.place}"


@dataclass(slots=True)
class RunLog(OperationLog):
    """What was recorded while a call ran. It is mutated during the call.

    - ``launches``: in order; ``wraps``, ``outside``: the first of each source line.
    - ``lse``: [rows, num_heads] float32, the log-sum-exp that the op returned, or None.
    - ``padded``: the rows of the output after the last token if the call was padded, else None.
    - ``reads``: the cache slots that each program loaded, if the launch was traced
      (:mod:`attnlab.kernels.triton.run_log`).
    - ``alone``: kernels whose programs ran one after another, each with what they have that cannot run in
      lockstep. Empty if lockstep is off.
    """

    launches: list[Launch] = field(default_factory=list)
    wraps: dict[tuple[str, int], Wrap] = field(default_factory=dict)
    outside: dict[tuple[str, int], Outside] = field(default_factory=dict)
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    reads: dict[Key, set[int]] = field(default_factory=dict)
    alone: dict[str, str] = field(default_factory=dict)

    def _overflowed(self, left: Any, right: Any, wrong: Any) -> None:
        wrap = Wrap.of(left, right, wrong)
        self.wraps.setdefault((wrap.file, wrap.line), wrap)

    def stray(self, verb: str, place: str) -> None:
        """Record an out-of-bounds access by the kernel's current line."""
        file, line = kernel_line()
        note = Outside(file=file, line=line, verb=verb, place=place)
        self.outside.setdefault((file, line), note)

    def take(self, other: "RunLog") -> None:
        """Merge the log of another process of the same launch into this one."""
        self.wraps = {**other.wraps, **self.wraps}
        self.outside = {**other.outside, **self.outside}
        self.operations = max(self.operations, other.operations)
        for key, slots in other.reads.items():
            self.reads[key] = self.reads.get(key, set()) | slots


def raised_in(error: BaseException) -> Path:
    """Return the file that raised an error; an empty path if it was not raised."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Path(files[-1] if files else "")


def kernel_line() -> tuple[str, int]:
    """Return the file and line of the running kernel: the nearest frame outside Triton and this folder."""
    frame = sys._getframe(1)
    skipped = {Path(__file__).parent, *_triton_folder()}
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if skipped.isdisjoint(path.parents):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _triton_folder() -> tuple[Path, ...]:
    """Return the folder of the installed triton package, or none."""
    spec = importlib.util.find_spec("triton")
    return () if spec is None or spec.origin is None else (Path(spec.origin).parent,)
