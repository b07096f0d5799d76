"""FP8 conversions for Triton's interpreter; its own have two bugs (Triton 3.6 and 3.9).

It decodes NaN and infinity as finite numbers (e4m3fn 0x7F as 480). When it rounds up past the end of the
fraction it loses the carry, so 15.9 becomes 8 instead of 16. Here torch converts. A value out of range
becomes the largest finite value, as in the GPU's conversion (PTX: cvt.rn.satfinite).
"""

from typing import Any

import numpy as np
import torch

_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
# bfloat16 numbers are in float32 here (:mod:`attnlab.kernels.triton.bfloat16`).
_WIDE = {
    "fp16": torch.float16,
    "bf16": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_BITS = {torch.float16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64}


def converter(convert: Any) -> Any:
    """Return a ``_convert_float`` that converts FP8 with torch and other dtypes with ``convert``."""

    def converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source.name in _FP8 and target.name in _WIDE:
            return _decoded(data, _FP8[source.name], _WIDE[target.name])
        if source.name in _WIDE and target.name in _FP8:
            return _encoded(data, _FP8[target.name])
        return convert(data, source, target, rounding_mode)

    return converted


def _decoded(data: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Return FP8 bytes as the bit patterns of a wider dtype."""
    wide = torch.from_numpy(np.ascontiguousarray(data)).view(source).to(target)
    return wide.numpy().view(_BITS[target])


def _encoded(data: Any, target: torch.dtype) -> Any:
    """Return numbers as FP8 bytes: round to nearest even, saturate, keep NaN."""
    numbers = torch.from_numpy(np.ascontiguousarray(data))
    limit = torch.finfo(target).max
    return numbers.clamp(-limit, limit).to(target).view(torch.uint8).numpy()
