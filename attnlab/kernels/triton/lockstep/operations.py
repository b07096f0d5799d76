"""Operations of Triton's interpreter on values with a leading axis of programs.

Operations on single elements are those of the lab's interpreter; they may not rely on NumPy's extension of
shapes to the left, because it is silently wrong where the number of programs is that of a tile. So their
operands must have the same number of axes, and every value the shape of its type after the axis of programs.
What is not listed here is refused.
"""

import math
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from attnlab.kernels.triton.lockstep.control import (
    Range,
    Refused,
    is_same_for_all,
    running,
    same_for_all,
)

_ELEMENTWISE = re.findall(
    r"\w+",
    """
fadd fsub fmul fdiv frem fneg fabs fma mul sub precise_divf approx_divf sdiv udiv srem urem idiv shl lshr ashr
minsi minui minimumf minnumf maxsi maxui maximumf maxnumf clampf select and xor or iabs umulhi
icmpSLE icmpSLT icmpSGE icmpSGT icmpULE icmpULT icmpUGE icmpUGT icmpEQ icmpNE
fcmpOLT fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE
cos sin exp exp2 log log2 sqrt precise_sqrt rsqrt floor ceil erf
bitcast int_to_ptr ptr_to_int fp_to_fp si_to_fp ui_to_fp fp_to_si fp_to_ui fp_ext fp_trunc
""",
)
_AS_IT_IS = {
    *("create_barrier", "create_get_num_programs", "create_split", "create_extern_elementwise"),
    *("create_grid_dependency_wait", "create_grid_dependency_launch_dependents"),
}
_FEW = 4096  # elements from which torch converts faster than NumPy


def sum_handle_type(interpreter: Any) -> Any:
    """Return a kind of handle that holds a sum of integers as its summands."""

    class SumHandle(interpreter.TensorHandle):  # type: ignore[misc]
        """A sum of integer arrays ``parts``, each much smaller than the sum; ``data`` adds them.

        ``shape`` is that of the sum. Offsets of a tile are a sum of rows and columns, so that its load can
        gather rows. No partial sum overflows, or the integers have 64 bits and wrap.
        """

        def __init__(self, parts: list[Any], shape: tuple[int, ...], dtype: Any) -> None:
            self.parts, self.shape, self.dtype = parts, shape, dtype
            self.attr: dict[str, Any] = {}
            self._sum: Any = None

        @property
        def data(self) -> Any:
            if self._sum is None:
                total = self.parts[0]
                for part in self.parts[1:]:
                    total = total + part
                same = total.shape == self.shape
                self._sum = total if same else np.broadcast_to(total, self.shape)
            return self._sum

    return SumHandle


def dense(data: Any) -> Any:
    """Return an array with the axes along which nothing changes (stride 0) of length 1."""
    if 0 not in data.strides:
        return data
    index = (
        slice(0, 1) if stride == 0 and size > 1 else slice(None)
        for size, stride in zip(data.shape, data.strides, strict=True)
    )
    return data[tuple(index)]


def _parts(handle: Any) -> list[Any]:
    return handle.parts if hasattr(handle, "parts") else [dense(handle.data)]


def shape_of(handle: Any) -> tuple[int, ...]:
    """Return the shape of a handle's array, without computing a sum."""
    found: tuple[int, ...] = handle.shape if hasattr(handle, "parts") else handle.data.shape
    return found


def _joined(parts: list[Any]) -> list[Any]:
    """Return summands with those of the same shape added."""
    found: dict[tuple[int, ...], Any] = {}
    for part in parts:
        known = found.get(part.shape)
        found[part.shape] = part if known is None else known + part
    return list(found.values())


