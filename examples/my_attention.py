"""A kernel of one's own, to be checked: attnlab check examples/my_attention.py:my_attention

It is right. Let it forget the newest token (``[:seq_len - 1]``), or leave out the scale, and run it again.
"""

import torch

from attnlab.cache import to_flash
from attnlab.call import KernelCall


def my_attention(call: KernelCall) -> None:
    """Write causal attention of every sequence to ``call.output``; every key comes from the cache."""
    key_cache, value_cache = to_flash(call.key_cache, call.value_cache)
    starts, group = call.query_start_loc.tolist(), call.num_queries_per_kv
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        at = torch.arange(seq_len - (rows.stop - rows.start), seq_len)[:, None]
        window = call.sliding_window or seq_len
        first = max(0, int(at[0]) + 1 - window)  # what no row may see is not even multiplied by 0
        blocks = call.block_table[seq].long()
        key, value = (
            cache[blocks]
            .flatten(0, 1)[:seq_len][first:]
            .float()
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        query = call.query[rows].float().transpose(0, 1)  # [heads, rows, head_size]
        scale = call.sm_scale or call.query.shape[2] ** -0.5
        away = torch.arange(first, seq_len) - at
        scores = query @ key.transpose(1, 2) * scale
        if call.alibi_slopes is not None:
            scores += call.alibi_slopes[:, None, None] * away
        hidden = (away > 0) | (away <= -window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        call.output[rows] = (weights @ value).transpose(0, 1).to(call.output.dtype)


my_attention.op = "unified_attention"  # whose place it takes: what its caller promises
my_attention.kv_cache_dtypes = ("auto",)  # it decodes no FP8
