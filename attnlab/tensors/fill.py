"""Write tokens into a paged cache.

Both cache tensors are transposes of the tokens. An element-wise transposed copy takes ten times as long
as a plain copy. So whole blocks are copied in elements of up to 16 bytes, and only the values of a block
are transposed element by element, while they are in the processor's cache. Tokens that do not fill a
block are written by indexed assignment.
"""

from collections.abc import Iterator

import torch

_CARRIERS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCKS_AT_A_TIME = 16  # 8 MiB of float16 for 64 heads of 128: fits the last-level cache


def write_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token ``rows[i]`` of ``new_key`` and ``new_value`` to slot ``slots[i]`` of the cache.

    - ``key``: [num_blocks, num_kv_heads, head_size / x, block_size, x], ``value``: [num_blocks,
      num_kv_heads, head_size, block_size]; both contiguous, both modified.
    - ``new_key``, ``new_value``: [tokens, num_kv_heads, head_size], of the dtypes of the cache.
    - ``rows``, ``slots``: [n] int64; a slot is block × block_size + offset; slots are unique.
    """
    block_size = value.shape[3]
    if key.device.type != "cpu":  # on a GPU, a transposed copy is as fast as a plain one
        _write_slots(key, value, new_key[rows], new_value[rows], slots)
        return
    whole = _whole_blocks(rows, slots, block_size)
    for first_row, blocks in _runs(rows[whole], slots[whole] // block_size, block_size):
        end = first_row + len(blocks) * block_size
        _write_key_blocks(key, blocks, new_key[first_row:end].unflatten(0, (-1, block_size)))
        _write_value_blocks(value, blocks, new_value[first_row:end].unflatten(0, (-1, block_size)))
    rest = torch.ones(len(slots), dtype=torch.bool)
    rest[(whole[:, None] + torch.arange(block_size)).flatten()] = False
    _write_slots(key, value, new_key[rows[rest]], new_value[rows[rest]], slots[rest])


def _write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write token i to ``slots[i]`` by indexed assignment; modifies ``key`` and ``value``."""
    blocks, offsets = slots // value.shape[3], slots % value.shape[3]
    chunked = new_key.unflatten(2, (key.shape[2], key.shape[4]))
    key.permute(0, 3, 1, 2, 4)[blocks, offsets] = chunked
    value.permute(0, 3, 1, 2)[blocks, offsets] = new_value


def _whole_blocks(rows: torch.Tensor, slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the indices into ``slots`` at which a run of tokens begins that fills a whole block."""
    begins = torch.nonzero(slots % block_size == 0).flatten()
    ends = begins + block_size - 1
    begins, ends = begins[ends < len(slots)], ends[ends < len(slots)]
    follows = (slots.diff() == 1) & (rows.diff() == 1)
    followed = torch.cat([torch.zeros(1, dtype=torch.int64), follows.cumsum(0)])
    return begins[followed[ends] - followed[begins] == block_size - 1]


def _runs(
    first_rows: torch.Tensor, blocks: torch.Tensor, block_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, blocks) for at most _BLOCKS_AT_A_TIME blocks with consecutive rows."""
    breaks = torch.nonzero(first_rows.diff() != block_size).flatten() + 1
    for run_rows, run_blocks in zip(
        first_rows.tensor_split(breaks), blocks.tensor_split(breaks), strict=True
    ):
        for some_rows, some in zip(
            run_rows.split(_BLOCKS_AT_A_TIME), run_blocks.split(_BLOCKS_AT_A_TIME), strict=True
        ):
            if len(some):
                yield int(some_rows[0]), some


def _widened(tensor: torch.Tensor, most_bytes: int = 16) -> torch.Tensor:
    """Return a view with wider elements, each of several elements of ``tensor``'s last dimension."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    for size, dtype in _CARRIERS.items():
        if size <= most_bytes and row_bytes % size == 0:
            return tensor.view(dtype)
    raise AssertionError("unreachable: a row is a multiple of one byte")


def _write_key_blocks(key: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens`` [n, block_size, num_kv_heads, head_size] to ``blocks`` of ``key``, modifying it."""
    chunk = key.shape[4]
    wide = _widened(
        tokens.unflatten(3, (-1, chunk))
    )  # [n, block_size, heads, chunks, chunk / wide]
    _widened(key)[blocks] = wide.permute(0, 2, 3, 1, 4)


def _write_value_blocks(value: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write ``tokens`` [n, block_size, num_kv_heads, head_size] to ``blocks`` of ``value``, modifying it."""
    block_size = tokens.shape[1]
    # [n, heads, wide elements, block_size]; contiguous() would not change the stride of a size-1 dimension
    wide = _widened(tokens).permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    narrow = wide.view(tokens.dtype).unflatten(3, (block_size, -1))
    # [n, heads, wide elements, elements per wide element, block_size]
    transposed = narrow.transpose(3, 4).contiguous()
    _widened(value.flatten(1))[blocks] = _widened(transposed.flatten(1))