def _spread(data: Any, shape: tuple[int, ...]) -> Any:
    """Return an array (P or 1, …) with the shape of a block after its first axis."""
    wanted = (data.shape[0], *shape)
    return data if data.shape == wanted else np.broadcast_to(data, wanted)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an operation on arrays of two shapes."""
    return one if one == other else np.broadcast_shapes(one, other)


def _rank(data: Any, shape: tuple[int, ...]) -> Any:
    return data.reshape(data.shape[0], *(1,) * len(shape))


def _aligned(*arrays: Any) -> list[Any]:
    """Return arrays with the same length of their first axis."""
    size = max(one.shape[0] for one in arrays)
    return [np.broadcast_to(one, (size, *one.shape[1:])) for one in arrays]


def _taken(data: Any, index: Any, axis: int) -> Any:
    data, index = _aligned(data, index)
    return np.take_along_axis(data, index, axis)


class Operations:
    """The builder's operations for one interpreter."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._handle = interpreter, interpreter.TensorHandle
        self._sum = sum_handle_type(interpreter)

    def _like(self, data: Any, arg: Any) -> Any:
        """Return an array as a handle with the type of the elements of another one."""
        return self._handle(data, arg.dtype.scalar)

    def patch_builder(self, scope: Any) -> None:
        """Replace the operations of the builder, through ``scope``; refuse those that are not known."""
        builder, tl = self._interpreter.InterpreterBuilder, self._interpreter.tl
        handle, like = self._handle, self._like
        own: dict[str, Callable[..., Any]] = {
            "get_program_id": self._program_id,
            "make_range": lambda _, ty, a, b: handle(
                np.arange(a, b, dtype=np.int32)[None], tl.int32
            ),
            "splat": lambda _, ty, arg: like(_spread(_rank(arg.data, ty.shape), ty.shape), arg),
            "unsplat": lambda _, arg: like(arg.data.reshape(arg.data.shape[0], -1)[:, 0], arg),
            "expand_dims": self._expand_dims,
            "broadcast": self._broadcast,
            "trans": lambda _, arg, perm: like(
                np.transpose(arg.data, [0, *(axis + 1 for axis in perm)]), arg
            ),
            "reshape": lambda _, arg, shape, *rest: like(
                arg.data.reshape(arg.data.shape[0], *shape), arg
            ),
            "cat": lambda _, a, b: like(np.concatenate(_aligned(a.data, b.data), 1), a),
            "join": lambda _, a, b: like(np.stack(_aligned(a.data, b.data), -1), a),
            "gather": lambda _, arg, index, axis: like(_taken(arg.data, index.data, axis + 1), arg),
            "add": self._add,
            "addptr": self._addptr,
            "int_cast": self._int_cast(builder.create_int_cast),
            "dot": self._dot,
            "load": self._load,
            "store": self._store,
            "assert": self._assert,
            "assume": lambda builder, condition: self._assert(builder, condition, "Assume failed"),
        }
        known = {f"create_{name}" for name in (*own, *_ELEMENTWISE)} | _AS_IT_IS
        known |= {"create_masked_load", "create_masked_store"}  # of the batch's memory
        for name in _ELEMENTWISE:
            if hasattr(builder, f"create_{name}"):
                compute = _same_rank(handle, getattr(builder, f"create_{name}"))
                scope.set_attr(builder, f"create_{name}", self._direct(compute))
        for name in ("sdiv", "srem"):
            divide = getattr(builder, f"create_{name}")
            scope.set_attr(builder, f"create_{name}", _positive(divide))
        for name, function in own.items():
            scope.set_attr(builder, f"create_{name}", _method(function))
        scope.set_attr(builder, "cast_impl", self._cast(builder.cast_impl))
        scope.set_attr(tl.tensor, "__init__", self._checked(tl.tensor.__init__))
        for name in dir(builder):
            if name.startswith("create_") and name not in known:
                scope.set_attr(builder, name, _refusing(name.removeprefix("create_")))

    def patch_language(self, scope: Any) -> None:
        """Replace what the language itself does with values, through ``scope``."""
        interpreter, tl = self._interpreter, self._interpreter.tl
        reductions = Reductions(interpreter)
        for lang in (tl, tl.core):
            scope.set_attr(lang, "reduce", reductions.reduce)
            scope.set_attr(lang, "associative_scan", reductions.scan)
            scope.set_attr(lang, "range", Range)
            scope.set_attr(lang, "static_range", Range)
            scope.set_attr(lang, "static_print", _refusing("static_print"))
        scope.set_attr(tl.tensor, "__bool__", _truth_of)
        scope.set_attr(tl.tensor, "__index__", _index_of)
        scope.set_attr(tl.tensor, "T", property(self._transposed))

    def _checked(self, make: Any) -> Any:
        """Return a ``tensor.__init__`` that checks the shape of each value against its type."""

        known: dict[str, tuple[Any, Any, Any, tuple[int, ...], int]] = {}

        def init(tensor: Any, handle: Any, type: Any) -> None:
            found = known.get(type.name)
            if found is None:
                make(tensor, handle, type)
                sizes = tuple(type.shape) if type.is_block() else ()
                elements = int(np.prod(sizes, initial=1))
                found = tensor.shape, tensor.numel, tensor.dtype, sizes, elements
                known[type.name] = found
            tensor.handle, tensor.type = handle, type
            tensor.shape, tensor.numel, tensor.dtype, sizes, elements = found
            if handle is None:  # of a store
                return
            shape, batch = shape_of(handle), running()
            if shape[1:] != sizes or (shape[0] != 1 and shape[0] != batch.size):
                raise Refused(f"a value of shape {shape} for {batch.size} programs and {type.name}")
            if elements > 1:
                batch.check_size(elements)

        return init

    def _direct(self, compute: Any) -> Any:
        """Return an operation that calls a function of NumPy at once, if it is one on two arrays."""
        interpreter, handle = self._interpreter, self._handle
        try:
            function = compute(_Asked(), _NO_DATA, _NO_DATA)
        except Exception:
            return compute
        if not isinstance(function, np.ufunc):
            return compute

        def operation(builder: Any, left: Any, right: Any) -> Any:
            one, other = left.data, right.data
            if one.ndim != other.ndim or one.dtype.kind == "b":
                return compute(builder, left, right)
            data, dtype = function(one, other), left.dtype.scalar
            if not interpreter._validate_np_data_size(data, dtype):
                data = data.astype(interpreter._get_np_dtype(dtype))
            return handle(data, dtype)

        return operation

    def _transposed(self, tensor: Any) -> Any:
        tl, block = self._interpreter.tl, list(tensor.type.shape)
        block[-1], block[-2] = block[-2], block[-1]
        axes = [0, *reversed(range(1, len(block) + 1))]
        handle = self._handle(np.transpose(tensor.handle.data, axes), tensor.handle.dtype)
        return tl.tensor(handle, tl.block_type(tensor.dtype, block))

    def _program_id(self, builder: Any, axis: int) -> Any:
        column = running().ids[:, axis]
        column = column[:1] if (column == column[0]).all() else column
        return self._handle(column.astype(np.int32), self._interpreter.tl.int32)

    def _expand_dims(self, builder: Any, arg: Any, axis: int) -> Any:
        at = axis + 1 if axis >= 0 else axis
        if hasattr(arg, "parts"):
            parts = [np.expand_dims(part, at) for part in arg.parts]
            at = at if at >= 0 else at + len(arg.shape) + 1
            return self._sum(parts, (*arg.shape[:at], 1, *arg.shape[at:]), arg.dtype)
        return self._like(np.expand_dims(arg.data, at), arg)

    def _broadcast(self, builder: Any, arg: Any, shape: Any) -> Any:
        if hasattr(arg, "parts") and len(arg.shape) == len(shape) + 1:
            return self._sum(arg.parts, (arg.shape[0], *shape), arg.dtype)
        data = arg.data  # new axes follow that of the programs, as if a program were alone
        data = data.reshape(len(data), *(1,) * (len(shape) + 1 - data.ndim), *data.shape[1:])
        return self._like(_spread(data, shape), arg)

    def _add(self, builder: Any, left: Any, right: Any) -> Any:
        _check_ranks(left, right)
        found = self._summed(left, right) if len(shape_of(left)) > 1 else None
        return builder.binary_op(left, right, np.add) if found is None else found

    def _summed(self, left: Any, right: Any) -> Any:
        """Return a sum of integers as its parts, if they are much smaller; else None."""
        parts = [*_parts(left), *_parts(right)]
        dtype = parts[0].dtype
        if dtype not in (np.int32, np.int64) or any(part.dtype != dtype for part in parts):
            return None
        shape = _common(shape_of(left), shape_of(right))
        if not _is_worth_it(parts, shape) or (dtype == np.int32 and _may_overflow(parts)):
            return None
        return self._sum(_joined(parts), shape, left.dtype.scalar)

    def _addptr(self, builder: Any, pointer: Any, offset: Any) -> Any:
        _check_ranks(pointer, offset)
        width = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
        offsets = [part.astype(np.uint64) * width for part in _parts(offset)]
        parts = _joined([*_parts(pointer), *offsets])
        shape = _common(shape_of(pointer), shape_of(offset))
        found = self._sum(parts, shape, pointer.dtype)
        return found if _is_worth_it(parts, shape) else self._handle(found.data, pointer.dtype)

    def _int_cast(self, compute: Any) -> Any:
        def cast(builder: Any, source: Any, target: Any, is_signed: bool) -> Any:
            if hasattr(source, "parts") and target.scalar == self._interpreter.tl.int64:
                parts = [part.astype(np.int64) for part in source.parts]
                return self._sum(parts, source.shape, target.scalar)
            return compute(builder, source, target, is_signed)

        return cast

    def _cast(self, compute: Any) -> Any:
        """Return ``cast_impl`` that lets torch convert large blocks between float16 and float32."""
        tl = self._interpreter.tl
        kinds = {(tl.float16, tl.float32): torch.float32, (tl.float32, tl.float16): torch.float16}

        def cast(builder: Any, source: Any, target: Any) -> Any:
            wanted = kinds.get((source.dtype.scalar, target.scalar))
            if wanted is None or source.data.size < _FEW:
                return compute(builder, source, target)
            return self._handle(converted(source.data, wanted), target.scalar)

        return cast

    def _dot(
        self, builder: Any, left: Any, right: Any, acc: Any, precision: Any, limit: Any
    ) -> Any:
        _check_ranks(left, right, acc)
        interpreter, tl = self._interpreter, self._interpreter.tl
        x, y, dtype = left.data, right.data, acc.data.dtype
        if any(
            one.dtype.primitive_bitwidth == 8 and one.dtype.is_floating() for one in (left, right)
        ):
            x, y = (
                interpreter._convert_float(data, one.dtype, tl.float16, None).view(np.float16)
                for data, one in ((x, left), (y, right))
            )
        if dtype == np.float32:
            x, y = (converted(a, torch.float32) if a.dtype == np.float16 else a for a in (x, y))
        return self._handle(np.matmul(x, y, dtype=dtype) + acc.data, acc.dtype.scalar)

    def _everywhere(self, pointers: Any) -> Any:
        """Return a mask that is true for all pointers."""
        ones = np.ones((1,) * len(shape_of(pointers)), np.bool_)
        return self._handle(ones, self._interpreter.tl.int1)

    def _load(self, builder: Any, pointers: Any, *rest: Any) -> Any:
        return builder.create_masked_load(pointers, self._everywhere(pointers), None, *rest)

    def _store(self, builder: Any, pointers: Any, value: Any, *rest: Any) -> Any:
        return builder.create_masked_store(pointers, value, self._everywhere(pointers), *rest)

    def _assert(self, builder: Any, condition: Any, message: Any) -> None:
        if not running().live(condition.data).all():
            raise Refused("an assertion that fails")


