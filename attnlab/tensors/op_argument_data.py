"""The values of op arguments that a Case names (:mod:`attnlab.case.op_arguments`), and how they are stored.

The call of the op and the reference both take them from here.
"""

import torch

from attnlab.case.case import Case
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.int4 import pack_int4, pack_with_scale, rotate_back, unpack_int4

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
