"""Patches of Triton's language for the time of a launch: fixes, caches and checks."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton.bfloat16 import (
    decoded,
    encoded,
    is_bfloat16,
    patch_bfloat16,
    rounded,
)
from attnlab.kernels.triton.fp8 import converter
from attnlab.kernels.triton.memory import Memory, values_outside
from attnlab.kernels.triton.operations import patch_dtypes, patch_operations
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.triton.type_cache import cache_types

# Verb, pointers, mask, bytes of an element: own addresses, mask.
Placed = Callable[[str, Any, Any, int], tuple[Any, Any]]


@contextmanager
def language(
    interpreter: Any,
    kernel: Any,
    observed: RunLog,
    launched: Callable[[Any], Any],
    memory: Memory,
) -> Iterator[None]:
    """Patch the language inside the block, once for each module whose functions the kernel calls.

    ``launched`` returns the form of a function that the lab interprets.
    ``memory`` is the memory that the launch may access. ``observed`` records int32 overflows and
    out-of-bounds accesses; the trace of ``memory``, if there is one, records every load and store.
    """
    scope = _patched(interpreter, kernel)
    scopes = {id(kernel.__globals__): scope}

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(function.fn.__globals__)
        if module not in scopes:
            scopes[module] = _patched(interpreter, function.fn)
        return launched(function).rewrite()(*args, **kwargs)

    try:
        patch_bfloat16(interpreter, scope)
        cache_types(interpreter, scope)
        patch_operations(interpreter, scope)
        _fix(interpreter, scope)
        _make_handles(interpreter, scope, observed)
        _skip_overflow_checks(interpreter, scope)
        _watch(interpreter, scope, observed, memory)
        scope.set_attr(interpreter.InterpretedFunction, "__call__", called)
        yield
    finally:
        for scope in reversed(scopes.values()):
            scope.restore()


def _patched(interpreter: Any, function: Any) -> Any:
    """Patch the language as Triton does for a function, and return the scope that restores it.

    A scalar is an array of shape (1,) here. Triton 3.6 makes an index of it with ``int``, which NumPy
    rejects from 2.4 on; Triton 3.7 and later remove the dimension first.
    """
    scope = interpreter._patch_lang(function)
    scope.set_attr(
        interpreter.tl.tensor, "__index__", lambda scalar: int(scalar.handle.data.item())
    )
    patch_dtypes(interpreter, scope)
    return scope


def _fix(interpreter: Any, scope: Any) -> None:
    """Fix FP8 conversion, and accept a full slice of a rank-0 tensor without adding a dimension."""
    tl = interpreter.tl
    getitem = tl.tensor.__getitem__

    def indexed(tensor: Any, slices: Any) -> Any:
        if not tensor.shape and isinstance(slices, tuple | tl.tuple):
            slices = tuple(one for one in slices if one != slice(None))
        return getitem(tensor, slices)

    scope.set_attr(tl.tensor, "__getitem__", indexed)
    scope.set_attr(interpreter, "_convert_float", converter(interpreter._convert_float))


def _skip_overflow_checks(interpreter: Any, scope: Any) -> None:
    """Do not compute integer overflow checks that only debug mode reports, as Triton's compilers do.

    They take a third of the interpreter's time. :func:`_watch` records overflows of products.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        scope.set_attr(builder, "options", options)


def _make_handles(interpreter: Any, scope: Any, observed: RunLog) -> None:
    """Count the operations of a launch, each of which makes a handle, and round those of bfloat16."""
    check = interpreter.TensorHandle.__post_init__

    def made(handle: Any) -> None:
        observed.operated()
        if is_bfloat16(handle.dtype):
            handle.data = rounded(handle.data)
        else:
            check(handle)

    scope.set_attr(interpreter.TensorHandle, "__post_init__", made)


def _watch(interpreter: Any, scope: Any, observed: RunLog, memory: Memory) -> None:
    """Record int32 overflows; mask and record accesses outside the launch's tensors.

    Nothing but these functions reads or writes memory: an element is in a tensor, with all of its bytes.
    """
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    load, store = builder.create_masked_load, builder.create_masked_store
    placed = _placed(interpreter, observed, memory)

    def multiplied(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, observed.multiply)

    def loaded(
        self: Any, pointers: Any, asked: Any, other: Any = None, *rest: Any, **named: Any
    ) -> Any:
        asked = _as_mask(interpreter, asked, pointers)
        element = pointers.get_element_ty()
        is_short = is_bfloat16(element)
        dtype = np.dtype(np.uint16) if is_short else interpreter._get_np_dtype(element)
        pointers, mask = placed("reads", pointers, asked, dtype.itemsize)
        if memory.trace is not None:
            memory.trace.loaded(pointers.data, mask.data)
        if is_short:
            pointers = handle(pointers.data, tl.pointer_type(tl.uint16))
            bits = load(self, pointers, mask, None, *rest, **named)
            unread = 0 if other is None else other.data
            found = handle(np.where(mask.data, decoded(bits.data), unread), element)
        else:
            found = load(self, pointers, mask, _as_element(handle, other, dtype), *rest, **named)
        if mask is not asked:
            found.data = values_outside(found.data, asked.data, mask.data)
        return found

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        mask = _as_mask(interpreter, mask, pointers)
        element = pointers.get_element_ty()
        is_short = is_bfloat16(element)
        dtype = np.dtype(np.uint16) if is_short else interpreter._get_np_dtype(element)
        pointers, mask = placed("writes", pointers, mask, dtype.itemsize)
        if memory.trace is not None:
            memory.trace.stored(pointers.data, mask.data, value.data)
        value = (
            handle(encoded(value.data), tl.uint16)
            if is_short
            else _as_element(handle, value, dtype)
        )
        return store(self, pointers, value, mask, *rest, **named)

    scope.set_attr(builder, "create_mul", multiplied)
    scope.set_attr(builder, "create_masked_load", loaded)
    scope.set_attr(builder, "create_masked_store", stored)
    _place_atomics(interpreter, scope, placed)


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


def _placed(interpreter: Any, observed: RunLog, memory: Memory) -> Placed:
    """Return a function that replaces a kernel's addresses by the tensors' own.

    It masks and records accesses outside of them.
    """

    def placed(verb: str, pointers: Any, mask: Any, size: int) -> tuple[Any, Any]:
        own, inside, stray = memory.inside(pointers.data, mask.data, size)
        pointers = interpreter.TensorHandle(own, pointers.dtype)
        if not stray:
            return pointers, mask
        observed.stray(verb, stray)
        return pointers, interpreter.TensorHandle(inside, mask.dtype)

    return placed


def _place_atomics(interpreter: Any, scope: Any, placed: Placed) -> None:
    """Give atomic operations the tensors' own addresses; refuse what is not computed rightly."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    change = builder.create_atomic_rmw

    def changed(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        element = pointers.get_element_ty()
        if is_bfloat16(element):
            raise Unavailable(
                "atomic operations on bfloat16 are not supported under the interpreter"
            )
        dtype = interpreter._get_np_dtype(element)
        mask = _as_mask(interpreter, mask, pointers)
        pointers, mask = placed("writes", pointers, mask, dtype.itemsize)
        return change(self, op, pointers, _as_element(handle, value, dtype), mask, *rest)

    def refused(name: str) -> Any:
        def exchanged(self: Any, *given: Any) -> Any:
            raise Unavailable(f"tl.{name} is not supported under the interpreter")

        return exchanged

    scope.set_attr(builder, "create_atomic_rmw", changed)
    for name in ("atomic_cas", "atomic_poll"):
        scope.set_attr(builder, f"create_{name}", refused(name))