class _Asked:
    """A builder that returns the function which an operation on two arrays applies."""

    def binary_op(self, left: Any, right: Any, function: Any) -> Any:
        """Return the function."""
        return function


_NO_DATA = SimpleNamespace(data=None, dtype=None)


def _is_worth_it(parts: list[Any], shape: tuple[int, ...]) -> bool:
    return bool(math.prod(shape) > 2 * sum(part.size for part in parts))


def _may_overflow(parts: list[Any]) -> bool:
    most = sum(max(abs(int(part.min())), abs(int(part.max()))) for part in parts)
    return most >= 1 << 31


def _check_ranks(*handles: Any) -> None:
    first, *rest = map(shape_of, handles)
    if any(len(one) != len(first) for one in rest):
        raise Refused("an operation on values with different numbers of axes")


def _same_rank(handle: Any, compute: Any) -> Any:
    """Return an operation on elements that refuses operands with different numbers of axes."""

    def operation(builder: Any, first: Any, *rest: Any) -> Any:
        for other in rest:
            if isinstance(other, handle) and other.data.ndim != first.data.ndim:
                raise Refused("an operation on values with different numbers of axes")
        return compute(builder, first, *rest)

    return operation


def _positive(divide: Any) -> Any:
    """Return a division that refuses negative integers where an int of Python may stand in for one.

    Python rounds down, Triton toward zero. A loop variable that is a scalar here is an int there.
    """

    def operation(builder: Any, left: Any, right: Any) -> Any:
        batch = running()
        if batch.scalar_loops and (
            (batch.live(left.data) < 0).any() or (batch.live(right.data) <= 0).any()
        ):
            raise Refused("a division of negative integers in a loop")
        return divide(builder, left, right)

    return operation


