"""bfloat16 for Triton's interpreter, whose own computes with the raw bits of bfloat16 numbers.

Here a block of bfloat16 holds float32 numbers that bfloat16 has. Every handle of such a block rounds its
numbers to nearest even when it is made, so each operation rounds once. ``tl.dot`` multiplies these numbers
and adds the products in float32, as the hardware does. Memory holds the 16 bits: :func:`decoded` and
:func:`encoded` convert.
"""

from typing import Any

import numpy as np

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
    """Let the interpreter compute with bfloat16, through ``scope``.

    :mod:`attnlab.kernels.triton.patches` rounds each handle, and converts what is loaded and stored.
    """
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    np_dtype, bitcast, absolute = (
        interpreter._get_np_dtype,
        builder.create_bitcast,
        builder.create_fabs,
    )
    handle = interpreter.TensorHandle

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
    """Return a ``_convert_float`` that converts from and to bfloat16, other dtypes with ``convert``."""

    def converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if is_bfloat16(target) and (source.name in _NUMPY or is_bfloat16(source)):
            is_to_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
            return truncated(data) if is_to_zero else np.asarray(data, dtype=np.float32)
        if is_bfloat16(source) and target.name in _NUMPY:
            return np.asarray(data, dtype=_NUMPY[target.name])
        return convert(data, source, target, rounding_mode)

    return converted
