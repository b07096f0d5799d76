"""Queries and outputs of a call that are stored in another format than they are computed in.

vLLM quantises queries to FP8 (``q_descale`` of unified_attention and FlashAttention 3, 0.33.0) and lets an
op write its output divided by ``output_scale``. :func:`in_numbers` returns the call with the numbers that the
stored elements stand for; :class:`Formats` has what the op stores, for the rounding bound.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import FORMATS, pack_int4, pack_with_scale, rotate_back, unpack_int4

FP8_DTYPES = tuple(one.dtype for one in FORMATS.values() if one.is_fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """How a call stores its query and its output.

    - ``query``, ``output``: dtypes.
    - ``output_scale``: what a stored element of the output is multiplied by.
    - ``limit``: the largest number that the output can have; the op clamps to it. Infinite without an output
      scale.
    """

    query: torch.dtype
    output: torch.dtype
    output_scale: float = 1.0
    limit: float = math.inf

    @classmethod
    def of(cls, call: KernelCall, fp8_e4m3: str = "fp8_e4m3fn") -> "Formats":
        """Return the formats of a call as it was recorded. ``fp8_e4m3``: the platform's FP8 format.

        An op with an output scale clamps to that format, whatever the output's dtype is (0.33.0).
        """
        stored = call.output is not None and call.output.is_floating_point()
        output = call.buffer.dtype if stored else call.query.dtype
        scale = 1.0 if call.output_scale is None else call.output_scale
        clamped = call.output_scale is not None
        largest = float(torch.finfo(FORMATS[fp8_e4m3].dtype).max) if clamped else math.inf
        if output in FP8_DTYPES:
            largest = min(largest, float(torch.finfo(output).max))
        return cls(query=call.query.dtype, output=output, output_scale=scale, limit=largest * scale)

    @classmethod
    def of_scaled(cls, call: KernelCall, fp8_e4m3: str) -> "Formats | None":
        """Return the formats of a call with an output scale, whose op stores FP8 and whose ``output`` has the
        numbers; None for another call."""
        if call.output_scale is None:
            return None
        return dataclasses.replace(cls.of(call, fp8_e4m3), output=FORMATS[fp8_e4m3].dtype)

    def clamped(self, output: torch.Tensor) -> torch.Tensor:
        """Return numbers of an output with the limit as the largest; NaN stays."""
        return output if self.limit == math.inf else output.clamp(-self.limit, self.limit)


def has_fp8_query(call: KernelCall) -> bool:
    """Answer whether the query of a call is stored in FP8."""
    return call.query.dtype in FP8_DTYPES


def has_scaled_output(call: KernelCall) -> bool:
    """Answer whether the output of an attention op is stored in FP8, or divided by a scale."""
    is_fp8 = call.output is not None and call.output.dtype in FP8_DTYPES
    is_fp8 = is_fp8 and not call.spec.writes_cache
    return call.output_scale is not None or is_fp8


def in_numbers(call: KernelCall) -> KernelCall:
    """Return the call with the numbers of its query and output, in float64; itself if it stores them plainly.

    Formats and rounding must be taken from the recorded call.
    """
    changes: dict[str, Any] = {}
    if has_fp8_query(call):
        changes["query"] = call.query.double() * _scale_of_rows(call)
    if has_scaled_output(call):
        for name in ("output", "before"):
            stored = getattr(call, name)
            changes[name] = None if stored is None else output_numbers(call, stored)
    return dataclasses.replace(call, **changes) if changes else call


def output_numbers(call: KernelCall, output: torch.Tensor) -> torch.Tensor:
    """Return the numbers of an output that is stored as the call's own, in float64 if it is scaled."""
    if not has_scaled_output(call):
        return output
    return output.double() * (1.0 if call.output_scale is None else call.output_scale)


def _scale_of_rows(call: KernelCall) -> float | torch.Tensor:
    """Return q_scale: a number, or [num_tokens, num_heads, 1]; rows of no sequence have scale 1."""
    scale = call.q_scale
    if not isinstance(scale, torch.Tensor):
        return 1.0 if scale is None else scale
    lens = call.query_lens.to(scale.device)
    by_row = scale.double().repeat_interleave(lens, 0)
    padding = by_row.new_ones(call.query.shape[0] - len(by_row), scale.shape[1])
    by_head = torch.cat([by_row, padding]).repeat_interleave(call.num_queries_per_kv, 1)
    return by_head[:, :, None].to(call.query.device)


# The values of op arguments that a Case names (:mod:`attnlab.case.op_arguments`), and how they are stored.
#
# The call of the op and the reference both take them from here.

QUERY_SCALE = 0.125  # of an FP8 query, whose elements are at most 448
OUTPUT_SCALE = 0.03125  # of an FP8 output


def stored_numbers(
    case: Case, tokens: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [..., head_size] as the Case's cache stores them, and the scale of each [...] float32.

    The cache has a scale per token and head: ``scale``, or that of their numbers. Two numbers of INT4 are one
    byte.
    """
    if case.argument.is_packed:
        return pack_int4(tokens) if scale is None else pack_with_scale(tokens, scale)
    if scale is None:
        return per_token_head(tokens, scaled_dtype(case))
    return (tokens.float() / scale[..., None]).to(scaled_dtype(case)), scale


def decoded_numbers(case: Case, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the tokens [..., head_size] float64 that stored numbers stand for."""
    scaled = scaled_numbers(case, numbers, scale)
    return rotate_back(scaled) if case.argument.is_packed else scaled


def scaled_numbers(case: Case, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return stored numbers times their scale [..., head_size] float64; those of INT4 are rotated."""
    if case.argument.is_packed:
        return unpack_int4(numbers, scale)
    return numbers.double() * scale.double()[..., None]


def scaled_dtype(case: Case) -> torch.dtype:
    """Return the dtype of a cache with a scale per token and head."""
    if case.argument.has_fp8:
        return FORMATS[case.machine.fp8_e4m3].dtype
    return torch.uint8 if case.argument.is_packed else torch.int8


def per_token_head(tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [..., head_size] quantised to ``dtype``, and the scale of each [...] float32.

    As triton_reshape_and_cache_flash_per_token_head_quant does (vLLM 0.33.0).
    """
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (tokens.float().abs().amax(-1) / most).clamp(min=1e-6)
    numbers = tokens.float() / scale[..., None]
    if dtype == torch.int8:
        numbers = torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5).trunc()
    return numbers.nan_to_num(0.0).to(dtype), scale


def latent_size(case: Case) -> int:
    """Return the width of the values in a latent cache: eight ninths of a multiple of 9, else all."""
    return case.head_size // 9 * 8 if case.head_size % 9 == 0 else case.head_size


def narrow_size(case: Case) -> int:
    """Return the width of values that are narrower than keys: two thirds of it, as in MiMo V2."""
    return case.head_size // 3 * 2
