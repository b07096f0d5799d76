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
    - ``format``, ``k_scale``, ``v_scale``: how the stored bytes are decoded; scales are as
      in :class:`attnlab.tensors.call.KernelCall`.
    - ``key_x``: the innermost size of the key cache that the kernel assumes, or None for the true one.
    - ``column_size``: tokens per column of the block table that the kernel assumes, or None for the block
      size.
    - ``transposed``: "key" or "value" (or both) whose inner block dimensions are read in exchanged order.
    """

    key_row: int
    value_row: int
    format: ElementFormat
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
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
            cache = cache.reshape(*cache.shape[:2], chunks, cache.shape[3], self.key_x)
        if "key" in self.transposed:  # [chunks, block_size, x] read as [block_size, chunks, x]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2], cache.shape[4])
            stored = cache.reshape(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            stored = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        scale = self._scale(self.k_scale, self.key_row, blocks, offsets, kv)
        return self._decoded(stored.flatten(2), scale)

    def values(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Read the values at ``positions`` of the KV heads ``kv``, [n, len(kv), head_size] float64."""
        blocks, offsets = self._slots(call, self.value_row, positions)
        cache = call.value_cache
        if "value" in self.transposed:  # [head_size, block_size] read as [block_size, head_size]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2])
            stored = cache.reshape(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            stored = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        return self._decoded(stored, self._scale(self.v_scale, self.value_row, blocks, offsets, kv))

    def _slots(
        self, call: KernelCall, row: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, num_blocks = call.block_size, call.key_cache.shape[0]
        columns = (positions // (self.column_size or size)).clamp(max=call.block_table.shape[1] - 1)
        blocks = self.block(call.block_table[row, columns].long())
        return blocks.remainder(num_blocks), self.offset(positions % size).remainder(size)

    def scales(
        self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor
    ) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """Return k_scale and v_scale at ``positions`` for the KV heads ``kv``: each a number, or a tensor
        that broadcasts against [n, len(kv), head_size]."""
        found = [
            self._scale(scale, row, *self._slots(call, row, positions), kv)
            for scale, row in ((self.k_scale, self.key_row), (self.v_scale, self.value_row))
        ]
        return found[0], found[1]

    @staticmethod
    def _scale(
        scale: float | torch.Tensor,
        row: int,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        kv: torch.Tensor,
    ) -> float | torch.Tensor:
        """Return the scale of some slots and KV heads: a number, or [n or 1, len(kv), 1] float64."""
        if not isinstance(scale, torch.Tensor):
            return scale
        found = scale[row][None, kv] if scale.dim() == 2 else scale[blocks, offsets][:, kv]
        return found.double()[:, :, None]

    def _decoded(self, stored: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        if not self.format.is_fp8:
            return stored.double()
        return self.format.decode(stored).double() * scale
