"""How far the numbers of an INT4 cache may be off after a write, each times its scale and not rotated back.

The rotation of b elements adds log2 b times in float32. So a rotated element is off by at most
log2 b · 2⁻²⁴ · Σ |x|, and then rounded to the tokens' dtype. On a GPU the rotation takes and gives bfloat16:
2⁻⁹ · Σ |x| and 2⁻⁸ of the result. Most elements round to one number for all such errors. For the others both
sides are followed through the scale (largest − smallest) / 15, the zero point and the number. A quotient in
float32, with its sum and the half that rounds it, is off by at most 2⁻¹⁹ of itself, or of 1
(:mod:`attnlab.lab.writes.expected`). A scale loses its lowest four bits.
"""

import math

import torch

from attnlab.tensors.int4 import LEAST_SCALE, pack_int4, rotate, rotation_size, unpack_int4

_QUOTIENT, _SCALE, _PACKED = 2.0**-19, 2.0**-22, 2.0**-18


def int4_write_bound(tokens: torch.Tensor, *, is_native: bool) -> torch.Tensor:
    """Return the bound of each number of tokens [..., head_size], float64. ``is_native``: on a GPU."""
    low, high = _rotated(tokens, is_native)
    least, most = (low.amin(-1), high.amin(-1)), (low.amax(-1), high.amax(-1))
    scales = (
        ((most[0] - least[1]) / 15).clamp(min=LEAST_SCALE) * (1 - _SCALE),
        ((most[1] - least[0]) / 15).clamp(min=LEAST_SCALE) * (1 + _SCALE),
    )
    zeros = _range([-one / scale for one in least for scale in scales])
    quotients = [one / scale[..., None] for one in (low, high) for scale in scales]
    reached = []
    for zero in (_nibble(zeros[0]), _nibble(zeros[1])):
        sides = _range([quotient + zero[..., None] for quotient in quotients])
        reached += [
            (_nibble(side) - zero[..., None]) * scale[..., None]
            for side in sides
            for scale in scales
        ]
    expected = unpack_int4(*pack_int4(tokens))
    moved = torch.stack([(one - expected).abs() for one in reached]).amax(0)
    return moved + expected.abs() * _PACKED


def _rotated(tokens: torch.Tensor, is_native: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest number that a rotated element can be, [..., head_size] float64."""
    size, exact = rotation_size(tokens.shape[-1]), rotate(tokens)
    sums = tokens.double().abs().unflatten(-1, (-1, size)).sum(-1)
    off = sums.repeat_interleave(size, -1)
    off = off * 2.0**-9 + exact.abs() * 2.0**-8 if is_native else off * math.log2(size) * 2.0**-24
    low, high = ((exact + sign * off).to(tokens.dtype).double() for sign in (-1, 1))
    return low, high


def _range(corners: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest of some quotients, with their rounding."""
    least, most = torch.stack(corners).amin(0), torch.stack(corners).amax(0)
    return (
        least - _QUOTIENT * least.abs().clamp(min=1.0),
        most + _QUOTIENT * most.abs().clamp(min=1.0),
    )


def _nibble(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to 0 … 15, halves away from zero."""
    return (numbers.sign() * (numbers.abs() + 0.5)).trunc().clamp(0, 15)
