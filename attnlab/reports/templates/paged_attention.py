"""Paged attention in Triton: the kernel that ``attnlab demo`` breaks and diagnoses."""

import torch
import triton
import triton.language as tl

ROWS, KEYS = 16, 32  # of a tile


@triton.jit
def attention_kernel(
    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, output,
    sm_scale, num_queries_per_kv, table_stride,
    query_row, query_head, cache_block, cache_slot, cache_head, output_row, output_head,  # strides
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of query rows; one program for each tile, head and sequence."""
    tile, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first
    if tile * ROWS >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    token, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD)
    position = seq_len - query_len + token
    kv_head = head // num_queries_per_kv
    row, is_row = (first + token)[:, None], (token < query_len)[:, None]
    q = tl.load(query + row * query_row + head * query_head + d[None, :], mask=is_row, other=0.0)
    largest = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, HEAD], dtype=tl.float32)
    for start in range(0, seq_len, KEYS):
        key_pos = start + tl.arange(0, KEYS)
        is_key = key_pos < seq_len
        block = tl.load(block_table + seq * table_stride + key_pos // BLOCK, mask=is_key, other=0)
        slot = block.to(tl.int64) * cache_block + key_pos % BLOCK * cache_slot
        place = (slot + kv_head * cache_head)[:, None] + d[None, :]
        k = tl.load(key_cache + place, mask=is_key[:, None], other=0.0)
        v = tl.load(value_cache + place, mask=is_key[:, None], other=0.0)
        seen = key_pos[None, :] <= position[:, None]
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * sm_scale, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        rescale = tl.exp(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new_largest
    place = output + row * output_row + head * output_head + d[None, :]
    tl.store(place, mixed / total[:, None], mask=is_row)


def paged_attention(
    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, sm_scale
):
    """Return causal attention of all new tokens, [num_tokens, num_heads, head_size].

    query: as the output; caches: [num_blocks, block_size, num_kv_heads, head_size].
    """
    output = torch.empty_like(query)
    tiles = triton.cdiv(int(query_start_loc.diff().max()), ROWS)
    attention_kernel[(tiles, query.shape[1], len(seq_lens))](
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, output,
        sm_scale, query.shape[1] // key_cache.shape[2], block_table.stride(0),
        *query.stride()[:2], *key_cache.stride()[:3], *output.stride()[:2],
        BLOCK=key_cache.shape[1], ROWS=ROWS, KEYS=KEYS, HEAD=query.shape[2],
    )  # fmt: skip
    return output


paged_attention.kv_cache_dtypes = ("auto",)  # it does not decode FP8
