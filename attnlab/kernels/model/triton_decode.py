"""Model of Triton's paged decode, kernel_paged_attention_2d (chunked_prefill_paged_decode.py, vLLM 0.11.2 and
0.33.0)."""

import torch

from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import as_read, served
from attnlab.contracts.target import TRITON_DECODE, Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.tensors.call import KernelCall


def kernel_paged_attention_2d(call: KernelCall, target: Target) -> None:
    """Write the row of every sequence whose query_len is 1 to ``call.output``.

    Every key, the new token's included, comes from the cache. The kernel reads whole blocks: in 0.11.2 the
    slots after seq_len have a score of -inf + q·k and a weight of 0, so NaN there makes the row NaN;
    0.33.0 masks them. Outside a sliding window the score is -10000, not -inf.
    """
    terms = contract(TRITON_DECODE, target, call.op)
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        row = _row(call, target, seq, starts[seq], seq_lens[seq], terms.reads_tail != "nothing")
        call.buffer[starts[seq]] = row.to(call.buffer.dtype)


def _row(
    call: KernelCall, target: Target, seq: int, row: int, seq_len: int, reads_tail: bool
) -> torch.Tensor:
    """Return one row, [num_heads, head_size] float32."""
    format, dtype = paged.format_of(call, target), call.query.dtype
    blocks = call.block_table[seq, : -(-seq_len // call.block_size)].long()
    every = slice(None)
    key = paged.dequantised(
        paged.keys(call.key_cache, blocks, every), format, call.number("k_scale"), dtype
    )
    value = paged.dequantised(
        paged.values(call, blocks, every), format, call.number("v_scale"), dtype
    )
    positions = torch.arange(key.shape[1])
    if not reads_tail:
        key, value = (t.masked_fill((positions >= seq_len)[:, None], 0.0) for t in (key, value))
    query = call.query[row].float().unflatten(0, (-1, call.num_queries_per_kv))
    scores = query @ key.transpose(1, 2) * paged.scale_of(call, target)
    tail = torch.where(positions < seq_len, 0.0, float("-inf"))
    scores = scores + tail if reads_tail else scores.masked_fill(positions >= seq_len, -torch.inf)
    away = positions - (seq_len - 1)
    if call.sliding_window:
        scores = torch.where(-away < call.sliding_window, scores, -10000.0)
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes.view(*scores.shape[:2], 1) * away.float()
    sinks = None if call.sinks is None else call.sinks.float().view(*scores.shape[:2], 1)
    weights, sums = paged.weighed(scores, sinks)
    mixed: torch.Tensor = paged.rounded(weights, dtype) @ value / sums
    return mixed.flatten(0, 1)
