"""The comparison of a cache write: the cache as it must be, slot by slot.

The rows of the comparison are slots: those of sequence 0, position by position, then of sequence 1, …, and
last, as one more sequence, the slots of no sequence. A token that is written to the wrong slot appears
twice: where it is missing, and where it must not be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.case.case import Case, Lengths
from attnlab.contracts.contract import Target
from attnlab.kernels import model as paged
from attnlab.kernels.model import as_output, slot_mapping, written_cache
from attnlab.tensors.cache import PagedCache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import (
    FORMATS,
    LEAST_SCALE,
    ElementFormat,
    distance,
    pack_int4,
    rotate,
    rotation_size,
    unpack_int4,
)
from attnlab.tensors.quantised import (
    FP8_DTYPES,
    narrow_size,
    scaled_dtype,
    scaled_numbers,
    stored_numbers,
)


def slot_lengths(case: Case) -> Lengths:
    """Return the comparison's rows as lengths: each sequence's positions, then the slots of no sequence."""
    owned = case.lengths.seq_lens
    spare = case.total_blocks * case.block_size - sum(owned)
    query_lens = (*owned, spare) if spare else owned
    return Lengths(query_lens=query_lens, ctx_lens=(0,) * len(query_lens))


def owners_of(case: Case) -> int | None:
    """Return how many sequences own the rows of a cache write's comparison; None for another op."""
    return len(case.lengths.query_lens) if case.spec.writes_cache else None


