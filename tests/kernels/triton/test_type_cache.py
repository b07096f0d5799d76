"""Cached type computations of Triton's interpreter: the same results as the original, again and again."""

import itertools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from attnlab.kernels.triton.interpreter import load_triton
from attnlab.kernels.triton.patches import _broadcast, _computation_type

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the interpreter needs the triton extra"
)
SHAPES = ((), (1,), (4,), (1, 4), (2, 1), (2, 4))


@pytest.fixture(scope="module")
def interpreter() -> Any:
    """Return Triton's interpreter."""
    load_triton(interpret=True)
    from triton.runtime import interpreter

    return interpreter


def tensor(interpreter: Any, shape: tuple[int, ...], dtype: Any, first: int = 0) -> Any:
    """Return a tensor with different elements; () is a scalar, which the interpreter has as shape (1,)."""
    tl = interpreter.tl
    elements = np.arange(first, first + int(np.prod(shape)))
    data = elements.reshape(shape or (1,)).astype(interpreter._get_np_dtype(dtype))
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


@pytest.mark.parametrize("left", SHAPES)
def test_values_are_broadcast_as_by_the_original(interpreter: Any, left: tuple[int, ...]) -> None:
    """At the first call of two types, and with other values at the next."""
    semantic, tl = interpreter.interpreter_semantic, interpreter.tl
    original = type(semantic).broadcast_impl_value
    broadcast = _broadcast(original)
    for right, first in itertools.product(SHAPES, (0, 10)):
        lhs = tensor(interpreter, left, tl.float32, first)
        rhs = tensor(interpreter, right, tl.int32, first + 3)
        for got, expected in zip(
            broadcast(semantic, lhs, rhs), original(semantic, lhs, rhs), strict=True
        ):
            assert got.type == expected.type
            assert got.handle.dtype == expected.handle.dtype
            assert got.handle.data.dtype == expected.handle.data.dtype
            assert got.handle.data.shape == expected.handle.data.shape
            assert got.handle.data.tolist() == expected.handle.data.tolist()


def test_incompatible_shapes_raise_each_time(interpreter: Any) -> None:
    semantic, tl = interpreter.interpreter_semantic, interpreter.tl
    broadcast = _broadcast(type(semantic).broadcast_impl_value)
    values = [tensor(interpreter, shape, tl.float32) for shape in ((2, 4), (2, 8))]
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible dimensions"):
            broadcast(semantic, *values)


def test_computation_types_are_those_of_the_original(interpreter: Any) -> None:
    """For pairs of types, of scalars and of tensors; an error is raised each time."""
    semantic, tl = interpreter.interpreter_semantic, interpreter.tl
    original = type(semantic).computation_type_impl
    cached = _computation_type(original)
    types = (
        tl.int1,
        tl.int32,
        tl.uint32,
        tl.int64,
        tl.float16,
        tl.bfloat16,
        tl.float32,
        tl.float8e5,
    )
    flags = (False, True)
    for arguments in itertools.product(types, flags, types, flags, flags):
        expected = outcome(original, semantic, arguments)
        assert outcome(cached, semantic, arguments) == expected, arguments
        assert outcome(cached, semantic, arguments) == expected, arguments


def outcome(compute: Any, semantic: Any, arguments: tuple[Any, ...]) -> object:
    try:
        return compute(semantic, *arguments)
    except TypeError as error:
        return str(error)
