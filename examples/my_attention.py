"""A user's kernel in torch. It is a backend of every command:

    attnlab run --backend examples/my_attention.py:my_attention
    attnlab diagnose --backend examples/my_attention.py:my_attention
    attnlab check examples/my_attention.py:my_attention

It is correct. Drop the newest token (``[:seq_len - 1]``) or the scale, and run the commands again.
"""

import torch

from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall


def my_attention(call: KernelCall) -> None:
    """Write causal attention of every sequence to ``call.output``; every key comes from the cache.

    ``call`` is an :class:`attnlab.tensors.call.KernelCall`, which documents the shapes.
    """
    key_cache, value_cache = to_flash(call.key_cache, call.value_cache)
    starts, group = call.query_start_loc.tolist(), call.num_queries_per_kv
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        blocks = call.block_table[seq].long()
        key, value = (
            cache[blocks]
            .flatten(0, 1)[:seq_len]
            .float()
            .repeat_interleave(group, 1)
            .transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        rows = slice(starts[seq], starts[seq + 1])
        query = call.query[rows].float().transpose(0, 1)  # [heads, rows, head_size]
        scale = call.sm_scale or call.query.shape[2] ** -0.5
        at = torch.arange(seq_len - query.shape[1], seq_len)[:, None]
        away = torch.arange(seq_len) - at
        scores = query @ key.transpose(1, 2) * scale
        if call.softcap is not None:
            scores = call.softcap * (scores / call.softcap).tanh()
        if call.alibi_slopes is not None:
            scores += call.alibi_slopes[:, None, None] * away
        hidden = away > 0
        if call.sliding_window:
            hidden |= away <= -call.sliding_window
        value[:, hidden.all(0)] = 0.0  # these blocks may be freed, and 0 × NaN is NaN
        scores = scores.masked_fill(hidden, -torch.inf)
        if call.sinks is not None:  # one more logit per row, without a value
            sinks = call.sinks[:, None, None].expand_as(scores[..., :1])
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : key.shape[1]]
        call.output[rows] = (weights @ value).transpose(0, 1).to(call.output.dtype)


my_attention.op = "unified_attention"  # the op that it stands for: its callers keep this contract
my_attention.kv_cache_dtypes = ("auto",)  # it does not decode FP8
