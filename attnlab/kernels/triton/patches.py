"""Patches of Triton's language for the time of a launch: fixes, caches and checks."""

import ast
import dataclasses
import functools
import importlib
import math
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton.assembly import Results, run_ptx
from attnlab.kernels.triton.block_pointers import patch_block_pointers
from attnlab.kernels.triton.kernel_text import AND_CALL, CHAIN_CALL, FOR_CALL, OR_CALL, WHILE_CALL
from attnlab.kernels.triton.lockstep.control import both, chain, either
from attnlab.kernels.triton.run_log import Memory, RunLog, counting, iterated, values_outside
from attnlab.kernels.triton.type_cache import cache_types, record_operations, watch_truth

# bfloat16 for Triton's interpreter, whose own computes with the raw bits of bfloat16 numbers.
#
# Here a block of bfloat16 holds float32 numbers that bfloat16 has. Every handle of such a block rounds its
# numbers to nearest even when it is made, so each operation rounds once. ``tl.dot`` multiplies these
# numbers and adds the products in float32, as the hardware does. Memory holds the 16 bits: :func:`decoded`
# and :func:`encoded` convert.

NAME = "bf16"
_NUMPY = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def is_bfloat16(dtype: Any) -> bool:
    """Answer whether a type of Triton is bfloat16; a pointer to it or a block of it is not."""
    return getattr(dtype, "name", "") == NAME


def rounded(data: Any) -> Any:
    """Return numbers as float32 numbers that bfloat16 has: to nearest even; NaN stays NaN. Keeps bool."""
    if data.dtype == np.bool_:
        return data  # the result of a comparison has the type of its operands
    numbers = np.asarray(data, dtype=np.float32)
    bits = numbers.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(numbers), numbers, nearest.view(np.float32))


def truncated(data: Any) -> Any:
    """Return numbers as float32 numbers that bfloat16 has, rounded toward zero."""
    bits = np.asarray(data, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(data), np.float32(np.nan), bits.view(np.float32))


