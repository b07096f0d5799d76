"""Model of context_attention_fwd (vllm/attention/ops/prefix_prefill.py)."""

import torch

from attnlab.call import KernelCall
from attnlab.contracts import PREFILL_TILE, as_read, contract, served
from attnlab.dispatch import PREFILL, Setting
from attnlab.kernels import paged

_SCORES = 1 << 19  # scores of a tile, 2 MiB of float32: stays in the processor's cache


def context_attention_fwd(call: KernelCall, setting: Setting) -> None:
    """Write the rows of every sequence that the prefill kernel serves to ``call.output``.

    Keys below ctx_len come from the cache, new ones from ``call.key`` and ``call.value``; no slot
    behind ctx_len is read. Scores and sums are float32, the weights are rounded to the dtype of the
    values, the output to that of the query. Rows behind the grid, which covers max_query_len, are not
    written.
    """
    terms = contract(PREFILL, setting, call.op)
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    grid = -(-call.max_query_len // PREFILL_TILE) * PREFILL_TILE
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        _sequence(call, setting, seq, starts[seq], starts[seq + 1], seq_lens[seq], grid)


def _sequence(
    call: KernelCall, setting: Setting, seq: int, start: int, stop: int, seq_len: int, grid: int
) -> None:
    """Write one sequence's rows, some KV heads at a time."""
    ctx_len = seq_len - (stop - start)
    num_kv_heads, group = call.key.shape[1], call.num_queries_per_kv
    blocks = call.block_table[seq, : -(-ctx_len // call.block_size)].long()
    rows_at_once = max(1, 2 * PREFILL_TILE // group)
    heads_at_once = max(1, _SCORES // (group * min(rows_at_once, stop - start) * seq_len))
    for first in range(0, num_kv_heads, heads_at_once):
        kv = slice(first, first + heads_at_once)
        heads = slice(first * group, (first + heads_at_once) * group)
        key, value = _keys_and_values(call, setting, blocks, kv, ctx_len, start, stop)
        query = call.query[start:stop, heads].unflatten(1, (-1, group)).permute(1, 2, 0, 3).float()
        for row in range(0, min(stop - start, grid), rows_at_once):
            last = min(row + rows_at_once, stop - start, grid)
            out = _tile(call, setting, query[:, :, row:last], key, value, ctx_len + row, heads)
            call.output[start + row : start + last, heads] = (
                out.permute(2, 0, 1, 3).flatten(1, 2).to(call.output.dtype)
            )


def _keys_and_values(
    call: KernelCall,
    setting: Setting,
    blocks: torch.Tensor,
    kv: slice,
    ctx_len: int,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return context and new tokens of some KV heads, each [heads, seq_len, head_size] float32."""
    format, dtype = paged.format_of(call, setting), call.query.dtype
    old_key = paged.keys(call.key_cache, blocks, kv)[:, :ctx_len]
    old_value = paged.values(call, blocks, kv)[:, :ctx_len]
    key = paged.dequantised(old_key, format, call.k_scale, dtype)
    value = paged.dequantised(old_value, format, call.v_scale, dtype)
    new_key, new_value = (new[start:stop, kv].transpose(0, 1) for new in (call.key, call.value))
    return torch.cat([key, new_key.float()], 1), torch.cat([value, new_value.float()], 1)


def _tile(
    call: KernelCall,
    setting: Setting,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    heads: slice,
) -> torch.Tensor:
    """Return attention of rows that stand at ``position``, position + 1, …

    ``query``, and the result: [kv heads, group, rows, head_size].
    """
    rows, window = query.shape[2], call.sliding_window
    begin, end = max(0, position - window + 1) if window else 0, position + rows
    scores = query.flatten(1, 2) @ key[:, begin:end].transpose(1, 2)
    scores = scores.mul_(paged.scale_of(call, setting)).view(*query.shape[:3], end - begin)
    away = torch.arange(begin, end) - torch.arange(position, end)[:, None]  # key minus query
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[heads].view(*query.shape[:2], 1, 1)
        scores += slopes * away.float()
    hidden = away > 0
    if window:
        hidden |= away <= -window
        scores.masked_fill_(hidden, float("-inf"))
    else:
        scores[..., -rows:].masked_fill_(hidden[:, -rows:], float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    sums = weights.sum(-1, keepdim=True)
    weights = paged.rounded(weights, call.value.dtype).flatten(1, 2)
    return (weights @ value[:, begin:end]).view(query.shape) / sums
