"""Copies of a call's tensors: strides kept, and of a large cache only the blocks that the table names."""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.tensors.named_blocks import copy_blocks, named_by
from attnlab.tensors.storage import extent

_LARGE_CACHE = 1 << 24  # bytes; a smaller cache is copied whole
_GAPS = 4  # a tensor that reaches more than this times its own size is copied without the gaps


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides. Memory between the elements is copied, too, unless it is most
    of it."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.clone()
    reach = extent(tuple(tensor.shape), tensor.stride())
    if reach > _GAPS * max(1, tensor.numel()) or reach < tensor.numel():
        return tensor.clone(memory_format=torch.contiguous_format)
    flat = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset()).clone()
    return torch.as_strided(flat, tensor.shape, tensor.stride(), 0)


def is_large(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Answer whether only the blocks of a cache that a call names are copied."""
    return key_cache.nbytes + value_cache.nbytes > _LARGE_CACHE


def copy_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Reading with copies of their tensors.

    A large cache is reduced to the blocks that the table names: then the block table has new numbers and
    ``block_ids`` the original ones.
    """
    named = _named_blocks(fields)
    rest = {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
        if name not in named
    }
    return {**rest, **named}


def _named_blocks(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the caches and their table; no entries for a small cache."""
    key, value, table = (fields.get(n) for n in ("key_cache", "value_cache", "block_table"))
    if not all(isinstance(one, torch.Tensor) for one in (key, value, table)):
        return {}
    assert key is not None
    assert value is not None
    assert table is not None
    if not is_large(key, value):
        return {}
    blocks = copy_blocks((key.detach(), value.detach()), named_by(table, key.shape[0]))
    scales = {
        name: scale[blocks.block_ids.to(scale.device)]
        for name in ("k_scale", "v_scale")
        if isinstance(scale := fields.get(name), torch.Tensor) and scale.dim() == 3
    }
    return {
        "key_cache": blocks.caches[0],
        "value_cache": blocks.caches[1],
        "block_table": blocks.renumbered(table),
        "block_ids": blocks.block_ids,
        **scales,
    }
