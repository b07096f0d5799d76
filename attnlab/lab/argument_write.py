"""What a cache write with an op argument must leave, and how far each number may be off.

A cache with a scale per token and head is compared as the numbers that it stands for, in the Case's dtype. A
number whose quotient is next to the boundary of two numbers of the format may be the other one: the quotient
is off by at most 2⁻²⁰ of itself (:mod:`attnlab.lab.writes.expected`). Scales are off by 2⁻²², which moves a
number by at most one in the dtype: 2⁻¹⁰ of it.
"""

from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.tensors.op_argument_data import narrow_size, scaled_dtype, stored_numbers

_QUOTIENT, _DTYPE = 2.0**-20, 2.0**-10


def expected_write(case: Case, plain: torch.Tensor) -> torch.Tensor:
    """Return the cache that the Case's op argument asks for.

    ``plain``: the cache of a write without it, [num_slots, num_kv_heads, 2 × head_size]. So is the result.
    """
    if case.op_argument == "diffkv":
        narrow = plain.clone()
        narrow.view(torch.uint8).unflatten(-1, (-1, plain.element_size()))[
            ..., case.head_size + narrow_size(case) :, :
        ] = 0
        return narrow
    if case.argument.cache is None:
        return plain
    halves = (stored_numbers(case, one) for one in plain.cpu().split(case.head_size, -1))
    decoded = [(stored.float() * scale[..., None]).to(plain.dtype) for stored, scale in halves]
    return torch.cat(decoded, -1).to(plain.device)


def write_bound(case: Case, make_plain: Callable[[], torch.Tensor]) -> torch.Tensor | float:
    """Return by how much each number of the cache may be off.

    ``make_plain`` returns ``plain`` of :func:`expected_write`; it is called if the bound depends on it.
    """
    if case.argument.cache is None:
        return 0.0
    bounds, plain = [], make_plain()
    for tokens in plain.cpu().double().split(case.head_size, -1):
        stored, scale = stored_numbers(case, tokens)
        sides = [
            _rounded(tokens / scale[..., None] * (1 + e), case) for e in (-_QUOTIENT, _QUOTIENT)
        ]
        moved = torch.maximum(*((side - stored.double()).abs() for side in sides))
        bounds.append((moved + stored.double().abs() * _DTYPE) * scale[..., None])
    return torch.cat(bounds, -1).nan_to_num(0.0).float().to(plain.device)


def _rounded(quotients: torch.Tensor, case: Case) -> torch.Tensor:
    """Return quotients as numbers of the format, float64."""
    if case.argument.has_fp8:
        return quotients.float().to(scaled_dtype(case)).double()
    return (quotients.sign() * (quotients.abs() + 0.5)).trunc()
