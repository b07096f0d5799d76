"""The correct contents of a cache after a write, and how far the conversion to FP8 may differ from them."""

from dataclasses import dataclass

import torch

from attnlab.contracts.target import Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.kernels.model.cache_write import as_output, slot_mapping
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat
from attnlab.tensors.quantised import FP8_DTYPES

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
        numbers = output.view(self.dtype).double()
        same = (numbers == self.numbers) | (numbers.isnan() & self.numbers.isnan())
        distance = (numbers - self.numbers).abs().nan_to_num(torch.inf, torch.inf)
        return distance.masked_fill(same, 0.0)


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
    halves = [
        _half(new[: len(slots)], scale_of(call, name, slots), format)
        for new, name in ((call.key, "k_scale"), (call.value, "v_scale"))
    ]
    stored, off = (torch.cat([half[i] for half in halves], 2) for i in (0, 1))
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


def _half(
    new: torch.Tensor, scale: float | torch.Tensor, format: ElementFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys or values as they are stored, and how far each may be off."""
    stored = numbers_of(new, scale, format)
    if not format.is_fp8 or new.dtype in FP8_DTYPES:
        return stored, torch.zeros_like(stored)
    sides = [numbers_of(new.float() * (1 + e), scale, format) for e in (-_QUOTIENT, _QUOTIENT)]
    off = torch.maximum(*((side - stored).abs() for side in sides))
    return stored, off.nan_to_num(0.0)
