"""The blocks of a cache that a call names: copied, renumbered, with their strides within a block.

Example: a table [[7, 3], [3, 9]] over a cache of 1000 blocks. The copy holds the blocks 3, 7 and 9, the table
becomes [[1, 0], [0, 2]], and block_ids is [3, 7, 9].
"""

from dataclasses import dataclass

import torch

from attnlab.tensors.storage import extent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedBlocks:
    """Caches with some of their blocks.

    - ``caches``: views with the blocks as first dimension, as they were given.
    - ``block_ids``: [n] int64, the original number of each block, rising.
    """

    caches: tuple[torch.Tensor, ...]
    block_ids: torch.Tensor

    def renumbered(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return block numbers as positions in ``block_ids``; other numbers are kept.

        A number beyond the original cache is beyond the smaller one, too.
        """
        ids = self.block_ids.to(numbers.device)
        if not len(ids):
            return numbers
        position = torch.searchsorted(ids, numbers.long().contiguous()).clamp(max=len(ids) - 1)
        found = torch.where(ids[position] == numbers, position.to(numbers.dtype), numbers)
        if 0 in numbers.stride():
            return found.contiguous()
        kept: torch.Tensor = numbers.new_empty_strided(numbers.shape, numbers.stride())
        kept.copy_(found)
        return kept


def named_by(numbers: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the blocks that a table names, rising, [n] int64; numbers outside the cache are left out."""
    flat = numbers.flatten().long()
    found: torch.Tensor = flat[(flat >= 0) & (flat < num_blocks)].unique()
    return found


def copy_blocks(caches: tuple[torch.Tensor, ...], block_ids: torch.Tensor) -> NamedBlocks:
    """Return copies of some blocks of each cache; block_ids are rising and in range.

    Strides within a block are kept, and so is the stride from block to block where blocks do not
    interleave. Caches that lie in the same blocks of one storage, such as keys and values, still do.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, cache in enumerate(caches):
        groups.setdefault(_block_of(cache), []).append(index)
    copies: dict[int, torch.Tensor] = {}
    for indices in groups.values():
        members = [caches[index] for index in indices]
        copies |= dict(zip(indices, _copy_together(members, block_ids), strict=True))
    return NamedBlocks(
        caches=tuple(copies[index] for index in range(len(caches))), block_ids=block_ids
    )


def _block_of(cache: torch.Tensor) -> tuple[int, int]:
    """Return a key that is equal for caches which share the bytes of each block."""
    step = cache.stride(0) * cache.element_size()
    start = cache.storage_offset() * cache.element_size()
    return cache.untyped_storage().data_ptr() + start // max(1, step) * step, step


def _copy_together(caches: list[torch.Tensor], block_ids: torch.Tensor) -> list[torch.Tensor]:
    """Copy the blocks of caches with equal strides from block to block into one new storage."""
    ids, step = block_ids.to(caches[0].device), caches[0].stride(0)
    if len({cache.element_size() for cache in caches}) > 1:
        return [cache[ids] for cache in caches]
    first = min(cache.storage_offset() for cache in caches)
    last = max(
        cache.storage_offset() + extent(tuple(cache.shape[1:]), cache.stride()[1:])
        for cache in caches
    )
    if last - first > step:
        return [cache[ids] for cache in caches]  # blocks interleave: a stride cannot be kept
    blocks = torch.as_strided(caches[0], (caches[0].shape[0], last - first), (step, 1), first)
    if last - first == step:
        storage = blocks[ids].flatten()
    else:
        storage = torch.zeros(len(ids) * step, dtype=caches[0].dtype, device=caches[0].device)
        storage.view(len(ids), step)[:, : last - first] = blocks[ids]
    return [
        torch.as_strided(
            storage.view(cache.dtype),
            (len(ids), *cache.shape[1:]),
            cache.stride(),
            cache.storage_offset() - first,
        )
        for cache in caches
    ]
