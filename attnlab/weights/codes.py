"""Codes: values that turn an output into weights.

The slots of lane j (:mod:`attnlab.weights.lanes`) have the value 1 in element j mod head_size during run
j // head_size, and 0 otherwise. 0 and 1 are exact in float16, bfloat16 and FP8. Another run has random signed
powers of two in every element: its output follows from the weights if every value comes from its own slot,
head and element, and if the output is linear in V.
"""

import dataclasses
from collections.abc import Iterator
from math import prod

import torch

from attnlab.contracts.target import Target
from attnlab.kernels.model.cache_reads import format_of
from attnlab.tensors.cache import interleaved
from attnlab.tensors.call import KernelCall
from attnlab.weights.setup import cache_slots, has_new_slots


def num_slots(call: KernelCall) -> int:
    """Return the number of slots of a call: of the cache, and new tokens that are read from arguments."""
    return cache_slots(call) + (call.query.shape[0] if has_new_slots(call) else 0)


def one_hot(call: KernelCall, lanes: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """Yield the values of each run, [N, num_kv_heads, head_size] int8.

    ``lanes``: [N], the lane of each slot. The slot is 1 in the element of its lane, in one run. ``width``:
    the number of elements that are used. The values are on the call's device.
    """
    lanes = lanes.to(call.query.device)
    head_size, slots = call.query.shape[2], torch.arange(len(lanes), device=lanes.device)
    for first in range(0, int(lanes.max()) + 1, width):
        shape = (len(lanes), call.key.shape[1], head_size)
        codes = torch.zeros(shape, dtype=torch.int8, device=lanes.device)
        here = (lanes >= first) & (lanes < first + width)
        codes[slots[here], :, lanes[here] - first] = 1
        yield codes


def random_codes(call: KernelCall, seed: int = 0) -> torch.Tensor:
    """Return ±1, ±2 or ±4 for every slot, head and element, [N, num_kv_heads, head_size] int8."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_slots(call), call.key.shape[1], call.query.shape[2])
    words = torch.randint(-(2**63), 2**63 - 1, (-(-prod(shape) // 8),), generator=generator)
    numbers = words.view(torch.int8)[: prod(shape)].view(shape)
    magnitudes = torch.ones_like(numbers) << (numbers & 127) % 3
    return torch.where(numbers < 0, -magnitudes, magnitudes)


def with_values(call: KernelCall, target: Target, codes: torch.Tensor) -> KernelCall:
    """Return the call with these values and an output buffer of NaN.

    ``codes``: [N, num_kv_heads, head_size] int8; an element of the cache holds the number itself, so that the
    kernel multiplies it by ``call.v_scale`` if the cache is FP8.
    """
    old = cache_slots(call)
    blocks, kv_heads, head_size, block_size = call.value_cache.shape
    format = format_of(call, target)
    plain = codes[:old].view(blocks, block_size, kv_heads, head_size).permute(0, 2, 3, 1)
    numbers = plain.float() if format.is_fp8 else plain
    stored = numbers.to(format.dtype).contiguous().view(format.storage)
    if call.interleave_v:
        stored = interleaved(stored)
    value_cache, value = _like(call.value_cache, stored), call.value
    if has_new_slots(call):
        value = _like(call.value, codes[old:].to(call.value.dtype))
    output = torch.full_like(call.buffer, float("nan"))
    return dataclasses.replace(call, value_cache=value_cache, value=value, output=output)


def with_finite_keys(call: KernelCall, target: Target, empty: torch.Tensor) -> KernelCall:
    """Return the call with drawn keys in the slots ``empty``, [cache slots] bool.

    They have the spread of the other keys, so that a key that must not count gets a visible weight.
    """
    format = format_of(call, target)
    blocks, kv_heads, chunks, block_size, x = call.key_cache.shape
    tokens = call.key_cache.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, chunks, x)
    numbers = format.decode(tokens.contiguous())
    finite = numbers.isfinite()
    empty = empty.to(tokens.device)[:, None, None, None]
    fill = empty | ~finite
    chosen = torch.nonzero(fill.flatten(1).any(1)).flatten()
    if not len(chosen):
        return call
    shape = (len(chosen), kv_heads, chunks, x)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(17)) * _spread(
        numbers, ~fill
    )
    tokens = tokens.clone()
    tokens[chosen] = torch.where(
        fill[chosen], format.encode(drawn).to(tokens.device), tokens[chosen]
    )
    key_cache = tokens.view(blocks, block_size, kv_heads, chunks, x).permute(0, 2, 3, 1, 4)
    return dataclasses.replace(call, key_cache=_like(call.key_cache, key_cache))


def _spread(numbers: torch.Tensor, used: torch.Tensor) -> float:
    """Return the standard deviation of the used numbers; 1 if they are too few or all the same."""
    count = int(used.sum())
    if count < 2:
        return 1.0
    mean = float(torch.where(used, numbers, 0.0).sum(dtype=torch.float64)) / count
    squares = torch.where(used, numbers - mean, 0.0).square().sum(dtype=torch.float64)
    return float(squares / (count - 1)) ** 0.5 or 1.0


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the numbers of ``new`` with the strides and the device of ``old``."""
    copy = old.new_empty_strided(old.shape, old.stride())
    return copy.copy_(new)


def with_drawn_keys(call: KernelCall, target: Target, seed: int = 5) -> KernelCall:
    """Return the call with query and keys of N(0, 1), where its own scores hardly differ."""
    format = format_of(call, target)
    generator = torch.Generator().manual_seed(seed)
    scale = call.k_scale if format.is_fp8 else 1.0
    cached = torch.randn(call.key_cache.shape, generator=generator) / scale
    stored = cached.to(format.dtype).view(format.storage)
    query, key = (
        _like(old, torch.randn(old.shape, generator=generator).to(old.dtype))
        for old in (call.query, call.key)
    )
    return dataclasses.replace(call, query=query, key=key, key_cache=_like(call.key_cache, stored))
