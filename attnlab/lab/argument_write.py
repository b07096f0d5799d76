"""What a cache write with an op argument must leave, and how far each number may be off.

A cache with a scale per token and head is compared as its numbers times their scales, in the Case's dtype;
those of INT4 are rotated (:mod:`attnlab.lab.int4_write` has their bound). A number whose quotient is next to
the boundary of two numbers of the format may be the other one: the quotient is off by at most 2⁻²⁰ of itself
(:mod:`attnlab.lab.writes.expected`). Scales are off by 2⁻²², so a number is off by at most 2⁻²¹ of itself,
and by one more number of the dtype where it is rounded: the dtype's eps.
"""

import functools
from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.lab.int4_write import int4_write_bound
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.op_argument_data import (
    narrow_size,
    scaled_dtype,
    scaled_numbers,
    stored_numbers,
)

_QUOTIENT, _SCALE = 2.0**-20, 2.0**-21


def expected_write(case: Case, plain: torch.Tensor) -> torch.Tensor:
    """Return the cache that the Case's op argument asks for.

    ``plain``: the cache of a write without it, [num_slots, num_kv_heads, 2 × head_size]. So is the result.
    """
    if case.argument.base == "diffkv":
        narrow = plain.clone()
        narrow.view(torch.uint8).unflatten(-1, (-1, plain.element_size()))[
            ..., case.head_size + narrow_size(case) :, :
        ] = 0
        return narrow
    if case.argument.cache is None:
        return plain
    halves = [stored_numbers(case, one) for one in plain.cpu().split(case.head_size, -1)]
    scaled = [scaled_numbers(case, *half).to(plain.dtype) for half in halves]
    return torch.cat(scaled, -1).to(plain.device)


def write_bound(
    case: Case, make_plain: Callable[[], torch.Tensor], *, is_native: bool = False
) -> torch.Tensor | float:
    """Return by how much each number of the cache may be off.

    ``make_plain`` returns ``plain`` of :func:`expected_write`; it is called if the bound depends on it.
    ``is_native``: the op ran on a GPU, not under Triton's interpreter.
    """
    if case.argument.cache is None:
        return 0.0
    plain = make_plain()
    half_bound = functools.partial(_half_bound, case, is_native)
    bounds = [half_bound(half) for half in plain.cpu().split(case.head_size, -1)]
    return torch.cat(bounds, -1).nan_to_num(0.0).float().to(plain.device)


def _half_bound(case: Case, is_native: bool, tokens: torch.Tensor) -> torch.Tensor:
    """Return the bound of keys or values [..., head_size]."""
    stored, scale = stored_numbers(case, tokens)
    unit = torch.finfo(FORMATS[case.dtype].dtype).eps + _SCALE
    rounded = scaled_numbers(case, stored, scale).abs() * unit
    if case.argument.is_packed:
        return rounded + int4_write_bound(tokens, is_native=is_native)
    quotient = tokens.double() / scale[..., None]
    sides = [_rounded(quotient * (1 + e), case) for e in (-_QUOTIENT, _QUOTIENT)]
    moved = torch.maximum(*((side - stored.double()).abs() for side in sides))
    return rounded + moved * scale[..., None]


def _rounded(quotients: torch.Tensor, case: Case) -> torch.Tensor:
    """Return quotients as numbers of the format, float64."""
    if case.argument.has_fp8:
        return quotients.float().to(scaled_dtype(case)).double()
    return (quotients.sign() * (quotients.abs() + 0.5)).trunc()
