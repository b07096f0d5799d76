"""What a cache write with an op argument must leave, and how far each number may be off.

A cache with a scale per token and head is compared as the numbers that it stands for, in the Case's dtype. A
number whose quotient is next to the boundary of two numbers of the format may be the other one: the quotient
is off by at most 2⁻²⁰ of itself (:mod:`attnlab.lab.writes.expected`). Scales are off by 2⁻²², so a number is
off by at most 2⁻²¹ of itself, and by one more number of the dtype where it is rounded: the dtype's eps.
"""

from collections.abc import Callable

import torch

from attnlab.case.case import Case
from attnlab.tensors.formats import FORMATS
from attnlab.tensors.op_argument_data import narrow_size, per_token_head

_QUOTIENT, _SCALE = 2.0**-20, 2.0**-21


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
    if not case.op_argument.endswith("per_token_head"):
        return plain
    halves = (per_token_head(one, _dtype(case)) for one in plain.cpu().split(case.head_size, -1))
    decoded = [(stored.float() * scale[..., None]).to(plain.dtype) for stored, scale in halves]
    return torch.cat(decoded, -1).to(plain.device)


def write_bound(case: Case, make_plain: Callable[[], torch.Tensor]) -> torch.Tensor | float:
    """Return by how much each number of the cache may be off.

    ``make_plain`` returns ``plain`` of :func:`expected_write`; it is called if the bound depends on it.
    """
    if not case.op_argument.endswith("per_token_head"):
        return 0.0
    bounds, plain = [], make_plain()
    unit = torch.finfo(FORMATS[case.dtype].dtype).eps + _SCALE
    for tokens in plain.cpu().double().split(case.head_size, -1):
        stored, scale = per_token_head(tokens, _dtype(case))
        sides = [
            _rounded(tokens / scale[..., None] * (1 + e), case) for e in (-_QUOTIENT, _QUOTIENT)
        ]
        moved = torch.maximum(*((side - stored.double()).abs() for side in sides))
        bounds.append((moved + stored.double().abs() * unit) * scale[..., None])
    return torch.cat(bounds, -1).nan_to_num(0.0).float().to(plain.device)


def _rounded(quotients: torch.Tensor, case: Case) -> torch.Tensor:
    """Return quotients as numbers of the format, float64."""
    if case.op_argument.startswith("int8"):
        return (quotients.sign() * (quotients.abs() + 0.5)).trunc()
    return quotients.float().to(_dtype(case)).double()


def _dtype(case: Case) -> torch.dtype:
    is_int8 = case.op_argument.startswith("int8")
    return torch.int8 if is_int8 else FORMATS[case.machine.fp8_e4m3].dtype
