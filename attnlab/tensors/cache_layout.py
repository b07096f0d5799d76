"""Layouts of a paged cache outside the lab: which one two tensors have, and conversion to the lab's.

=========  ====================================================================================
x-split    key [num_blocks, num_kv_heads, head_size / x, block_size, x],
           value [num_blocks, num_kv_heads, head_size, block_size]: vLLM's paged decode kernels
flash      key and value [num_blocks, block_size, num_kv_heads, head_size]: FlashAttention,
           unified attention, and vLLM's cache write
HND        key and value [num_blocks, num_kv_heads, block_size, head_size]: FlashInfer
=========  ====================================================================================

A KernelCall has views of its cache in the layout x-split, whatever the layout in memory.
"""

import math

import torch

from attnlab.case.errors import InvalidCall

LAYOUTS = ("x-split", "flash", "HND")
_SHAPES = (
    "[num_blocks, num_kv_heads, head_size / x, block_size, x] or "
    "[num_blocks, block_size, num_kv_heads, head_size]"
)


def find_layout(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    num_kv_heads: int | None = None,
    min_block_size: int = 1,
) -> str:
    """Return the one layout of LAYOUTS that the shapes allow; raise InvalidCall if it is not one.

    - ``query``: [num_tokens, num_heads, head_size].
    - ``num_kv_heads``: the number of KV heads, if it is known.
    - ``min_block_size``: the smallest block size that gives the longest sequence enough slots.
    """
    _, num_heads, head_size = query.shape
    if key_cache.dim() == 5:
        return "x-split"
    if key_cache.dim() != 4 or key_cache.shape[3] != head_size:
        raise InvalidCall(
            f"key_cache must be {_SHAPES} with head_size {head_size}, got {tuple(key_cache.shape)}",
            field="key_cache",
        )
    sizes = {"flash": key_cache.shape[1], "HND": key_cache.shape[2]}  # block size by layout
    heads = {"flash": key_cache.shape[2], "HND": key_cache.shape[1]}
    allowed = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    allowed = allowed if num_kv_heads is None else [num_kv_heads]
    found = [layout for layout, kv_heads in heads.items() if kv_heads in allowed]
    if len(found) > 1:
        found = [layout for layout in found if sizes[layout] >= min_block_size] or found
    shape = tuple(key_cache.shape)
    if not found:
        count = num_kv_heads or f"a divisor of {num_heads}"
        text = f"key_cache must be {_SHAPES} with num_kv_heads {count}, got {shape}"
        raise InvalidCall(text, field="key_cache")
    if len(found) > 1:
        raise InvalidCall(
            f"layout must be given, {' or '.join(found)}: a key_cache of shape {shape} may be either",
            field="layout",
        )
    return found[0]


def to_x_split(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache in the layout x-split.

    x is 16 bytes of elements, or the largest smaller power of two that divides head_size. Values may have
    another width than keys. Raises InvalidCall if the two shapes do not fit ``layout``.
    """
    if layout == "x-split":
        return key_cache, value_cache
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[:3] != key_cache.shape[:3]:
            expected = tuple(key_cache.shape) if key_cache.dim() == 4 else "of 4 dimensions"
            text = f"{name} must be {expected} in layout {layout}, got {tuple(cache.shape)}"
            raise InvalidCall(text, field=name)
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    x = math.gcd(16 // key_cache.element_size(), key_cache.shape[3]) or 1
    key = key_cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4)
    return key, value_cache.permute(0, 2, 3, 1)


def in_layout(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an x-split cache in another layout: views of the same shape and strides as before
    :func:`to_x_split`; copies if the cache was not made by it."""
    if layout == "x-split":
        return key_cache, value_cache
    key, value = key_cache.permute(0, 3, 1, 2, 4).flatten(3), value_cache.permute(0, 3, 1, 2)
    return (key, value) if layout == "flash" else (key.transpose(1, 2), value.transpose(1, 2))