def decoded(bits: Any) -> Any:
    """Return the numbers, float32, of the 16 bits of bfloat16 numbers."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encoded(numbers: Any) -> Any:
    """Return the 16 bits, uint16, of numbers that bfloat16 has."""
    wide = np.asarray(rounded(np.asarray(numbers, dtype=np.float32)))
    bits = wide.view(np.uint32)
    quiet = np.where(np.isnan(wide), bits | np.uint32(0x00400000), bits)  # not an infinity
    return (quiet >> np.uint32(16)).astype(np.uint16)


def patch_bfloat16(interpreter: Any, scope: Any) -> None:
    """Let the interpreter compute with bfloat16, and convert FP8 rightly, through ``scope``.

    :mod:`attnlab.kernels.triton.patches` rounds each handle, and converts what is loaded and stored.
    """
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    np_dtype, handle = interpreter._get_np_dtype, interpreter.TensorHandle
    bitcast, absolute = builder.create_bitcast, builder.create_fabs

    def stored_dtype(dtype: Any) -> Any:
        return np.dtype(np.float32) if is_bfloat16(dtype.scalar) else np_dtype(dtype)

    def cast_bits(self: Any, source: Any, target: Any) -> Any:
        if is_bfloat16(source.dtype.scalar):
            source = handle(encoded(source.data), tl.uint16)
        if not is_bfloat16(target.scalar):
            return bitcast(self, source, target)
        bits = bitcast(self, source, tl.uint16)
        return handle(decoded(bits.data), target.scalar)

    def without_sign(self: Any, number: Any) -> Any:
        if is_bfloat16(number.dtype.scalar):
            return handle(np.abs(number.data), number.dtype.scalar)
        return absolute(self, number)

    def constant(self: Any, value: float) -> Any:
        return handle(np.array([value], dtype=np.float32), tl.bfloat16)

    scope.set_attr(interpreter, "_get_np_dtype", stored_dtype)
    scope.set_attr(builder, "create_bitcast", cast_bits)
    scope.set_attr(builder, "create_fabs", without_sign)
    scope.set_attr(builder, "get_bf16", constant)
    scope.set_attr(
        interpreter, "_convert_float", _converter(interpreter._convert_float, interpreter._ir)
    )


def _converter(convert: Any, ir: Any) -> Any:
    """Return a ``_convert_float`` for FP8 and bfloat16, which converts other dtypes with ``convert``."""

    def converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.name in _FP8 and target.name in _WIDE:
            return _decoded(data, _FP8[source.name], _WIDE[target.name])
        if source.name in _WIDE and target.name in _FP8:
            return _encoded(data, _FP8[target.name])
        if is_bfloat16(target) and (source.name in _NUMPY or is_bfloat16(source)):
            is_to_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
            return truncated(data) if is_to_zero else np.asarray(data, dtype=np.float32)
        if is_bfloat16(source) and target.name in _NUMPY:
            return np.asarray(data, dtype=_NUMPY[target.name])
        return convert(data, source, target, rounding_mode)

    return converted


# ``and``, ``or`` and chained comparisons of blocks in interpreted kernels.
#
# Triton's compiler combines blocks element by element. In the interpreter, Python asks for the truth of the
# first block and returns one of the two, so that half of a mask is lost. The rewriter of Triton 3.6 to 3.8
# does not visit the value of an assignment; this one does.
#
# A loop counts its iterations, so that one without any operation can be stopped.


def with_bool_ops(rewriter: Any) -> None:
    """Let a function's rewriter of Triton combine blocks. Mutates it, and the globals of its function."""
    base = type(rewriter.ast_transformer)

    class Transformer(base):  # type: ignore[misc, valid-type]
        """Replaces ``a and b``, and ``a < b < c``, by a call that combines blocks.

        It evaluates an operand only if it is needed.
        """

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            node.value = self.visit(node.value)
            found: ast.AST = super().visit_Assign(node)
            return found

        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) == 1:
                return node
            parts: list[ast.expr] = [node.left]
            for sign, right in zip(node.ops, node.comparators, strict=True):
                pair = [ast.arg(arg="a"), ast.arg(arg="b")]
                left, other = (ast.Name(one.arg, ast.Load()) for one in pair)
                compared = ast.Compare(left=left, ops=[sign], comparators=[other])
                parts += [
                    ast.Lambda(args=_arguments(pair), body=compared),
                    ast.Lambda(args=_arguments([]), body=right),
                ]
            return _call_of(CHAIN_CALL, node, *parts)

        def visit_For(self, node: ast.For) -> ast.AST:
            self.generic_visit(node)
            node.iter = _call_of(FOR_CALL, node.iter, node.iter)
            return node

        def visit_While(self, node: ast.While) -> ast.AST:
            self.generic_visit(node)
            node.test = _call_of(WHILE_CALL, node.test, node.test)
            return node

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            name = AND_CALL if isinstance(node.op, ast.And) else OR_CALL
            first, *rest = node.values
            later = [ast.Lambda(args=_arguments([]), body=one) for one in rest]
            return _call_of(name, node, first, *later)

    rewriter.ast_transformer = Transformer()
    rewriter.fn.__globals__.update({AND_CALL: both, OR_CALL: either, CHAIN_CALL: chain})
    # It has no frame of its own, in which an error would be raised.
    each = functools.partial(map, iterated)
    rewriter.fn.__globals__.update({FOR_CALL: each, WHILE_CALL: iterated})


def _call_of(name: str, place: ast.expr, *arguments: ast.expr) -> ast.expr:
    call = ast.Call(func=ast.Name(name, ast.Load()), args=[*arguments], keywords=[])
    return ast.copy_location(call, place)


def _arguments(names: list[ast.arg]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])


# FP8 conversions for Triton's interpreter; its own have two bugs (Triton 3.6 and 3.9).
#
# It decodes NaN and infinity as finite numbers (e4m3fn 0x7F as 480). When it rounds up past the end of the
# fraction it loses the carry, so 15.9 becomes 8 instead of 16. Here torch converts. A value out of range
# becomes the largest finite value, as in the GPU's conversion (PTX: cvt.rn.satfinite).

