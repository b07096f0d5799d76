"""A user's Triton kernel. It is a backend of every command:

    attnlab run --backend examples/my_triton_attention.py:my_attention --trace-reads
    attnlab check examples/my_triton_attention.py:my_attention

Without a GPU it runs under Triton's interpreter. Each program computes one query row of one head.
"""

import torch
import triton
import triton.language as tl

from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall


@triton.jit
def row_kernel(
    query, key, value, sinks, table, last, seq, out, scale, GROUP, table_stride,
    query_row, query_head, query_dim, out_row, out_head, out_dim,  # strides
    KV: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d, slot = tl.arange(0, PAD), tl.arange(0, TILE)  # powers of two; the rest is masked
    end = tl.load(last + row)  # the row's position
    place = query + row * query_row + head * query_head + d * query_dim
    q = tl.load(place, mask=d < DIM, other=0.0).to(tl.float32)
    largest, total = -float("inf"), 0.0
    if SINKS:  # a logit that is part of the sum and has no value
        largest, total = tl.load(sinks + head).to(tl.float32), 1.0
    mixed = tl.zeros([PAD], dtype=tl.float32)
    for first in range(0, end + 1, BLOCK):
        pos = first + slot
        block = tl.load(table + tl.load(seq + row) * table_stride + first // BLOCK).to(tl.int64)
        at = ((block * BLOCK + slot)[:, None] * KV + head // GROUP) * DIM + d[None, :]
        seen = pos <= end
        seen &= slot < BLOCK
        if WINDOW:
            seen &= pos > end - WINDOW
        both = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(key + at, mask=both, other=0.0).to(tl.float32)
        v = tl.load(value + at, mask=both, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k * q[None, :], 1) * scale, -float("inf"))
        new = tl.maximum(tl.maximum(largest, tl.max(scores, 0)), -1e30)
        weights, keep = tl.exp(scores - new), tl.exp(largest - new)
        total = total * keep + tl.sum(weights, 0)
        mixed = mixed * keep + tl.sum(weights[:, None] * v, 0)
        largest = new
    place = out + row * out_row + head * out_head + d * out_dim
    tl.store(place, mixed / total, mask=d < DIM)


def my_attention(call: KernelCall) -> None:
    """Write every row of every sequence to ``call.output``; every key comes from the cache."""
    if call.alibi_slopes is not None or call.softcap is not None:
        raise NotImplementedError("ALiBi and soft caps are not implemented")
    key, value = to_flash(call.key_cache, call.value_cache)
    rows, heads, dim = call.query.shape
    seq = torch.repeat_interleave(torch.arange(len(call.query_lens)), call.query_lens)
    back = call.query_start_loc.long()[seq + 1] - torch.arange(rows)
    row_kernel[(rows, heads)](
        call.query, key, value, call.sinks, call.block_table,
        call.seq_lens.long()[seq] - back, seq, call.output,
        call.sm_scale or dim**-0.5, call.num_queries_per_kv, call.block_table.stride(0),
        *call.query.stride(), *call.output.stride(),
        KV=call.key.shape[1], BLOCK=call.block_size, TILE=triton.next_power_of_2(call.block_size),
        DIM=dim, PAD=triton.next_power_of_2(dim), WINDOW=call.sliding_window,
        SINKS=call.sinks is not None,
    )  # fmt: skip


my_attention.op = "unified_attention"
my_attention.kv_cache_dtypes = ("auto",)
