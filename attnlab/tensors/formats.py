"""Element formats of a KV cache: encoding and decoding of numbers."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from attnlab.case.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A format of the elements of a KV cache.

    ``dtype`` is the numeric type. ``storage`` is the dtype of vLLM's tensor: ``dtype`` itself for 16 and
    32 bit, uint8 for FP8.
    """

    name: str
    dtype: torch.dtype
    storage: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Answer whether the elements are FP8 bytes, which have a scale."""
        return self.storage is torch.uint8

    @property
    def nan(self) -> torch.Tensor:
        """Return a NaN in this format, a scalar tensor of dtype ``storage``."""
        return torch.tensor(float("nan")).to(self.dtype).view(self.storage)

    def encode(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return ``values`` in this format, of dtype ``storage``.

        For FP8, values are divided by ``scale``, clamped to the finite range and rounded to nearest even,
        as ``reshape_and_cache`` does (csrc/cache_kernels.cu, vLLM 0.11.2). Otherwise ``scale`` is ignored.
        """
        if not self.is_fp8:
            return values.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return (values.float() / scale).clamp(-limit, limit).to(self.dtype).view(self.storage)

    def decode(self, stored: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the numbers that ``stored`` encodes, times ``scale`` for FP8; float32."""
        if not self.is_fp8:
            return stored.float()
        values = stored.view(self.dtype).float()
        return values if scale == 1.0 else values * scale


_FP8 = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}
_PLAIN = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

FORMATS: dict[str, ElementFormat] = {
    **{name: ElementFormat(name=name, dtype=t, storage=t) for name, t in _PLAIN.items()},
    **{name: ElementFormat(name=name, dtype=t, storage=torch.uint8) for name, t in _FP8.items()},
}


def read_format(kv_cache_dtype: str, dtype: torch.dtype, fp8_e4m3: str) -> ElementFormat:
    """Return the format in which a kernel reads a cache.

    For "auto" it is the model's ``dtype``; for "fp8" and "fp8_e4m3" the platform's ``fp8_e4m3``
    (``fp8_dtype`` in vllm/platforms/rocm.py); for "fp8_e5m2" that format.
    """
    if kv_cache_dtype == "auto":
        return FORMATS[str(dtype).removeprefix("torch.")]
    return FORMATS["fp8_e5m2" if kv_cache_dtype == "fp8_e5m2" else fp8_e4m3]


def written_format(case: Case) -> ElementFormat:
    """Return the format in which the Case's cache is written: given, or the one the platform reads."""
    if case.cache_format is not None:
        return FORMATS[case.cache_format]
    return read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, case.machine.fp8_e4m3)


