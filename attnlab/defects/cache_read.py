"""CacheRead: how one sequence's keys and values are read from a paged cache, correctly or not."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRead:
    """How one sequence's tokens are read from the cache.

    - ``key_row``, ``value_row``: rows of the block table.
    - ``block``, ``offset``: functions applied to block numbers and to offsets within a block.
    - ``format``, ``k_scale``, ``v_scale``: how the stored bytes are decoded.
    - ``key_x``: the innermost size of the key cache that the kernel assumes, or None for the true one.
    - ``column_size``: tokens per column of the block table that the kernel assumes, or None for the block
      size.
    - ``transposed``: "key" or "value" (or both) whose inner block dimensions are read in exchanged order.
    """

    key_row: int
    value_row: int
    format: ElementFormat
    k_scale: float
    v_scale: float
    block: Callable[[torch.Tensor], torch.Tensor] = lambda blocks: blocks
    offset: Callable[[torch.Tensor], torch.Tensor] = lambda offsets: offsets
    key_x: int | None = None
    column_size: int | None = None
    transposed: tuple[str, ...] = ()

    def keys(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Read the keys at ``positions`` of the KV heads ``kv``, [n, len(kv), head_size] float64."""
        blocks, offsets = self._slots(call, self.key_row, positions)
        cache = call.key_cache
        if self.key_x is not None:
            chunks = cache.shape[2] * cache.shape[4] // self.key_x
            cache = cache.view(*cache.shape[:2], chunks, cache.shape[3], self.key_x)
        if "key" in self.transposed:  # [chunks, block_size, x] read as [block_size, chunks, x]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2], cache.shape[4])
            stored = cache.view(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            stored = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        return self._decoded(stored.flatten(2), self.k_scale)

    def values(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Read the values at ``positions`` of the KV heads ``kv``, [n, len(kv), head_size] float64."""
        blocks, offsets = self._slots(call, self.value_row, positions)
        cache = call.value_cache
        if "value" in self.transposed:  # [head_size, block_size] read as [block_size, head_size]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2])
            stored = cache.view(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            stored = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        return self._decoded(stored, self.v_scale)

    def _slots(
        self, call: KernelCall, row: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, num_blocks = call.block_size, call.key_cache.shape[0]
        columns = (positions // (self.column_size or size)).clamp(max=call.block_table.shape[1] - 1)
        blocks = self.block(call.block_table[row, columns].long())
        return blocks.remainder(num_blocks), self.offset(positions % size).remainder(size)

    def _decoded(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        if not self.format.is_fp8:
            return stored.double()
        return self.format.decode(stored).double() * scale
