"""Run programs of a kernel on tensors that are never allocated, and watch every int32 value.

The language is Triton's interpreter. A tensor has an address and a size, but no memory: a load returns what
the launch states for index tensors, and 1 for data; a store only has an address. So one program costs the
same for any size. Each int32 sum, difference, product, shift and conversion is also computed in int64. Where
both differ the value has wrapped, and the int64 value goes along with it, until an address or a mask shows
whether the difference matters.

Of a loop, the first three and the last two iterations run. A variable that each of the first three changes by
the same amount is moved on by the iterations that are left out.
"""

import functools
import inspect
import linecache
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.kernels.triton.assembly import Results
from attnlab.kernels.triton.block_pointers import patch_block_pointers
from attnlab.kernels.triton.interpreter import own_failures
from attnlab.kernels.triton.kernel_text import LOOP_MAKER, WHILE_MAKER
from attnlab.kernels.triton.launch_plan import one_at_a_time
from attnlab.kernels.triton.patches import language
from attnlab.kernels.triton.run_log import Budget, Memory, RunLog, TooLong

LIMIT = 1 << 31  # the first value that an int32 does not have
_FIRST, _APART = 1 << 52, 1 << 52  # addresses of tensors: 4 PiB apart
_MOST_OPERATIONS = 60_000  # of a run
_MOST_ITERATIONS = 96  # of a while loop
ELEMENT_BYTES = {
    **dict.fromkeys(("int1", "int8", "uint8", "float8e4nv", "float8e5"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}


@dataclass(frozen=True, slots=True)
class Site:
    """An integer expression of a kernel: its file, first line and text."""

    file: str
    line: int
    column: int
    text: str

    @property
    def place(self) -> str:
        """Return the file's name and the line."""
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor without memory.

    - ``values(index)``: what a load returns for element offsets (int64) of an index tensor; None for data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    values: Callable[[Any], Any] | None = None

    @property
    def size(self) -> int:
        """Return the number of elements from the first to the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def stride(self, dim: int) -> int:
        """Return the stride of a dimension, as expressions of a launch name it."""
        return self.strides[dim]

    def numel(self) -> int:
        """Return the number of elements, as expressions of a launch name it."""
        return math.prod(map(int, self.shape))

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element."""
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A load or store whose address or mask is not that of exact integers.

    - ``kind``: "reads" or "writes", at another address; "reads what its mask excludes",
      "skips", or "stores a wrapped number", which another kernel may use.
    - ``tensor``: the tensor that exact integers address; ``away``: bytes from there to the actual address.
    - ``lands``: the tensor at the actual address, "" for none.
    """

    site: Site
    kind: str
    tensor: str
    away: int
    lands: str
    sources: frozenset[Site]


@dataclass(slots=True)
class Observation:
    """What a run saw.

    - ``peaks``: by expression, the largest exact value, where -2^31 counts as 2^31 - 1.
    - ``wraps``: expressions with a value that no int32 has; ``follows``: those whose operands had wrapped.
    - ``accesses``: wrong accesses; ``live``: number of accesses with a true mask.
    - ``outside``: the first exact address that is outside its tensor, as text, or "".
    - ``is_valid``: whether every index tensor can hold its numbers.
    """

    peaks: dict[Site, int] = field(default_factory=dict)
    wraps: set[Site] = field(default_factory=set)
    follows: set[Site] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    live: int = 0
    outside: str = ""
    is_valid: bool = True


Runner = Callable[[Mapping[str, Any], Sequence[int], Sequence[tuple[int, int, int]]], Observation]


@contextmanager
def running(kernel: Any, files: Sequence[str]) -> Iterator[Runner]:
    """Yield a function that runs programs of an interpreted kernel: of arguments, grid and programs.

    Arguments: Tensor, int, float, str, None or tuples of them, by name. ``files``: the files that the code of
    the kernel may be in. The function raises Unavailable, with the reason, if the kernel cannot be run.
    """
    from triton.runtime import interpreter

    log, watch = RunLog(), _Watch(interpreter, frozenset(files))
    with own_failures(), one_at_a_time():
        function = watch.prepared(kernel).rewrite()
        with language(interpreter, function, log, watch.prepared, Memory({}), watch):

            def run(
                arguments: Mapping[str, Any],
                grid: Sequence[int],
                programs: Sequence[tuple[int, int, int]],
            ) -> Observation:
                watch.begin(arguments)
                log.budget = Budget(operations=_MOST_OPERATIONS)
                try:
                    with np.errstate(all="ignore"), own_failures():
                        interpreter.interpreter_builder.set_grid_dim(*(*grid, 1, 1)[:3])
                        given = {n: watch.argument(function, n, v) for n, v in arguments.items()}
                        for program in programs:
                            interpreter.interpreter_builder.set_grid_idx(*program)
                            function(**given)
                except AttnLabError:
                    raise
                except TooLong as error:
                    why = f"more than {_MOST_OPERATIONS} operations in one run"
                    raise Unavailable(why) from error
                except Exception as error:
                    raise Unavailable(_reason(error, files)) from error
                return watch.seen

            yield run


def _reason(error: BaseException, files: Sequence[str]) -> str:
    """Return an error in one line, with the kernel's line."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename in files]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class Libdevice:
    """A library of functions on numbers: each returns its first argument, and none that is an integer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    @staticmethod
    def _call(name: str, *values: Any, **named: Any) -> Any:
        found = next(iter([*values, *named.values()]))
        if not found.dtype.is_floating():
            raise Unavailable(f"libdevice.{name} of integers is not known here")
        return found


class _While:
    """Stops a while loop whose end is far."""

    def __init__(self) -> None:
        self._left = _MOST_ITERATIONS

    def more(self) -> bool:
        self._left -= 1
        return self._left >= 0


class _Loop:
    """The iterations of a loop that run, and the variables that the others would have changed."""

    def __init__(self, watch: "_Watch", numbers: range, convert: Callable[[int], Any]) -> None:
        self._watch, self._numbers, self._convert = watch, numbers, convert
        self._count = len(numbers)
        self._skip = self._count > 6
        self._kept: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        numbers = self._numbers
        for number in [*numbers[:3], *numbers[-2:]] if self._skip else numbers:
            yield self._convert(number)

    def carry(self, names: Sequence[str], values: Mapping[str, Any]) -> tuple[Any, ...]:
        found = {name: values.get(name) for name in names}
        if self._skip and len(self._kept) < 3:
            self._kept.append(found)
            if len(self._kept) == 3:
                one, two, three = self._kept
                times = self._count - 5
                found = {n: self._watch.moved((one[n], two[n], three[n]), times) for n in names}
                self._kept.append({})
        return tuple(found[name] for name in names)


class _Watch:
    """Patches of the language: the memory, exact integers, loops and block pointers."""

    name = ""

    def __init__(self, interpreter: Any, files: frozenset[str]) -> None:
        self._i, self._files, self.seen = interpreter, files, Observation()
        self._tensors: list[Tensor] = []
        self._address: dict[int, int] = {}
        self._rewritten: set[int] = set()

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Begin a run: give addresses to the tensors, and forget what was seen."""
        self.seen, self._tensors, self._address = Observation(), [], {}
        for value in _flat(arguments.values()):
            if isinstance(value, Tensor) and id(value) not in self._address:
                self._address[id(value)] = _FIRST + len(self._tensors) * _APART
                self._tensors.append(value)

    # Arguments

    def argument(self, function: Any, name: str, value: Any) -> Any:
        """Return an argument as the kernel receives it."""
        annotation = inspect.get_annotations(function).get(name)
        text = str(getattr(annotation, "__name__", annotation))
        if "constexpr" in text or value is None or isinstance(value, str):
            return value
        if isinstance(value, tuple):
            inner = [self.argument(function, name, one) for one in value]
            return self._i._tuple_create(value, inner)
        tl = self._i.tl
        if isinstance(value, Tensor):
            address = np.array([self._address[id(value)]], dtype=np.uint64)
            return self._tensor(address, tl.pointer_type(getattr(tl, value.dtype)))
        if isinstance(value, bool):
            return self._tensor(np.array([value]), tl.int1)
        if isinstance(value, int):
            return self.scalar(value, "64" in text or not -LIMIT <= value < LIMIT)
        if isinstance(value, float):
            return self._tensor(np.array([value], dtype=np.float32), tl.float32)
        return value

    def scalar(self, value: int, is_wide: bool) -> Any:
        """Return an int32 or int64 scalar of the language."""
        tl = self._i.tl
        dtype, kind = (tl.int64, np.int64) if is_wide else (tl.int32, np.int32)
        return self._tensor(np.array([value], dtype=kind), dtype)

    def _tensor(self, data: Any, dtype: Any) -> Any:
        return self._i.tl.tensor(self._i.TensorHandle(data, dtype), dtype)

    def prepared(self, function: Any) -> Any:
        """Return a called function, with the names that its loops need."""
        if id(function) not in self._rewritten:
            self._rewritten.add(id(function))
            function.fn.__globals__.update({LOOP_MAKER: self.loop, WHILE_MAKER: _While})
        return function

    # Loops

    def loop(self, is_static: bool, *arguments: Any, **options: Any) -> _Loop:
        """Return a loop; its variable is an int of Python if static, else a scalar of the language."""
        if "arg2" in options or "end" in options:
            arguments = (*arguments, options.get("arg2", options.get("end")))
        if "step" in options:
            arguments = (0, *arguments) if len(arguments) == 1 else arguments
            arguments = (*arguments[:2], options["step"])
        numbers = [getattr(one, "value", one) for one in arguments]
        is_wide = any(getattr(getattr(n, "dtype", None), "name", "") == "int64" for n in numbers)
        plain = (n.handle.data.reshape(-1)[0] if hasattr(n, "handle") else n for n in numbers)
        found = range(*map(int, plain))
        if is_static:
            return _Loop(self, found, int)
        return _Loop(self, found, lambda n: self.scalar(n, is_wide))

    def moved(self, values: tuple[Any, Any, Any], times: int) -> Any:
        """Return a variable after ``times`` more iterations, if its three values lie on a line."""
        tl, third = self._i.tl, values[2]
        if not all(isinstance(v, tl.tensor) for v in values):
            return third
        kind = third.handle.dtype
        is_pointer = kind.is_ptr()
        if not (is_pointer or getattr(kind, "name", "") in ("int32", "int64")):
            return third
        exact = [_exact(v.handle).data.astype(np.int64) for v in values]
        if any(e.shape != exact[0].shape for e in exact):
            return third
        change = exact[2] - exact[1]
        if (change != exact[1] - exact[0]).any() or not change.any():
            return third
        data = exact[2] + change * times
        handle = self._i.TensorHandle(data.astype(third.handle.data.dtype), kind)
        sources = third.handle.attr.get("exact", (None, frozenset()))[1]
        if sources or (handle.data.astype(np.int64) != data).any():
            wide = self._i.TensorHandle(
                data.astype(np.uint64 if is_pointer else np.int64), kind if is_pointer else tl.int64
            )
            handle.attr["exact"] = (wide, sources)
        return tl.tensor(handle, third.type)

    # The extension protocol of attnlab.kernels.triton.patches

    def patch_language(self, scope: Any) -> None:
        """Patch block pointers, and what has no effect on an address."""
        tl = self._i.tl
        patch_block_pointers(self._i, scope, self._wide)
        for name in ("device_assert", "device_print", "assume", "debug_barrier"):
            if hasattr(tl, name):
                scope.set_attr(tl, name, _nothing)
        for name, value in _OF_CUDA.items():
            if not hasattr(tl.extra.cuda, name):
                setattr(tl.extra.cuda, name, None)
            scope.set_attr(tl.extra.cuda, name, value)

    def _wide(self, number: Any) -> Any:
        number = getattr(number, "value", number)
        if isinstance(number, int):
            return self.scalar(number, True)
        return number.to(self._i.tl.int64)

    def patch_builder(self, scope: Any) -> None:
        """Patch the operations."""
        builder = self._i.InterpreterBuilder
        skipped = "load|store|atomic|program|range|print|assert|assume|barrier|dot|histogram|descr|asm|extern"
        for name in dir(builder):
            if name.startswith("create_") and not re.search(skipped, name):
                scope.set_attr(builder, name, self._following(getattr(builder, name)))
        for name, function in {
            "mul": self._watched(builder.create_mul, np.multiply),
            "add": self._watched(builder.create_add, np.add),
            "sub": self._watched(builder.create_sub, np.subtract),
            "shl": self._watched(builder.create_shl, np.left_shift),
            "int_cast": self._cast(builder.create_int_cast),
            "extern_elementwise": self._unknown,
            "dot": lambda builder, a, b, c, *rest: c,  # no address uses it
            "inline_asm": self._assembly,
            "masked_load": self._load,
            "masked_store": self._store,
            "atomic_rmw": self._change,
            "atomic_cas": self._exchange,
        }.items():
            scope.set_attr(builder, f"create_{name}", function)

    def _unknown(
        self, library: str, path: str, symbol: str, values: Any, type_: Any, is_pure: bool
    ) -> Any:
        """Return 1 for a function of a library, if it is no integer, on which an address may depend."""
        kind = type_.scalar
        if not kind.is_floating():
            raise Unavailable(f"{symbol} returns integers that are not known here")
        dtype = self._i._get_np_dtype(kind)
        return self._i.TensorHandle(np.ones(np.shape(values[0].data), dtype), kind)

    def _assembly(
        self, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
    ) -> Any:
        kinds = types if isinstance(types, list | tuple) else [types]
        what = "", "", "inline assembly"
        return Results([self._unknown(*what, values, one, is_pure) for one in kinds])

    # Integers

    def _following(self, compute: Any) -> Any:
        """Return an operation that also computes with exact operands, where a value has wrapped."""
        handle = self._i.TensorHandle

        def computed(builder: Any, *args: Any) -> Any:
            found = compute(builder, *args)
            marks = [
                a.attr["exact"][1] for a in args if isinstance(a, handle) and "exact" in a.attr
            ]
            if marks and isinstance(found, handle):
                exact = compute(builder, *(_exact(a) if isinstance(a, handle) else a for a in args))
                found.attr["exact"] = (exact, frozenset().union(*marks))
            return found

        return computed

    def _watched(self, compute: Any, op: Any) -> Any:
        """Return an operation on integers that notes its largest exact value, and where it wraps."""
        int32, int64 = self._i.tl.int32, self._i.tl.int64

        def computed(builder: Any, left: Any, right: Any) -> Any:
            if left.dtype != int32 or right.dtype != int32:
                return compute(builder, left, right)
            has_wrapped = "exact" in left.attr or "exact" in right.attr
            exact = op(_exact(left).data.astype(np.int64), _exact(right).data.astype(np.int64))
            found = self._i.TensorHandle(exact.astype(np.int32), int32)
            sources = self._note(exact, has_wrapped)
            if has_wrapped or sources:
                before = [h.attr["exact"][1] for h in (left, right) if "exact" in h.attr]
                wide = self._i.TensorHandle(exact, int64)
                found.attr["exact"] = (wide, frozenset().union(*before, sources))
            return found

        return computed

    def _cast(self, compute: Any) -> Any:
        """Return a conversion that keeps the exact value of an int64 that becomes an int32."""
        int64, following = self._i.tl.int64, self._following(compute)

        def computed(builder: Any, source: Any, target: Any, is_signed: Any) -> Any:
            kind = target.scalar.name
            if "exact" not in source.attr and not (kind == "int32" and source.dtype == int64):
                return compute(builder, source, target, is_signed)
            if kind not in ("int32", "int64"):
                return following(builder, source, target, is_signed)
            found = compute(builder, source, target, is_signed)
            exact = _exact(source).data.astype(np.int64)
            sources = source.attr.get("exact", (None, frozenset()))[1]
            if kind == "int32":
                sources |= self._note(exact, bool(sources))
            if sources:
                found.attr["exact"] = (self._i.TensorHandle(exact, int64), sources)
            return found

        return computed

    def _note(self, exact: Any, has_wrapped: bool) -> frozenset[Site]:
        """Note the largest value of the current expression; return it, in a set, if it wraps."""
        if not exact.size:
            return frozenset()
        site = self._site()
        peak = max(int(exact.max()), -int(exact.min()) - 1)
        if peak > self.seen.peaks.get(site, -1):
            self.seen.peaks[site] = peak
        if peak < LIMIT:
            return frozenset()
        self.seen.wraps.add(site)
        if has_wrapped:
            self.seen.follows.add(site)
        return frozenset((site,))

    def _site(self) -> Site:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        if frame is None:
            return Site("", 0, 0, "?")
        return _site_of(frame.f_code, frame.f_lasti)

    # Memory

    def _place(self, address: int) -> Tensor | None:
        index, offset = divmod(address - _FIRST, _APART)
        if not 0 <= index < len(self._tensors):
            return None
        one = self._tensors[index]
        return one if offset < one.size * one.element_bytes else None

    def _look(self, kind: str, pointers: Any, mask: Any) -> tuple[Any, Any]:
        """Note whether an access is where exact integers would have it; return addresses and mask."""
        exact, sources = pointers.attr.get("exact", (pointers, frozenset()))
        shape = pointers.data.shape
        asked = np.ones(shape, np.bool_)
        right = asked
        if mask is not None:
            asked = np.broadcast_to(mask.data, shape).astype(np.bool_)
            right_mask, more = mask.attr.get("exact", (mask, frozenset()))
            right = np.broadcast_to(right_mask.data, shape).astype(np.bool_)
            sources |= more
        self.seen.live += bool(asked.any())
        if not asked.any() and not sources:
            return pointers.data, asked
        self._check_outside(exact.data, right)
        if sources:
            self._compare(kind, pointers.data, exact.data, asked, right, sources)
        return pointers.data, asked

    def _check_outside(self, exact: Any, right: Any) -> None:
        live = exact[right]
        for address in (int(live.min()), int(live.max())) if live.size else ():
            if self._place(address) is None and not self.seen.outside:
                site = self._site()
                at = min(max(0, (address - _FIRST) // _APART), len(self._tensors) - 1)
                tensor = f" is outside {self._tensors[at].name}" if self._tensors else ""
                self.seen.outside = f"{site.place}{tensor}"

    def _compare(
        self, kind: str, actual: Any, exact: Any, asked: Any, right: Any, sources: Any
    ) -> None:
        cases = (
            (kind, asked & right & (actual != exact)),
            (f"{kind} what its mask excludes", asked & ~right),
            ("skips", right & ~asked),
        )
        for name, differ in cases:
            if differ.any():
                there, here = int(exact[differ][0]), int(actual[differ][0])
                lands = self._place(here)
                landed = "" if lands is None else lands.name
                self._note_access(name, sources, self._near(there), landed, here - there)
                return

    def _note_access(self, kind: str, sources: Any, tensor: str, lands: str, away: int = 0) -> None:
        found = {"kind": kind, "sources": sources, "tensor": tensor, "lands": lands, "away": away}
        self.seen.accesses.append(Access(site=self._site(), **found))

    def _near(self, address: int) -> str:
        """Return the name of the tensor whose part of the address space holds an address."""
        index = (address - _FIRST) // _APART
        return self._tensors[index].name if 0 <= index < len(self._tensors) else ""

    def _load(self, pointers: Any, mask: Any, other: Any = None, *rest: Any) -> Any:
        addresses, asked = self._look("reads", pointers, mask)
        element = pointers.get_element_ty()
        dtype = self._i._get_np_dtype(element)
        index = (addresses.astype(np.int64) - _FIRST) // _APART
        values = np.ones(addresses.shape, dtype=dtype)
        for number in np.unique(index[asked]):
            if 0 <= number < len(self._tensors) and self._tensors[number].values is not None:
                one = self._tensors[number]
                offsets = (
                    addresses.astype(np.int64) - _FIRST - number * _APART
                ) // one.element_bytes
                assert one.values is not None
                inside = (index == number) & (offsets < max(one.size, 1))
                with np.errstate(all="ignore"):
                    filled = np.broadcast_to(
                        np.asarray(one.values(np.where(inside, offsets, 0))), values.shape
                    )
                if (filled.astype(dtype) != filled)[inside].any():
                    self.seen.is_valid = False  # no such index tensor exists
                values = np.where(inside, filled.astype(dtype), values)
        unread = np.zeros((), dtype) if other is None else other.data
        return self._i.TensorHandle(np.where(asked, values, unread).astype(dtype), element)

    def _store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        addresses, asked = self._look("writes", pointers, mask)
        exact, sources = value.attr.get("exact", (value, frozenset()))
        if not sources or value.dtype.is_floating():
            return
        differ = asked & np.broadcast_to(exact.data != value.data, asked.shape)
        if differ.any():
            place = self._near(int(addresses[differ][0]))
            self._note_access("stores a wrapped number", sources, place, place)

    def _change(self, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._look("writes", pointers, mask)
        return self._i.TensorHandle(np.zeros_like(value.data), value.dtype)

    def _exchange(self, pointers: Any, compare: Any, value: Any, *rest: Any) -> Any:
        self._look("writes", pointers, None)
        return compare


def _exact(handle: Any) -> Any:
    """Return the handle with exact integers of a handle, or itself."""
    found = handle.attr.get("exact")
    return handle if found is None else found[0]


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a function of the language that has no effect here."""


_OF_CUDA = {"libdevice": Libdevice(), "gdc_wait": _nothing, "gdc_launch_dependents": _nothing}


@functools.cache
def _site_of(code: Any, instruction: int) -> Site:
    """Return the expression that an instruction computes."""
    line, end, column, last = list(code.co_positions())[instruction // 2]
    line, end, column = line or code.co_firstlineno, end or line or 0, column or 0
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(line, end + 1)]
    if lines and last is not None:
        lines[-1] = lines[-1][:last]
        lines[0] = lines[0][column:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return Site(code.co_filename, line, column, text)