def slot_order(case: Case, block_table: torch.Tensor) -> torch.Tensor:
    """Return the slot of each row of the comparison, [num_slots] int64."""
    slots = []
    for row, seq_len in zip(block_table, case.lengths.seq_lens, strict=True):
        pos = torch.arange(seq_len)
        slots.append(row[pos // case.block_size] * case.block_size + pos % case.block_size)
    owned = torch.cat(slots)
    spare = torch.ones(case.total_blocks * case.block_size, dtype=torch.bool)
    spare[owned] = False
    return torch.cat([owned, torch.nonzero(spare).flatten()])


def expected_cache(written: PagedCache) -> torch.Tensor:
    """Return a cache with every token as the output of the write.

    [num_slots, num_kv_heads, 2 × head_size] in the dtype of the stored elements.
    """
    return written_cache(*(cache.view(written.format.dtype) for cache in written.to_flash()))


def as_numbers(output: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in float32, as read in the output's dtype.

    Elements with equal bytes, NaN included, are 0 in both.
    """
    expected = expected.view(output.dtype)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[output.element_size()]
    same = output.view(integer) == expected.view(integer)
    return output.float().masked_fill_(same, 0.0), expected.float().masked_fill_(same, 0.0)


# The correct contents of a cache after a write, and how far the conversion to FP8 may differ from them.

_QUOTIENT = 2.0**-21  # relative error of a division in float32 on a GPU (2 ulp) and of its operands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedWrite:
    """What a cache must hold after a write.

    - ``numbers``, ``bound``: [num_slots, num_kv_heads, head_size + value_size] float64, the stored numbers
      before any scale, and how far each may be off. The bound is 0, except for numbers that are as near to
      another FP8 number within the rounding of the division; it is infinite in slots of several tokens.
    - ``before``: the numbers before the write. ``stored``: [num_tokens, …] float64, what each token becomes.
    - ``token``: [num_slots] int64, the token of each slot, -1 for a slot that keeps its contents.
    - ``slots``: [num_tokens] int64, the slot of each token, negative for padding.
    - ``dtype``: of a stored element.
    """

    numbers: torch.Tensor
    bound: torch.Tensor
    before: torch.Tensor
    stored: torch.Tensor
    token: torch.Tensor
    slots: torch.Tensor
    dtype: torch.dtype

    def difference(self, output: torch.Tensor) -> torch.Tensor:
        """Return each element's distance from the correct number, 0 where both are NaN."""
        return distance(output.view(self.dtype), self.numbers)


def expected_write(call: KernelCall, target: Target) -> ExpectedWrite:
    """Return what the cache of a call must hold after its write. ``call`` is on the CPU."""
    slots = slot_mapping(call).long()
    before = as_output(call, target).double()
    stored, off = encoded(call, target)
    rows = torch.nonzero(slots >= 0).flatten()
    numbers, bound = before.clone(), torch.zeros_like(before)
    token = torch.full((before.shape[0],), -1)
    numbers[slots[rows]], bound[slots[rows]], token[slots[rows]] = stored[rows], off[rows], rows
    several = torch.bincount(slots[rows], minlength=before.shape[0]) > 1
    bound[several] = torch.inf
    return ExpectedWrite(
        numbers=numbers,
        bound=bound,
        before=before,
        stored=stored,
        token=token,
        slots=slots,
        dtype=paged.format_of(call, target).dtype,
    )


def encoded(call: KernelCall, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored numbers of each token that has an entry in slot_mapping, and how far they may be off.

    Both are [n, num_kv_heads, head_size + value_size] float64.
    """
    slots = slot_mapping(call).long()
    format = paged.format_of(call, target)
    halves = (
        stored_numbers_of(new[: len(slots)], scale_of(call, name, slots), format)
        for new, name in zip(paged.new_tokens(call), ("k_scale", "v_scale"), strict=True)
    )
    stored, off = (torch.cat(both, 2) for both in zip(*halves, strict=True))
    return stored, off


def scale_of(call: KernelCall, name: str, slots: torch.Tensor) -> float | torch.Tensor:
    """Return the scale of each token: a number, or [n, num_kv_heads, 1] for one per slot and head."""
    scale = getattr(call, name)
    if not isinstance(scale, torch.Tensor) or scale.dim() != 3:
        return call.number(name)
    return scale.flatten(0, 1)[slots.clamp(min=0)].float()[:, :, None]


def numbers_of(
    new: torch.Tensor, scale: float | torch.Tensor, format: ElementFormat
) -> torch.Tensor:
    """Return tokens as they are stored, float64; tokens in FP8 are stored as they are."""
    if new.dtype in FP8_DTYPES:
        return new.double()
    return format.encode(new, scale).view(format.dtype).double()  # type: ignore[arg-type]


def stored_numbers_of(
    new: torch.Tensor,
    scale: float | torch.Tensor,
    format: ElementFormat,
    quotient: float = _QUOTIENT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens as they are stored, and how far each number may be off with its ``quotient``."""
    stored = numbers_of(new, scale, format)
    if not format.is_fp8 or new.dtype in FP8_DTYPES:
        return stored, torch.zeros_like(stored)
    sides = [numbers_of(new.float() * (1 + e), scale, format) for e in (-quotient, quotient)]
    off = torch.maximum(*((side - stored).abs() for side in sides))
    return stored, off.nan_to_num(0.0)


# How far the numbers of an INT4 cache may be off after a write, each times its scale and not rotated back.
#
# The rotation of b elements adds log2 b times in float32. So a rotated element is off by at most log2 b ·
# 2⁻²⁴ · Σ |x|, and then rounded to the tokens' dtype. On a GPU the rotation takes and gives bfloat16: 2⁻⁹ ·
# Σ |x| and 2⁻⁸ of the result. Most elements round to one number for all such errors. For the others both
# sides are followed through the scale (largest − smallest) / 15, the zero point and the number. A quotient
# in float32, with its sum and the half that rounds it, is off by at most 2⁻¹⁹ of itself, or of 1
# (:mod:`attnlab.lab.writes`). A scale loses its lowest four bits.

_INT4_QUOTIENT, _INT4_SCALE, _PACKED = 2.0**-19, 2.0**-22, 2.0**-18


def int4_write_bound(tokens: torch.Tensor, *, is_native: bool) -> torch.Tensor:
    """Return the bound of each number of tokens [..., head_size], float64. ``is_native``: on a GPU."""
    low, high = _rotated(tokens, is_native)
    least, most = (low.amin(-1), high.amin(-1)), (low.amax(-1), high.amax(-1))
    scales = (
        ((most[0] - least[1]) / 15).clamp(min=LEAST_SCALE) * (1 - _INT4_SCALE),
        ((most[1] - least[0]) / 15).clamp(min=LEAST_SCALE) * (1 + _INT4_SCALE),
    )
    zeros = _range([-one / scale for one in least for scale in scales])
    quotients = [one / scale[..., None] for one in (low, high) for scale in scales]
    reached = []
    for zero in (nibble(zeros[0]), nibble(zeros[1])):
        sides = _range([quotient + zero[..., None] for quotient in quotients])
        reached += [
            (nibble(side) - zero[..., None]) * scale[..., None]
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
        least - _INT4_QUOTIENT * least.abs().clamp(min=1.0),
        most + _INT4_QUOTIENT * most.abs().clamp(min=1.0),
    )


def half_away(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to integers, halves away from zero."""
    return (numbers.sign() * (numbers.abs() + 0.5)).trunc()


def nibble(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to 0 … 15, halves away from zero."""
    return half_away(numbers).clamp(0, 15)


# What a cache write with an op argument must leave, and how far each number may be off.
#
# A cache with a scale per token and head is compared as its numbers times their scales, in the Case's
# dtype; those of INT4 are rotated (:mod:`attnlab.lab.cache_write` has their bound). A number whose quotient
# is next to the boundary of two numbers of the format may be the other one: the quotient is off by at most
# 2⁻²⁰ of itself (:mod:`attnlab.lab.writes`). Scales are off by 2⁻²², so a number is off by at most
# 2⁻²¹ of itself, and by one more number of the dtype where it is rounded: the dtype's eps.

_ARGUMENT_QUOTIENT, _ARGUMENT_SCALE = 2.0**-20, 2.0**-21


def expected_argument_write(case: Case, plain: torch.Tensor) -> torch.Tensor:
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
    halves = plain.cpu().split(case.head_size, -1)
    bounds = [_half_bound(case, is_native, half) for half in halves]
    return torch.cat(bounds, -1).nan_to_num(0.0).float().to(plain.device)


def _half_bound(case: Case, is_native: bool, tokens: torch.Tensor) -> torch.Tensor:
    """Return the bound of keys or values [..., head_size]."""
    stored, scale = stored_numbers(case, tokens)
    unit = torch.finfo(FORMATS[case.dtype].dtype).eps + _ARGUMENT_SCALE
    rounded = scaled_numbers(case, stored, scale).abs() * unit
    if case.argument.is_packed:
        return rounded + int4_write_bound(tokens, is_native=is_native)
    quotient = tokens.double() / scale[..., None]
    sides = [_rounded(quotient * (1 + e), case) for e in (-_ARGUMENT_QUOTIENT, _ARGUMENT_QUOTIENT)]
    moved = torch.maximum(*((side - stored.double()).abs() for side in sides))
    return rounded + moved * scale[..., None]


def _rounded(quotients: torch.Tensor, case: Case) -> torch.Tensor:
    """Return quotients as numbers of the format, float64."""
    if case.argument.has_fp8:
        return quotients.float().to(scaled_dtype(case)).double()
    return half_away(quotients)
