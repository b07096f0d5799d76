"""Model of the cache write, reshape_and_cache_flash (triton_reshape_and_cache_flash.py, vLLM 0.11.2 and
0.33.0).

The output of a cache write is the cache: one row per slot (block × block_size + offset), with the key, then
the value of each KV head, in the dtype of the stored elements.
"""

import torch

from attnlab.contracts.target import Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall


def slot_mapping(call: KernelCall) -> torch.Tensor:
    """Return the slot of each new token, [n] int64: the call's own, or that of vLLM's scheduler."""
    if call.slot_mapping is not None:
        return call.slot_mapping.long()
    query_lens = call.query_lens
    seq = torch.repeat_interleave(
        torch.arange(len(query_lens), device=query_lens.device), query_lens
    )
    rows = torch.arange(len(seq), device=seq.device)
    pos = rows - call.query_start_loc.long()[seq] + (call.seq_lens.long() - query_lens)[seq]
    blocks = call.block_table.long()[seq, pos // call.block_size]
    return blocks * call.block_size + pos % call.block_size


def written_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a cache in the form of a cache write's output, [num_slots, num_kv_heads, 2 × head_size].

    ``key``, ``value``: [num_blocks, block_size, num_kv_heads, head_size].
    """
    return torch.cat([key.flatten(0, 1), value.flatten(0, 1)], dim=2)


def as_output(call: KernelCall, target: Target) -> torch.Tensor:
    """Return the cache of a call in the form of a cache write's output."""
    dtype = paged.format_of(call, target).dtype
    return written_cache(*(t.view(dtype) for t in to_flash(call.key_cache, call.value_cache)))


def reshape_and_cache_flash(call: KernelCall, target: Target) -> None:
    """Write the cache, with every new token in its slot, to ``call.output``."""
    format = paged.format_of(call, target)
    call.buffer.copy_(as_output(call, target))
    key = format.encode(call.key, call.number("k_scale")).view(format.dtype)
    value = format.encode(call.value, call.number("v_scale")).view(format.dtype)
    slots = slot_mapping(call)
    written = slots >= 0  # the others are padding
    both = torch.cat([key, value], dim=2)[: len(slots)]
    call.buffer[slots[written]] = both[written]
