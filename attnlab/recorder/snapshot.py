"""Copies of a call's tensors: strides kept, and of a large cache only the blocks that the table names.

Copying waits for no GPU. How many different blocks a table names is known on the GPU only, so the block of
every entry is copied, and :func:`each_block_once` drops the repeats when the call is read. If that were too
much memory, the different blocks are found first.
"""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import NamedBlocks, copy_blocks, extent, named_by

_LARGE_CACHE = 1 << 24  # bytes; a smaller cache is copied whole
_MOST_REPEATED = 1 << 29  # bytes of blocks that are copied without a search for repeats
_GAPS = 4  # a tensor that reaches more than this times its own size is copied without the gaps
_COPIED = "copied_blocks"  # the field with the original number of each copied block, [n] int64


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


def owned_slots(call: KernelCall) -> torch.Tensor:
    """Return which slots of a call's cache belong to its sequences, [num_blocks, block_size] bool."""
    owned = torch.zeros(call.key_cache.shape[0], call.block_size, dtype=torch.bool)
    for row, seq_len in zip(call.block_table.long(), call.seq_lens.tolist(), strict=True):
        positions = torch.arange(seq_len)
        owned[row[positions // call.block_size], positions % call.block_size] = True
    return owned


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with copies of the tensors among them."""
    return {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def is_large(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Answer whether only the blocks of a cache that a call names are copied."""
    return key_cache.nbytes + value_cache.nbytes > _LARGE_CACHE


def copy_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Reading with copies of their tensors.

    Of a large cache, the blocks that the table names are copied; :func:`each_block_once` must be applied
    before the fields are used.
    """
    blocks = _blocks_of_table(fields)
    rest = {name: value for name, value in fields.items() if name not in blocks}
    return {**copies(rest), **blocks}


def _blocks_of_table(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the blocks in the table, and their numbers; no entries for a small cache."""
    key, value, table = (fields.get(n) for n in ("key_cache", "value_cache", "block_table"))
    if not all(isinstance(one, torch.Tensor) for one in (key, value, table)):
        return {}
    assert key is not None
    assert value is not None
    assert table is not None
    if not is_large(key, value):
        return {}
    whole, num_blocks = key.nbytes + value.nbytes, key.shape[0]
    if table.numel() * (whole // num_blocks) <= min(whole, _MOST_REPEATED):
        ids = table.detach().flatten().clamp(0, num_blocks - 1).long()
    else:
        ids = named_by(table.detach(), num_blocks)
    return {**_blocks(fields, ids), _COPIED: ids}


def _blocks(fields: Mapping[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """Return copies of some blocks of the caches, and of the scales that belong to their slots."""
    caches = copy_blocks((fields["key_cache"].detach(), fields["value_cache"].detach()), ids).caches
    scales = {
        name: scale[ids.to(scale.device)]
        for name in ("k_scale", "v_scale")
        if isinstance(scale := fields.get(name), torch.Tensor) and scale.dim() == 3
    }
    return {"key_cache": caches[0], "value_cache": caches[1], **scales}


def each_block_once(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`copy_fields` returned, with each block of a large cache once, by rising number.

    Then the block table has new numbers, and ``block_ids`` the original ones.
    """
    if _COPIED not in fields:
        return dict(fields)
    rest = {name: value for name, value in fields.items() if name != _COPIED}
    table, held = fields["block_table"], fields[_COPIED]
    ids = table.flatten().long().unique()
    ids = ids[torch.isin(ids, held.to(ids.device))].to(held.device)
    if not torch.equal(ids, held):
        rising, order = held.sort(stable=True)
        rest |= _blocks(fields, order[torch.searchsorted(rising, ids)])
    caches = (rest["key_cache"], rest["value_cache"])
    named = NamedBlocks(caches=caches, block_ids=ids)
    return {**rest, "block_table": named.renumbered(table), "block_ids": ids}
