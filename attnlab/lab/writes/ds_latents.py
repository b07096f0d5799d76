"""The cache format fp8_ds_mla: what a slot must hold.

A slot has 512 latent numbers in FP8 e4m3, four float32 scales, one for each 128 of them, and 64 rotary
numbers as they are. A reader multiplies each number by the stored scale. So a scale is right if no number is
clipped and at most one bit is lost: it is between m = largest magnitude / 448 and 2 × max(m, 1e-4), within
2⁻²². 0.11.2 stores m, 0.33.0 the next power of two of max(m, 1e-4). A number is right if it is the token's
divided by the stored scale, as :func:`attnlab.lab.writes.expected.plain_numbers`.
"""

from collections.abc import Iterator

import torch

from attnlab.lab.writes.expected import Stored, plain_numbers
from attnlab.lab.writes.write_case import WriteCase, WriteInputs
from attnlab.tensors.formats import FORMATS

_E4M3 = FORMATS["fp8_e4m3fn"]
_TILE, _LARGEST, _LEAST = 128, 448.0, 1e-4
_SCALE = 2.0**-22


def written_latents(
    case: WriteCase, inputs: WriteInputs, found: torch.Tensor
) -> Iterator[tuple[bool, torch.Tensor, Stored]]:
    """Yield whether they are scales, what slots hold, and what they must hold. ``found``: [n, 656] bytes."""
    key, value = (
        new[: len(inputs.slots), 0][inputs.slots >= 0] for new in (inputs.key, inputs.value)
    )
    numbers, scales, rotary = _parts(case, found)
    yield True, scales.double(), _scales(key)
    latents = plain_numbers(key, scales.repeat_interleave(_TILE, -1), _E4M3)
    yield False, numbers.double(), latents
    yield False, rotary.double(), Stored(numbers=value.double(), bound=torch.zeros(value.shape))


def write_latents(case: WriteCase, inputs: WriteInputs) -> None:
    """Write the correct bytes, with the scales of 0.33.0: a model of the op."""
    rows = torch.nonzero(inputs.slots >= 0).flatten()
    key, value = inputs.key[rows, 0], inputs.value[rows, 0]
    largest = key.float().unflatten(-1, (-1, _TILE)).abs().amax(-1)
    scales = (largest / _LARGEST).clamp(min=_LEAST).log2().ceil().exp2()
    numbers = _E4M3.encode(key, scales.repeat_interleave(_TILE, -1))
    slots = inputs.slots[rows]
    parts = [one.contiguous().view(torch.uint8) for one in (numbers, scales, value)]
    block, at = slots // case.block_size, slots % case.block_size
    inputs.caches["kv_cache"][block, at, 0] = torch.cat(parts, -1)


def _parts(case: WriteCase, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the latent numbers without scales, the scales, and the rotary numbers of [n, 656] bytes."""
    sizes = [case.head_size, 4 * case.head_size // _TILE, 2 * case.value_size]
    numbers, scales, rotary = (part.contiguous() for part in slots.split(sizes, -1))
    dtype = FORMATS[case.dtype].dtype
    return numbers.view(_E4M3.dtype), scales.view(torch.float32), rotary.view(dtype)


def _scales(key: torch.Tensor) -> Stored:
    least = key.double().unflatten(-1, (-1, _TILE)).abs().amax(-1) / _LARGEST
    most = 2 * least.clamp(min=_LEAST)
    middle = (least + most) / 2
    return Stored(numbers=middle, bound=middle - least + most * _SCALE)
