"""Reading: how a sequence's tokens are read from a paged cache, rightly or wrongly."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRead:
    """How one sequence's tokens are read from the cache.

    - ``key_row``, ``value_row``: rows of the block table.
    - ``block``, ``offset``: what becomes of a block number and of an offset on the way.
    - ``format``, ``k_scale``, ``v_scale``: what the bytes are taken for.
    - ``key_x``: what the innermost size of the key cache is taken for, or None for what it is.
    - ``turned``: which of "key" and "value" is read with its block's inner dimensions exchanged.
    """

    key_row: int
    value_row: int
    format: ElementFormat
    k_scale: float
    v_scale: float
    block: Callable[[torch.Tensor], torch.Tensor] = lambda blocks: blocks
    offset: Callable[[torch.Tensor], torch.Tensor] = lambda offsets: offsets
    key_x: int | None = None
    turned: tuple[str, ...] = ()

    def keys(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return keys at ``positions`` of some KV heads, [n, len(kv), head_size] float64."""
        blocks, offsets = self._slots(call, self.key_row, positions)
        cache = call.key_cache
        if self.key_x is not None:
            chunks = cache.shape[2] * cache.shape[4] // self.key_x
            cache = cache.view(*cache.shape[:2], chunks, cache.shape[3], self.key_x)
        if "key" in self.turned:  # [chunks, block_size, x] taken for [block_size, chunks, x]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2], cache.shape[4])
            found = cache.view(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            found = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        return self._decoded(found.flatten(2), self.k_scale)

    def values(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return values at ``positions`` of some KV heads, [n, len(kv), head_size] float64."""
        blocks, offsets = self._slots(call, self.value_row, positions)
        cache = call.value_cache
        if "value" in self.turned:  # [head_size, block_size] taken for [block_size, head_size]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2])
            found = cache.view(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            found = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        return self._decoded(found, self.v_scale)

    def _slots(
        self, call: KernelCall, row: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, num_blocks = call.block_size, call.key_cache.shape[0]
        columns = (positions // size).clamp(max=call.block_table.shape[1] - 1)
        blocks = self.block(call.block_table[row, columns].long())
        return blocks.remainder(num_blocks), self.offset(positions % size).remainder(size)

    def _decoded(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        if not self.format.is_fp8:
            return stored.double()
        return self.format.decode(stored).double() * scale
