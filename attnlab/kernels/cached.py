"""Models of the Triton ops that take every key and value from the cache: unified_attention
(triton_unified_attention.py) and decode_attention_fwd (triton_decode_attention.py), 0.11.2 and 0.33.0.

Both may cut a sequence into pieces and merge them in float32. That changes which largest score a weight
is relative to when it is rounded, and nothing else, so the models keep a sequence whole.
"""

import torch

from attnlab.call import KernelCall
from attnlab.contracts import as_read, contract, served
from attnlab.dispatch import DECODE_FWD, UNIFIED, Setting
from attnlab.kernels import paged

_SCORES = 1 << 22  # scores at a time, 16 MiB of float32


def unified_attention(call: KernelCall, setting: Setting) -> None:
    """Write every row of every sequence to ``call.output``; no slot behind seq_len is read."""
    _attend(UNIFIED, call, setting)


def decode_attention_fwd(call: KernelCall, setting: Setting) -> None:
    """Write the one row of every sequence to ``call.output``; no slot behind seq_len is read."""
    _attend(DECODE_FWD, call, setting)


def _attend(name: str, call: KernelCall, setting: Setting) -> None:
    terms = contract(name, setting, call.op)
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    format, dtype = paged.format_of(call, setting), call.query.dtype
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        blocks = call.block_table[seq, : -(-seq_lens[seq] // call.block_size)].long()
        rows_at_once = max(1, _SCORES // (call.num_queries_per_kv * seq_lens[seq]))
        for head in range(call.key.shape[1]):
            kv = slice(head, head + 1)
            key = paged.keys(call.key_cache, blocks, kv)[0, : seq_lens[seq]]
            value = paged.values(call, blocks, kv)[0, : seq_lens[seq]]
            key = paged.dequantised(key, format, call.k_scale, dtype)
            value = paged.dequantised(value, format, call.v_scale, dtype)
            for row in range(starts[seq], starts[seq + 1], rows_at_once):
                rows = slice(row, min(row + rows_at_once, starts[seq + 1]))
                position = seq_lens[seq] - starts[seq + 1] + row
                _rows(call, setting, rows, head, key, value, position)


def _rows(
    call: KernelCall,
    setting: Setting,
    rows: slice,
    head: int,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
) -> None:
    """Write some rows of one KV head's query heads; the first stands at ``position``.

    ``key``, ``value``: [seq_len, head_size] float32.
    """
    group = call.num_queries_per_kv
    heads = slice(head * group, (head + 1) * group)
    query = call.query[rows, heads].float().transpose(0, 1)
    end = position + query.shape[1]
    scores = query @ key[:end].T * paged.scale_of(call, setting)
    away = torch.arange(end) - torch.arange(position, end)[:, None]  # key minus query
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes[heads, None, None] * away.float()
    hidden = away > 0
    if call.sliding_window:
        hidden |= away <= -call.sliding_window
    scores.masked_fill_(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    sums = weights.sum(-1, keepdim=True)
    # A slot outside a row's window or behind its position has a weight of 0 and is read all the same.
    mixed = paged.rounded(weights, call.query.dtype) @ value[:end] / sums
    call.output[rows, heads] = mixed.transpose(0, 1).to(call.output.dtype)
