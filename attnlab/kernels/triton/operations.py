"""Operations in which the interpreters of Triton 3.6 to 3.9 differ: each computes as that of 3.9, and a GPU.

So a kernel has the same result with each version.
"""

from typing import Any

import numpy as np

_FP8 = ("fp8e4b8", "fp8e5b16")  # which Triton 3.6 and 3.7 do not know here


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

    def all_ones(self: Any, type: Any) -> Any:
        dtype = interpreter._get_np_dtype(type)
        number = True if dtype == np.bool_ else np.array(-1).astype(dtype)
        return handle(np.full(1, number, dtype=dtype), type.scalar)

    for name, function in {
        "binary_op": on_bits, "create_fma": multiplied_and_added, "create_ashr": shifted,
        "get_all_ones_value": all_ones,
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
        return self if self.name in _FP8 else to_ir(self, builder)

    scope.set_attr(interpreter.tl.dtype, "to_ir", known)
