"""How a call's tensors lie in memory, as vLLM lays them out: the same numbers, other strides, and padding.

- "fused": query, key and value are slices of the projection that made all three, and a block of the
  cache holds its keys, then its values (kv_cache.unbind(1) of vLLM's Triton backend, from 0.11 on).
- "HND": the same, and in the layout of unified attention and the cache write a block's heads come before
  its slots (VLLM_KV_CACHE_LAYOUT=HND).
- padding: tokens and empty sequences behind the batch's own, as where a CUDA graph was captured for a
  larger one. Nobody looks at the rows of padding, but those of merge_attn_states.
"""

import dataclasses
from typing import Any

import torch

from attnlab.tensors.call import KernelCall


def presented(call: KernelCall) -> KernelCall:
    """Return the call with its strides and its padding; itself where it has neither."""
    return _padded(strided(call))


def strided(call: KernelCall) -> KernelCall:
    """Return the call with query, key, value and cache as ``call.strides`` has them."""
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
    """Return a cache [num_blocks, block_size, num_kv_heads, head_size] with the strides of that name."""
    if strides == "contiguous":
        return key, value
    if strides == "HND":
        both = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 1)
        first, second = both.unbind(1)
        return first.transpose(1, 2), second.transpose(1, 2)
    first, second = torch.stack([key, value], 1).unbind(1)
    return first, second


def _padded(call: KernelCall) -> KernelCall:
    """Return the call with ``call.padding`` more sequences, which are empty, and tokens: NaN, for a cache
    write a number, so that it is seen wherever it is written."""
    if not call.padding:
        return call
    holds = 3.0 if call.spec.writes_cache else float("nan")
    names = ("query", "key", "value", "output")[: 3 if call.spec.writes_cache else 4]
    tokens: dict[str, Any] = {
        name: _longer(getattr(call, name), call.padding, holds) for name in names
    }
    last = call.query_start_loc[-1:].expand(call.padding)
    none = call.seq_lens.new_zeros(call.padding)
    rows = call.block_table.new_zeros(call.padding, call.block_table.shape[1])
    return dataclasses.replace(
        call,
        **tokens,
        query_start_loc=torch.cat([call.query_start_loc, last]),
        seq_lens=torch.cat([call.seq_lens, none]),
        block_table=torch.cat([call.block_table, rows]),
    )


def _longer(tensor: torch.Tensor, rows: int, holds: float) -> torch.Tensor:
    """Return a tensor with rows of a number behind its own; its rows keep their strides."""
    room = tensor.new_empty_strided(
        (tensor.shape[0] + rows, *tensor.shape[1:]), tensor.stride()
    ).fill_(holds)
    room[: len(tensor)] = tensor
    return room
