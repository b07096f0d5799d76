"""Patches of Triton's language for the time of a launch: fixes, caches and checks."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attnlab.kernels.triton.fp8 import converter
from attnlab.kernels.triton.memory import Memory, values_outside
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.triton.type_cache import cache_types

Placed = Callable[[str, Any, Any], tuple[Any, Any]]  # verb, pointers, mask: own addresses, mask


@contextmanager
def language(interpreter: Any, kernel: Any, observed: RunLog, memory: Memory) -> Iterator[None]:
    """Patch the language inside the block, once for each module whose functions the kernel calls.

    ``memory`` is the memory that the launch may access. ``observed`` records int32 overflows and
    out-of-bounds accesses; the trace of ``memory``, if there is one, records every load and store.
    """
    scope = _patched(interpreter, kernel)
    scopes = {id(kernel.__globals__): scope}

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(function.fn.__globals__)
        if module not in scopes:
            scopes[module] = _patched(interpreter, function.fn)
        return function.rewrite()(*args, **kwargs)

    try:
        cache_types(interpreter, scope)
        _fix(interpreter, scope)
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


def _watch(interpreter: Any, scope: Any, observed: RunLog, memory: Memory) -> None:
    """Record int32 overflows; mask and record accesses outside the launch's tensors."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    placed = _placed(interpreter, observed, memory)

    def multiplied(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, observed.multiply)

    def loaded(self: Any, pointers: Any, asked: Any, *rest: Any, **named: Any) -> Any:
        pointers, mask = placed("reads", pointers, asked)
        if memory.trace is not None:
            memory.trace.loaded(pointers.data, mask.data)
        found = load(self, pointers, mask, *rest, **named)
        if mask is not asked:
            found.data = values_outside(found.data, asked.data, mask.data)
        return found

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        pointers, mask = placed("writes", pointers, mask)
        if memory.trace is not None:
            memory.trace.stored(pointers.data, mask.data, value.data)
        return store(self, pointers, value, mask, *rest, **named)

    scope.set_attr(builder, "create_mul", multiplied)
    scope.set_attr(builder, "create_masked_load", loaded)
    scope.set_attr(builder, "create_masked_store", stored)
    _place_atomics(builder, scope, placed)


def _placed(interpreter: Any, observed: RunLog, memory: Memory) -> Placed:
    """Return a function that replaces a kernel's addresses by the tensors' own.

    It masks and records accesses outside of them.
    """

    def placed(verb: str, pointers: Any, mask: Any) -> tuple[Any, Any]:
        own, inside, stray = memory.inside(pointers.data, mask.data)
        pointers = interpreter.TensorHandle(own, pointers.dtype)
        if not stray:
            return pointers, mask
        observed.stray(verb, stray)
        return pointers, interpreter.TensorHandle(inside, mask.dtype)

    return placed


def _place_atomics(builder: Any, scope: Any, placed: Placed) -> None:
    """Give atomic operations the tensors' own addresses; tl.atomic_cas is refused."""
    change = builder.create_atomic_rmw

    def changed(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pointers, mask = placed("writes", pointers, mask)
        return change(self, op, pointers, value, mask, *rest)

    def exchanged(self: Any, *given: Any) -> Any:
        raise NotImplementedError("tl.atomic_cas is not supported under the interpreter")

    scope.set_attr(builder, "create_atomic_rmw", changed)
    scope.set_attr(builder, "create_atomic_cas", exchanged)