def store(case: Case, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``tokens`` as the Case's cache stores them.

    They are encoded with ``scale``, or, for ``cache_write="numeric"``, cast to uint8 as in vLLM's test
    (0.11.2 and 0.33.0), which makes every byte 0 for data of ±1e-3.
    """
    if case.cache_write == "numeric":
        return tokens.to(torch.uint8)
    if case.spec.coarse and case.spec.writes_cache:
        tokens = on_levels(tokens)
    return written_format(case).encode(tokens, scale)


# Numbers that 4 bits hold exactly, and FP8, too: -7 to 7 times a power of two for each token and head.

_STEPS = (-9.0, 5.0)  # exponents, with which E4M3 holds all of them


def coarse(tokens: torch.Tensor) -> torch.Tensor:
    """Return the nearest such numbers of tokens [..., head_size], in their dtype; NaN stays."""
    step = coarse_step(tokens)
    return ((tokens.float() / step).round().clamp(-7, 7) * step).to(tokens.dtype)


def coarse_step(tokens: torch.Tensor) -> torch.Tensor:
    """Return the power of two of each token and head, [..., 1] float32; 0 and NaN have the smallest."""
    largest = tokens.float().nan_to_num(0.0).abs().amax(-1, keepdim=True)
    return torch.exp2((largest / 7).log2().ceil().clamp(*_STEPS))


# Tokens of a cache with a scale and a zero point for each token and head, which come from the smallest and
# the largest number: 16 levels, whose distance is 17 times a power of two, so that the 256 levels of int8 are
# that power apart. Numbers between both ends are a quarter of it off, up and down in turn, where the dtype
# has such numbers: rounded they are their level, truncated half of them are the level before it.

_LEVELS, _BYTES = 15, 255


def spanning(tokens: torch.Tensor) -> torch.Tensor:
    """Return near numbers of such tokens [n, num_kv_heads, head_size]; both ends of each range occur.

    The level of 0 is 6, 7 or 8, by token and head.
    """
    numbers = tokens.float()
    least, most = numbers.aminmax(dim=-1, keepdim=True)
    step = torch.exp2(((most - least) / _BYTES).log2().ceil().clamp(-13.0, 4.0))
    unit = step * (_BYTES // _LEVELS)
    at = torch.arange(len(tokens))[:, None, None] + torch.arange(tokens.shape[1])[:, None]
    zero = (6 + at % 3).to(tokens.device)
    levels = (numbers / unit).round().add_(zero).clamp_(0, _LEVELS)
    levels.scatter_(-1, numbers.argmin(-1, keepdim=True), 0.0)
    levels.scatter_(-1, numbers.argmax(-1, keepdim=True), float(_LEVELS))
    quarters = 0.25 - 0.5 * (torch.arange(tokens.shape[-1], device=tokens.device) % 2)
    off = quarters.where((levels > 0) & (levels < _LEVELS), 0.0) * step
    return ((levels - zero) * unit + off).to(tokens.dtype)


def on_levels(tokens: torch.Tensor) -> torch.Tensor:
    """Return the nearest of the 256 levels of each token of ``spanning``, [..., head_size] in their dtype."""
    numbers = tokens.float()
    least, most = numbers.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / _BYTES).clamp(min=torch.finfo(torch.float32).tiny)
    return (((numbers - least) / step).round() * step + least).to(tokens.dtype)


# INT4 caches of vLLM: rotated tokens as pairs of nibbles, with a scale and a zero point per token and head.
#
# Source: vllm/v1/attention/ops/int4_per_token_head.py, vLLM 0.33.0. The rotation R is a Hadamard matrix of
# size b times a diagonal of signs, for each b elements of a head; b is the largest power of two that
# divides its size. R times its transpose is b times the identity. Element 2·i is the low nibble of byte i,
# element 2·i + 1 the high one. The zero point is in the lowest four bits of the scale.

_SIGN_SEED = 0x9E3779B9
LEAST_SCALE = 1e-6
_ZERO_BITS = 0xF
_MIDDLE = 8  # a zero point: -8 to 7 can be stored


def rotation_size(head_size: int) -> int:
    """Return b, the size of the rotation: the largest power of two that divides ``head_size``."""
    return head_size & -head_size


def rotate(tokens: torch.Tensor) -> torch.Tensor:
    """Return R times each head of tokens [..., head_size], in float64."""
    size = rotation_size(tokens.shape[-1])
    parts = tokens.double().unflatten(-1, (-1, size))
    rotated: torch.Tensor = parts * _signs(size) @ _hadamard(size)
    return rotated.flatten(-2)


def rotate_back(tokens: torch.Tensor) -> torch.Tensor:
    """Return the inverse of :func:`rotate`."""
    size = rotation_size(tokens.shape[-1])
    parts = tokens.double().unflatten(-1, (-1, size))
    back: torch.Tensor = parts @ _hadamard(size) * _signs(size)
    return back.flatten(-2) / size


def pack_int4(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [..., head_size], rotated, as bytes [..., head_size / 2], and their scales [...] float32.

    Rotated tokens are rounded to the tokens' dtype, as vLLM does. A head with NaN has arbitrary bytes and the
    scale NaN.
    """
    rotated = rotate(tokens).to(tokens.dtype).double()
    least, most = rotated.amin(-1), rotated.amax(-1)
    scale = ((most - least) / 15).clamp(min=LEAST_SCALE)
    zero = (-least / scale).round().clamp(0, 15)
    numbers = (rotated / scale[..., None]).round() + zero[..., None]
    pairs = numbers.nan_to_num(0.0).clamp(0, 15).to(torch.uint8).unflatten(-1, (-1, 2))
    bits = scale.float().view(torch.int32) & ~_ZERO_BITS
    bits |= zero.nan_to_num(0.0).to(torch.int32)
    return pairs[..., 0] | (pairs[..., 1] << 4), bits.view(torch.float32)


def pack_with_scale(tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`pack_int4` does, for given scales [...] and the zero point 8."""
    numbers = (rotate(tokens) / scale.double()[..., None]).round() + _MIDDLE
    pairs = numbers.clamp(0, 15).to(torch.uint8).unflatten(-1, (-1, 2))
    bits = (scale.float().view(torch.int32) & ~_ZERO_BITS) | _MIDDLE
    return pairs[..., 0] | (pairs[..., 1] << 4), bits.view(torch.float32)


def unpack_int4(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the rotated tokens that are stored, [..., head_size] float64."""
    numbers = torch.stack([stored & 0xF, stored >> 4], -1).flatten(-2).double()
    zero = (scales.view(torch.int32) & _ZERO_BITS).double()
    return (numbers - zero[..., None]) * int4_scale(scales)[..., None]


def int4_scale(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales without their zero points, [...] float64."""
    return (scales.view(torch.int32) & ~_ZERO_BITS).view(torch.float32).double()


@lru_cache(maxsize=8)
def _hadamard(size: int) -> torch.Tensor:
    """Return the Hadamard matrix of a power of two, [size, size] float64."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


@lru_cache(maxsize=8)
def _signs(size: int) -> torch.Tensor:
    """Return the signs of a rotation, [size] float64."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    return 2.0 * torch.bernoulli(torch.full((size,), 0.5), generator=generator).double() - 1.0


# The comparison of numbers; some may be NaN or infinite.


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where two tensors have the same number, bool; NaN is the same as NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference in float64: 0 where both are NaN or equal, infinite where one is NaN."""
    one, other = one.double(), other.double()
    far = (one - other).abs().nan_to_num(torch.inf, torch.inf)
    return far.masked_fill(same_numbers(one, other), 0.0)


def ratio(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return each :func:`distance` as a multiple of its bound, which is NaN where both are NaN."""
    error = distance(found, expected)
    multiple = (error / bound.clamp(min=1e-300)).nan_to_num(torch.inf, torch.inf)
    return multiple.masked_fill(error == 0, 0.0)
