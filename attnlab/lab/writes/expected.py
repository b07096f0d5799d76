"""What a cache must hold after a write in a further format, and how far each number may be off.

Scale per token and head (int8 and FP8). The scale is the largest magnitude divided by the largest number q of
the format, at least 1e-6. Its division in float32 is off by 2⁻²². A number is divided by it, so the quotient
is off by at most e = 2⁻²⁰ of itself, and then rounded: int8 half away from zero, FP8 to nearest even. The
bound of a stored number is the distance to what the quotient times 1 ± e would become, which is 0 for most
numbers.

INT4. The scale is (largest − smallest) / 15, at least 1e-6; the zero point is −smallest / scale, rounded half
away from zero and limited to 0 … 15. It replaces the lowest four bits of the scale, which moves it by at most
2⁻¹⁹ of itself. A number becomes number / scale + zero point, rounded and limited in the same way.

Diffkv, MLA and the layouts of reshape_and_cache: see :mod:`attnlab.lab.expected_write`. MLA has one scale for
both parts. fp8_ds_mla: see :mod:`attnlab.lab.writes.ds_latents`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.lab.expected_write import numbers_of
from attnlab.lab.writes.write_case import INT4, INT8, LATENT, PER_TOKEN_HEAD, WriteCase
from attnlab.tensors.formats import ElementFormat

_QUOTIENT = 2.0**-20  # relative error of a quotient whose divisor is a rounded quotient, in float32
_SCALE, _PACKED_SCALE = 2.0**-22, 2.0**-19
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Numbers of a tensor as they are stored, and how far each may be off; float64, of equal shapes."""

    numbers: torch.Tensor
    bound: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedHalf:
    """What keys or values become: ``stored`` [n, num_kv_heads, size] before any scale, in units of the
    format; ``scale`` [n, num_kv_heads], or None without a scale cache; ``zero`` [n, num_kv_heads], the zero
    point of INT4.
    """

    stored: Stored
    scale: Stored | None = None
    zero: Stored | None = None


def expected_half(case: WriteCase, new: torch.Tensor, scale: float) -> ExpectedHalf:
    """Return what tokens [n, num_kv_heads, size] become. ``scale``: of a format that stores none."""
    if case.cache_format == INT4:
        return _int4(new.double())
    if case.cache_format in PER_TOKEN_HEAD:
        return _per_token_head(case, new.double())
    return ExpectedHalf(stored=plain_numbers(new, scale, case.stored))


def scale_of_half(case: WriteCase, is_key: bool) -> float:
    """Return the scale of keys or values of a format without scales in the cache."""
    return case.k_scale if is_key or case.cache_format == LATENT else case.v_scale


def plain_numbers(new: torch.Tensor, scale: float | torch.Tensor, format: ElementFormat) -> Stored:
    """Return what tokens become in a format; FP8 numbers are divided by ``scale``."""
    stored = numbers_of(new, scale, format)
    if not format.is_fp8:
        return Stored(numbers=stored, bound=torch.zeros_like(stored))
    sides = [numbers_of(new.float() * (1 + e), scale, format) for e in (-_QUOTIENT, _QUOTIENT)]
    return Stored(numbers=stored, bound=torch.maximum(*((side - stored).abs() for side in sides)))


def _per_token_head(case: WriteCase, new: torch.Tensor) -> ExpectedHalf:
    most = 127.0 if case.cache_format == INT8 else float(torch.finfo(case.element).max)
    scale = (new.abs().amax(-1) / most).clamp(min=_LEAST)

    def rounded(quotient: torch.Tensor) -> torch.Tensor:
        if case.cache_format == INT8:
            return _half_away(quotient).clamp(-128, 127)
        return quotient.clamp(-most, most).to(case.element).double()

    stored = _with_sides(new / scale[..., None], rounded)
    return ExpectedHalf(stored=stored, scale=Stored(numbers=scale, bound=scale * _SCALE))


def _int4(new: torch.Tensor) -> ExpectedHalf:
    least, most = new.amin(-1), new.amax(-1)
    scale = ((most - least) / 15).clamp(min=_LEAST)
    zero = _with_sides(-least / scale, _nibble)
    # A zero point next to a boundary moves every number of the token by one.
    each = _with_sides(new / scale[..., None] + zero.numbers[..., None], _nibble)
    stored = Stored(numbers=each.numbers, bound=each.bound + zero.bound[..., None])
    return ExpectedHalf(
        stored=stored, scale=Stored(numbers=scale, bound=scale * _PACKED_SCALE), zero=zero
    )


def _with_sides(quotient: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
    """Return rounded quotients, with the distance to what a quotient that is off by 2⁻²⁰ of 16 becomes."""
    numbers = rounded(quotient)
    off = _QUOTIENT * quotient.abs().clamp(min=1.0)
    sides = [rounded(quotient + sign * off) for sign in (-1, 1)]
    return Stored(numbers=numbers, bound=torch.maximum(*((one - numbers).abs() for one in sides)))


def _half_away(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to integers, halves away from zero."""
    return torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5).trunc()


def _nibble(numbers: torch.Tensor) -> torch.Tensor:
    return _half_away(numbers).clamp(0, 15)