def _method(function: Callable[..., Any]) -> Any:
    """Return a function as a method of the builder, which it gets first."""

    def method(builder: Any, *args: Any, **named: Any) -> Any:
        return function(builder, *args, **named)

    return method


def _refusing(name: str) -> Any:
    def operation(*args: Any, **named: Any) -> Any:
        raise Refused(f"the operation {name}")

    return operation


def converted(data: Any, dtype: torch.dtype) -> Any:
    """Return numbers as float16 or float32, as NumPy converts them, with torch, which is faster.

    Torch makes NaN quiet. So NumPy converts blocks that have one.
    """
    found = torch.from_numpy(data).to(dtype).numpy()
    wide = data if data.dtype == np.float32 else found
    return data.astype(found.dtype) if np.isnan(wide).any() else found


def _one_each(tensor: Any) -> Any:
    data = tensor.handle.data
    if data.size != data.shape[0]:
        raise Refused("a block as an index")
    return data.reshape(-1)


def _index_of(tensor: Any) -> int:
    return operator.index(same_for_all(_one_each(tensor)))


def _truth_of(tensor: Any) -> bool:
    data = tensor.handle.data
    return True if data.size != data.shape[0] else is_same_for_all(tensor)


class Reductions:
    """``reduce`` and ``associative_scan`` of values with an axis of programs, for one interpreter."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, standard = interpreter, interpreter.tl.standard
        largest, smallest = np.fmax.reduce, np.fmin.reduce  # as np.nanmax and np.nanmin
        self._sum = standard._sum_combine
        self._operations: dict[Any, tuple[Any, Any]] = {
            self._sum: (np.sum, None),
            standard._elementwise_max: (largest, None),
            standard._elementwise_min: (smallest, None),
        }
        for tie in ("left", "fast"):
            for name, of, at in (("max", largest, np.nanargmax), ("min", smallest, np.nanargmin)):
                combine = getattr(standard, f"_arg{name}_combine_tie_break_{tie}", None)
                if combine is not None:
                    self._operations[combine] = (of, at)

    def _made(self, data: Any, dtype: Any) -> Any:
        tl = self._interpreter.tl
        data = np.asarray(data).astype(self._interpreter._get_np_dtype(dtype), copy=False)
        handle = self._interpreter.TensorHandle(data, dtype.scalar)
        sizes = list(data.shape[1:])
        return tl.tensor(handle, tl.block_type(dtype.scalar, sizes) if sizes else dtype.scalar)

    def reduce(
        self, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **rest: Any
    ) -> Any:
        """Return a reduction, as Triton's; refuse one with a function of the kernel."""
        value = input[0] if isinstance(input, tuple) else input
        axis, keep = (getattr(one, "value", one) for one in (axis, keep_dims))
        if combine_fn not in self._operations or (axis is not None and axis >= len(value.shape)):
            raise Refused("a reduction with a function of the kernel")
        of, at = self._operations[combine_fn]
        data = value.handle.data
        found = self._made(_over(of, data, axis, keep), value.dtype)
        if at is not None:
            return found, self._made(_over(at, data, axis, keep), self._interpreter.tl.int32)
        return (found,) if isinstance(input, tuple) else found

    def scan(
        self, input: Any, axis: int, combine_fn: Any, reverse: Any = False, **rest: Any
    ) -> Any:
        """Return a prefix sum, as Triton's; refuse any other scan."""
        value = input[0] if isinstance(input, tuple) else input
        if combine_fn is not self._sum or getattr(reverse, "value", reverse):
            raise Refused("a scan with a function of the kernel")
        data = np.cumsum(value.handle.data, axis=axis + 1 if axis >= 0 else axis)
        found = self._made(data, value.dtype)
        return (found,) if isinstance(input, tuple) else found


def _over(operation: Any, data: Any, axis: int | None, keep: bool) -> Any:
    """Return a reduction of each program's block."""
    if axis is not None:
        return operation(data, axis=axis + 1 if axis >= 0 else axis, keepdims=keep)
    if operation in (np.nanargmax, np.nanargmin):
        raise Refused("the place of an extreme of all elements")
    found = operation(data, axis=tuple(range(1, data.ndim)))
    return _rank(found, data.shape[1:]) if keep else found