_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
# bfloat16 numbers are in float32 here (:mod:`attnlab.kernels.triton.patches`).
_WIDE = {"fp16": torch.float16, "bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
_BITS = {torch.float16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64}


def _decoded(data: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Return FP8 bytes as the bit patterns of a wider dtype."""
    wide = torch.from_numpy(np.ascontiguousarray(data)).view(source).to(target)
    return wide.numpy().view(_BITS[target])


def _encoded(data: Any, target: torch.dtype) -> Any:
    """Return numbers as FP8 bytes: round to nearest even, saturate, keep NaN."""
    numbers = torch.from_numpy(np.ascontiguousarray(data))
    limit = torch.finfo(target).max
    return numbers.clamp(-limit, limit).to(target).view(torch.uint8).numpy()


# Operations in which the interpreters of Triton 3.6 to 3.9 differ: each computes as that of 3.9, and a GPU.
#
# So a kernel has the same result with each version.

_FP8_TYPES = ("fp8e4b8", "fp8e5b16")  # which Triton 3.6 and 3.7 do not know here


def patch_operations(interpreter: Any, scope: Any) -> None:
    """Replace the operations that differ, through ``scope``."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    _patch_minimum_and_maximum(interpreter, scope)
    binary = builder.binary_op

    def on_bits(self: Any, left: Any, right: Any, op: Any) -> Any:
        """Compute with int1 as an integer that wraps: NumPy's True + True is True."""
        if left.data.dtype == np.bool_ and right.data.dtype == np.bool_:
            numbers = op(left.data.astype(np.int8), right.data.astype(np.int8))
            return handle((numbers & 1).astype(np.bool_), left.dtype.scalar)
        return binary(self, left, right, op)

    def multiplied_and_added(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Round once: a product of two float32 numbers is exact in float64."""
        exact = np.multiply(x.data, y.data, dtype=np.float64)
        return handle(np.add(exact, z.data).astype(z.data.dtype), z.dtype.scalar)

    def shifted(self: Any, left: Any, right: Any) -> Any:
        """Shift as signed numbers, without a change of the operands."""
        signed = [
            handle(one.data.astype(interpreter._get_signed_np_dtype(one.data.dtype)), one.dtype)
            for one in (left, right)
        ]
        return self.binary_op(*signed, np.right_shift)

    splat = builder.create_splat

    def spread(self: Any, type: Any, arg: Any) -> Any:
        """Spread the result of a comparison as bool: its handle has the type of the operands."""
        if arg.data.dtype == np.bool_:
            return handle(np.full(tuple(type.shape), arg.data.item()), arg.dtype.scalar)
        return splat(self, type, arg)

    def all_ones(self: Any, type: Any) -> Any:
        dtype = interpreter._get_np_dtype(type)
        number = True if dtype == np.bool_ else np.array(-1).astype(dtype)
        return handle(np.full(1, number, dtype=dtype), type.scalar)

    for name, function in {
        "binary_op": on_bits, "create_fma": multiplied_and_added, "create_ashr": shifted,
        "get_all_ones_value": all_ones, "create_splat": spread,
    }.items():  # fmt: skip
        scope.set_attr(builder, name, function)


def _patch_minimum_and_maximum(interpreter: Any, scope: Any) -> None:
    """Let NaN lose against a number, as it does on a GPU unless a kernel asks for its propagation."""
    builder, no_propagation = interpreter.InterpreterBuilder, interpreter._ir.PROPAGATE_NAN.NONE

    def lesser(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, np.fmin)  # NaN loses, as in PTX's min

    def greater(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, np.fmax)

    def clamped(self: Any, number: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if propagate_nans == no_propagation:
            return lesser(self, greater(self, number, low), high)
        return self.ternary_op(number, low, high, np.clip)

    scope.set_attr(builder, "create_minnumf", lesser)
    scope.set_attr(builder, "create_maxnumf", greater)
    scope.set_attr(builder, "create_clampf", clamped)


def patch_dtypes(interpreter: Any, scope: Any) -> None:
    """Let the interpreter know all FP8 dtypes; needed after each of its patches of the language."""
    to_ir = interpreter.tl.dtype.to_ir

    def known(self: Any, builder: Any) -> Any:
        return self if self.name in _FP8_TYPES else to_ir(self, builder)

    scope.set_attr(interpreter.tl.dtype, "to_ir", known)


# Functions of the language, and of a GPU's library, that a module has under names of its own.

_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x),
    "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "atan": np.arctan,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "pow": np.power, "fdivide": np.divide,
    "fmod": np.fmod, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint,
    "fabs": np.abs, "fmin": np.fmin, "fmax": np.fmax,
}  # fmt: skip
_SYMBOL = re.compile(r"__(?:nv|ocml|ocml_native)_(?:fast_)?(\w+?)(?:_f32|_f64|f)?")


def bind_aliases(interpreter: Any, names: dict[str, Any]) -> None:
    """Let the names of a module that hold functions of the language, as in ``exp2 = tl.exp2``, work as those.

    Triton patches the language for a launch, but not what a module took from it before.
    """
    for name, value in [*names.items()]:
        if interpreter.tl.core.is_builtin(value) and not hasattr(value, "is_bound"):
            names[name] = _bound(interpreter, value)


@functools.cache
def bind_libdevice(interpreter: Any) -> None:
    """Let the functions of a GPU's library work in the interpreter, by whatever name a kernel calls them.

    ``triton.language.extra.libdevice``, which a driver replaces, gets those of CUDA. Launches run one after
    another, so that a kernel need not wait for the one before it.
    """
    extra = interpreter.tl.extra
    for name in ("gdc_wait", "gdc_launch_dependents"):  # in assembly up to Triton 3.8
        setattr(extra.cuda, name, lambda **named: None)
    for module in (extra.cuda, extra.cuda.libdevice, extra.hip.libdevice):
        bind_aliases(interpreter, vars(module))
    general = importlib.import_module(f"{extra.__name__}.libdevice")
    for name, function in vars(extra.cuda.libdevice).items():
        if interpreter.tl.core.is_builtin(function):
            setattr(general, name, function)


def _bound(interpreter: Any, function: Any) -> Any:
    """Return a function of the language that uses the interpreter's semantic, if it is given none."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **{"_semantic": interpreter.interpreter_semantic, **named})

    call.is_bound = True  # type: ignore[attr-defined]
    return call


def _patch_library(interpreter: Any, scope: Any) -> None:
    """Compute functions of a GPU's library with NumPy; a kernel's wait for the one before it does nothing."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def computed(
        self: Any, library: Any, path: Any, symbol: str, args: list[Any], *rest: Any
    ) -> Any:
        match = _SYMBOL.fullmatch(symbol)
        if match is None or match[1] not in _LIBDEVICE:
            raise Unavailable(f"{symbol} of a GPU's library is not interpreted")
        return handle(_LIBDEVICE[match[1]](*(one.data for one in args)), args[0].dtype.scalar)

    def assembled(
        self: Any, text: str, constraints: str, values: list[Any], types: Any, *rest: Any
    ) -> Any:
        kinds = [one.scalar for one in types]
        if any(one.name != "fp32" for one in kinds) or rest[-1] != 1:
            raise NotImplementedError("inline assembly must return one float32 number at a time")
        found = run_ptx(text, constraints, [one.data for one in values])
        return Results(handle(*pair) for pair in zip(found, kinds, strict=True))

    scope.set_attr(builder, "create_extern_elementwise", computed)
    scope.set_attr(builder, "create_inline_asm", assembled)
    for name in ("wait", "launch_dependents"):
        scope.set_attr(builder, f"create_grid_dependency_{name}", lambda self: None)


class Extension(Protocol):
    """Further patches of the language, after those of this module.

    ``name``: extensions of one name patch the same, in every launch; "" for one that is made for a launch.
    """

    @property
    def name(self) -> str:
        """Return the name."""

    def patch_language(self, scope: Any) -> None:
        """Patch what the functions of a module see, through ``scope``; called for each module."""

    def patch_builder(self, scope: Any) -> None:
        """Patch the operations, through ``scope``; called once."""


Change = tuple[Any, str, Any, Any]  # object, attribute, its value before, and after
_KEPT: dict[tuple[Any, ...], list[Change]] = {}  # patches of earlier launches
_MISSING = object()


@dataclasses.dataclass(slots=True, eq=False)
class _Launch:
    """A launch that runs.

    ``observed``, ``launched``, ``memory``, ``extension``: as of :func:`language`. ``changes``: the patches
    that were made; ``langs``: the ids of the modules of the language that they were made for, and
    ``modules``: those of the names of modules that see them.
    """

    observed: RunLog
    launched: Callable[[Any], Any]
    memory: Memory
    extension: Extension | None
    changes: list[Change] = dataclasses.field(default_factory=list)
    langs: frozenset[int] = frozenset()
    modules: set[int] = dataclasses.field(default_factory=set)

    def patch_module(self, interpreter: Any, function: Any) -> None:
        """Patch the language that a function sees, as an earlier launch did if nothing else is patched."""
        names = function.__globals__
        if id(names) in self.modules:
            return
        self.modules.add(id(names))
        bind_aliases(interpreter, names)
        known = (interpreter.tl, interpreter.tl.core)
        found = {id(one) for one in names.values() if one is known[0] or one is known[1]}
        if found and found <= self.langs:
            return
        name = "one by one" if self.extension is None else self.extension.name
        key = (name, self.langs, frozenset(found))
        kept = _KEPT.get(key) if name else None
        if kept is None or any(getattr(o, n, _MISSING) is not before for o, n, before, _ in kept):
            kept = _patched(interpreter, function, self.extension, name, is_first=not self.langs)
            if name:
                _KEPT[key] = kept
        else:
            for one, attribute, _, after in kept:
                setattr(one, attribute, after)
        self.changes += kept
        self.langs |= found

    def restore(self) -> None:
        """Give the language back what it had before the launch."""
        for one, name, before, _ in reversed(self.changes):
            if before is _MISSING:
                delattr(one, name)
            else:
                setattr(one, name, before)


_LAUNCHES: list[_Launch] = []  # that run, the innermost last


@functools.cache
def _linear_algebra() -> Any:
    """Return what limits the threads of NumPy's linear algebra: for a tile of a kernel, they wait for each
    other most of the time."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def language(
    interpreter: Any,
    kernel: Any,
    observed: RunLog,
    launched: Callable[[Any], Any],
    memory: Memory,
    extension: Extension | None = None,
) -> Iterator[None]:
    """Patch the language inside the block, once for each module whose functions the kernel calls.

    ``launched`` returns the form of a function that the lab interprets.
    ``memory`` is the memory that the launch may access. ``observed`` records int32 overflows and
    out-of-bounds accesses; the trace of ``memory``, if there is one, records every load and store.
    ``extension``: further patches.
    """
    _LAUNCHES.append(launch := _Launch(observed, launched, memory, extension))
    try:
        launch.patch_module(interpreter, kernel)
        with counting(observed), _linear_algebra().limit(limits=1):
            yield
    finally:
        launch.restore()
        _LAUNCHES.pop()


def _patched(
    interpreter: Any, function: Any, extension: Extension | None, name: str, *, is_first: bool
) -> list[Change]:
    """Patch the language as Triton does for a function, and return the changes.

    The operations are patched for the first function of a launch. A scalar is an array of shape (1,) here.
    Triton 3.6 makes an index of it with ``int``, which NumPy rejects from 2.4 on; Triton 3.7 and later remove
    the dimension first. A float is no index, as for Triton's compiler.
    """
    scope = interpreter._patch_lang(function)
    if name:
        record_operations(interpreter, scope, name)
    scope.set_attr(
        interpreter.tl.tensor, "__index__", lambda scalar: operator.index(scalar.handle.data.item())
    )
    patch_dtypes(interpreter, scope)
    if extension is not None:
        extension.patch_language(scope)
    if is_first:
        patch_block_pointers(interpreter, scope)
        patch_bfloat16(interpreter, scope)
        cache_types(interpreter, scope)
        patch_operations(interpreter, scope)
        _fix(interpreter, scope)
        _patch_library(interpreter, scope)
        _make_handles(interpreter, scope)
        _skip_overflow_checks(interpreter, scope)
        _watch(interpreter, scope)
        if extension is not None:
            extension.patch_builder(scope)
        scope.set_attr(interpreter.InterpretedFunction, "__call__", _call(interpreter))
    watch_truth(interpreter, scope)
    before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for one, name, value in scope._changes:
        value = _MISSING if value is interpreter._MISSING else value
        before.setdefault((id(one), name), (one, name, value))
    return [(one, name, value, getattr(one, name)) for one, name, value in before.values()]


def _call(interpreter: Any) -> Any:
    """Return what calls a device function, after a patch of the language of its module."""

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        launch = _LAUNCHES[-1]
        launch.patch_module(interpreter, function.fn)
        return launch.launched(function).rewrite()(*args, **kwargs)

    return called


def _fix(interpreter: Any, scope: Any) -> None:
    """Accept a full slice of a rank-0 tensor without adding a dimension."""
    tl = interpreter.tl
    getitem = tl.tensor.__getitem__

    def indexed(tensor: Any, slices: Any) -> Any:
        if not tensor.shape and isinstance(slices, tuple | tl.tuple):
            slices = tuple(one for one in slices if one != slice(None))
        return getitem(tensor, slices)

    scope.set_attr(tl.tensor, "__getitem__", indexed)


def _skip_overflow_checks(interpreter: Any, scope: Any) -> None:
    """Do not compute integer overflow checks that only debug mode reports, as Triton's compilers do.

    They take a third of the interpreter's time. :func:`_watch` records overflows of products.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        scope.set_attr(builder, "options", options)


def _make_handles(interpreter: Any, scope: Any) -> None:
    """Count the operations of a launch, each of which makes a handle, and round those of bfloat16."""
    check, pointer = interpreter.TensorHandle.__post_init__, interpreter.tl.pointer_type
    largest: dict[str, float] = {}  # bytes of an element, by the name of the type

    def made(handle: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr
        log = _LAUNCHES[-1].observed
        log.operations += 1
        if log.budget is not None:
            log.budget.spend()
        name = dtype.name
        if name == NAME:
            handle.data = rounded(data)
            return
        if name not in largest:
            is_pointer = isinstance(dtype, pointer)
            largest[name] = math.inf if is_pointer else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > largest[name]:
            check(handle)

    scope.set_attr(interpreter.TensorHandle, "__init__", made)


def _watch(interpreter: Any, scope: Any) -> None:
    """Record int32 overflows; mask and record accesses outside the launch's tensors.

    Nothing but these functions reads or writes memory: an element is in a tensor, with all of its bytes.
    """
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    load, store = builder.create_masked_load, builder.create_masked_store

    def multiplied(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, _LAUNCHES[-1].observed.multiply)

    def loaded(
        self: Any, pointers: Any, asked: Any, other: Any = None, *rest: Any, **named: Any
    ) -> Any:
        asked = _as_mask(interpreter, asked, pointers)
        element, dtype, is_short = element_of(interpreter, pointers)
        given = pointers.data
        pointers, mask = _placed(interpreter, "reads", pointers, asked, dtype.itemsize)
        if (trace := _LAUNCHES[-1].memory.trace) is not None:
            trace.loaded(pointers.data, mask.data)
        if is_short:
            pointers = handle(pointers.data, tl.pointer_type(tl.uint16))
            bits = load(self, pointers, mask, None, *rest, **named)
            unread = 0 if other is None else other.data
            found = handle(np.where(mask.data, decoded(bits.data), unread), element)
        else:
            found = load(self, pointers, mask, _as_element(handle, other, dtype), *rest, **named)
        if mask is not asked:
            found.data = values_outside(found.data, asked.data, mask.data, given, dtype.itemsize)
        return found

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        mask = _as_mask(interpreter, mask, pointers)
        _, dtype, is_short = element_of(interpreter, pointers)
        pointers, mask = _placed(interpreter, "writes", pointers, mask, dtype.itemsize)
        if (trace := _LAUNCHES[-1].memory.trace) is not None:
            trace.stored(pointers.data, mask.data, value.data)
        value = handle(encoded(value.data), tl.uint16) if is_short else value
        value = _as_element(handle, value, dtype)
        return store(self, pointers, value, mask, *rest, **named)

    scope.set_attr(builder, "create_mul", multiplied)
    scope.set_attr(builder, "create_masked_load", loaded)
    scope.set_attr(builder, "create_masked_store", stored)
    _place_atomics(interpreter, scope)


def element_of(interpreter: Any, pointers: Any) -> tuple[Any, Any, bool]:
    """Return the type of the elements of pointers, that in memory as NumPy's, and whether it is bfloat16."""
    kind = pointers.get_element_ty()
    is_short = is_bfloat16(kind)
    return kind, np.dtype(np.uint16) if is_short else interpreter._get_np_dtype(kind), is_short


def _as_mask(interpreter: Any, mask: Any, pointers: Any) -> Any:
    """Return a mask as a handle: Triton 3.6 gives an array for block pointers and tensor descriptors."""
    handle, shape = interpreter.TensorHandle, pointers.data.shape
    if mask is None:
        return handle(np.ones(shape, dtype=np.bool_), interpreter.tl.int1)
    data = mask if isinstance(mask, np.ndarray) else mask.data
    if data is not mask and data.dtype == np.bool_ and data.shape == shape:
        return mask
    return handle(np.broadcast_to(data, shape).astype(np.bool_), interpreter.tl.int1)


def _as_element(handle: Any, value: Any, dtype: Any) -> Any:
    """Return a value with elements of ``dtype``'s size: Triton copies as many bytes as it has."""
    if value is None or value.data.dtype.itemsize == dtype.itemsize:
        return value
    return handle(value.data.astype(dtype), value.dtype)


def _placed(interpreter: Any, verb: str, pointers: Any, mask: Any, size: int) -> tuple[Any, Any]:
    """Return a kernel's pointers with the tensors' own addresses, and the mask without accesses outside of
    them, which are recorded; ``size``: of an element, in bytes."""
    launch = _LAUNCHES[-1]
    own, inside, stray = launch.memory.inside(pointers.data, mask.data, size)
    pointers = interpreter.TensorHandle(own, pointers.dtype)
    if not stray:
        return pointers, mask
    launch.observed.stray(verb, stray)
    return pointers, interpreter.TensorHandle(inside, mask.dtype)


def _place_atomics(interpreter: Any, scope: Any) -> None:
    """Give atomic operations the tensors' own addresses; refuse what is not computed rightly."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    change = builder.create_atomic_rmw

    def changed(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _, dtype, is_short = element_of(interpreter, pointers)
        if is_short:
            raise Unavailable(
                "atomic operations on bfloat16 are not supported under the interpreter"
            )
        mask = _as_mask(interpreter, mask, pointers)
        pointers, mask = _placed(interpreter, "writes", pointers, mask, dtype.itemsize)
        return change(self, op, pointers, _as_element(handle, value, dtype), mask, *rest)

    def refused(name: str) -> Any:
        def exchanged(self: Any, *given: Any) -> Any:
            raise Unavailable(f"tl.{name} is not supported under the interpreter")

        return exchanged

    scope.set_attr(builder, "create_atomic_rmw", changed)
    for name in ("atomic_cas", "atomic_poll"):
        scope.set_attr(builder, f"create_{name}", refused(name))
