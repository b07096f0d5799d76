"""Memory layout of a call's tensors: vLLM's strides and padding, with unchanged numbers.

- "fused": query, key and value are slices of one tensor, as a fused projection returns them. A block of
  the cache holds its keys, then its values (kv_cache.unbind(1) in vLLM's Triton backend, since 0.11).
- "HND": as "fused", and in the cache of unified attention and of the cache write, the heads of a block
  come before its slots (VLLM_KV_CACHE_LAYOUT=HND).
- padding: tokens and empty sequences after those of the batch, as for a CUDA graph that was captured for
  a larger batch. Padding rows of the output are checked only for merge_attn_states.
"""

import dataclasses
from typing import Any

import torch

from attnlab.tensors.call import KernelCall


def presented(call: KernelCall) -> KernelCall:
    """Return the call with its strides and padding applied; the call itself if it has neither."""
    return _padded(strided(call))


def strided(call: KernelCall) -> KernelCall:
    """Return the call with the strides ``call.strides`` of query, key, value and cache; copies."""
    if call.strides == "contiguous":
        return call
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    joined = torch.cat([call.query, call.key, call.value], 1)
    query, key, value = joined.split([heads, kv_heads, kv_heads], 1)
    caches = (call.key_cache, call.value_cache)
    blocks = torch.stack([cache.flatten(1) for cache in caches], 1)
    key_cache, value_cache = (
        half.unflatten(1, cache.shape[1:])
        for half, cache in zip(blocks.unbind(1), caches, strict=True)
    )
    return dataclasses.replace(
        call, query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )


def flash(
    key: torch.Tensor, value: torch.Tensor, strides: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache with the strides of that name.

    ``key``, ``value``: [num_blocks, block_size, num_kv_heads, head_size], as is the result.
    """
    if strides == "contiguous":
        return key, value
    if strides == "HND":
        both = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 1)
        first, second = both.unbind(1)
        return first.transpose(1, 2), second.transpose(1, 2)
    first, second = torch.stack([key, value], 1).unbind(1)
    return first, second


def _padded(call: KernelCall) -> KernelCall:
    """Return the call with ``call.padding`` more empty sequences and tokens.

    Padding tokens are NaN; for a cache write they are 3, a number that is visible in every cache format.
    """
    if not call.padding:
        return call
    fill = 3.0 if call.spec.writes_cache else float("nan")
    names = ("query", "key", "value", "output")[: 3 if call.spec.writes_cache else 4]
    tokens: dict[str, Any] = {
        name: _longer(given, call.padding, fill)
        for name in names
        if (given := getattr(call, name)) is not None
    }
    last = call.query_start_loc[-1:].expand(call.padding)
    empty = call.seq_lens.new_zeros(call.padding)
    rows = call.block_table.new_zeros(call.padding, call.block_table.shape[1])
    masks: dict[str, Any] = {
        name: torch.cat([mask, mask.new_zeros(call.padding, *mask.shape[1:])])
        for name in ("causal", "mm_prefix_range", "rswa_prefix_lens")
        if isinstance(mask := getattr(call, name), torch.Tensor)
    }
    return dataclasses.replace(
        call,
        **tokens,
        **masks,
        query_start_loc=torch.cat([call.query_start_loc, last]),
        seq_lens=torch.cat([call.seq_lens, empty]),
        block_table=torch.cat([call.block_table, rows]),
    )


def _longer(tensor: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """Return a copy with ``rows`` more rows of the number ``fill``. The strides are kept, but for a tensor
    that is one number expanded."""
    shape = (tensor.shape[0] + rows, *tensor.shape[1:])
    is_expanded = 0 in tensor.stride()
    strides = torch.empty(shape, device="meta").stride() if is_expanded else tensor.stride()
    longer = tensor.new_empty_strided(shape, strides).fill_(fill)
    longer[: len(tensor)] = tensor
    return longer
