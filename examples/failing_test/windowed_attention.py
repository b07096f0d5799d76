"""Paged attention with a sliding window, in Triton. It has a fault, which the test next to it finds.

Each program computes one query row of one head. Keys and values come from a paged cache.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def window_kernel(
    query, key_cache, value_cache, block_table, position, seq, output, scale, window, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d, slot = tl.arange(0, DIM), tl.arange(0, BLOCK)
    at = tl.load(position + row)
    q = tl.load(query + (row * HEADS + head) * DIM + d).to(tl.float32)
    largest, total = -float("inf"), 0.0
    mixed = tl.zeros([DIM], dtype=tl.float32)
    for first in range(0, at + 1, BLOCK):
        block = tl.load(block_table + tl.load(seq + row) * table_stride + first // BLOCK)
        place = ((block * BLOCK + slot)[:, None] * KV_HEADS + head // (HEADS // KV_HEADS)) * DIM
        visible = (first + slot <= at) & (first + slot >= at - window)
        k = tl.load(key_cache + place + d[None, :], mask=visible[:, None], other=0.0)
        v = tl.load(value_cache + place + d[None, :], mask=visible[:, None], other=0.0)
        scores = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
        scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(tl.maximum(largest, tl.max(scores, 0)), -1e30)
        weights, keep = tl.exp(scores - new), tl.exp(largest - new)
        total = total * keep + tl.sum(weights, 0)
        mixed = mixed * keep + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        largest = new
    tl.store(output + (row * HEADS + head) * DIM + d, mixed / total)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    output: torch.Tensor,
    sliding_window: int,
) -> None:
    """Write causal attention to ``output``: each row sees ``sliding_window`` keys, its own included.

    - ``query``, ``output``: [num_tokens, num_heads, head_size].
    - ``key_cache``, ``value_cache``: [num_blocks, block_size, num_kv_heads, head_size], contiguous.
    - ``block_table``: [num_seqs, blocks]; ``seq_lens``: [num_seqs]; ``query_start_loc``: [num_seqs + 1].
    """
    tokens, heads, head_size = query.shape
    query_lens = query_start_loc.diff()
    seq = torch.repeat_interleave(torch.arange(len(seq_lens)), query_lens)
    position = seq_lens[seq] - query_start_loc[seq + 1] + torch.arange(tokens)
    window_kernel[(tokens, heads)](
        query, key_cache, value_cache, block_table, position, seq, output,
        head_size**-0.5, sliding_window, block_table.stride(0),
        HEADS=heads, KV_HEADS=key_cache.shape[2], BLOCK=key_cache.shape[1], DIM=head_size,
    )  # fmt: skip
