"""Patches of Triton's language for the time of a launch: fixes, caches and checks."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnlab.kernels.triton.fp8 import converter
from attnlab.kernels.triton.memory import Memory
from attnlab.kernels.triton.run_log import RunLog
from attnlab.kernels.triton.type_cache import cache_types


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

    def checked(verb: str, pointers: Any, mask: Any) -> Any:
        inside, stray = memory.inside(pointers.data, mask.data)
        if not stray:
            return mask
        observed.stray(verb, stray)
        return interpreter.TensorHandle(inside, mask.dtype)

    def multiplied(self: Any, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, observed.multiply)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        mask = checked("reads", pointers, mask)
        if memory.trace is not None:
            memory.trace.loaded(pointers.data, mask.data)
        return load(self, pointers, mask, *rest, **named)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        mask = checked("writes", pointers, mask)
        if memory.trace is not None:
            memory.trace.stored(pointers.data, mask.data)
        return store(self, pointers, value, mask, *rest, **named)

    scope.set_attr(builder, "create_mul", multiplied)
    scope.set_attr(builder, "create_masked_load", loaded)
    scope.set_attr(builder, "create_masked_store", stored)
