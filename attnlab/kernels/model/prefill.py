"""Models of the Triton ops that process a sequence's rows in tiles, vLLM 0.11.2 and 0.33.0.

- context_attention_fwd (prefix_prefill.py) reads new tokens from its arguments.
- context_attention_fwd of triton_prefill_attention.py has no cache and no context.
- unified_attention (triton_unified_attention.py) and decode_attention_fwd (triton_decode_attention.py) read
  them from the cache. They may split a sequence and merge the parts in float32. This changes only the
  largest score to which a weight is relative when it is rounded, so the models do not split.
"""

import torch

from attnlab.case.errors import KernelRejected
from attnlab.case.ops import DECODE_FWD, ENCODER, PREFILL, UNIFIED
from attnlab.contracts.contract import PREFILL_TILE
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import as_read, cached_lens, grid_rows, served
from attnlab.contracts.target import Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.tensors.call import KernelCall
from attnlab.tensors.visibility import SequenceMask

_SCORES = 1 << 19  # scores of a tile: 2 MiB of float32 stay in the processor's cache


def context_attention_fwd(call: KernelCall, target: Target) -> None:
    """Write the rows of every sequence that the prefill kernel serves to ``call.output``.

    Context tokens come from the cache, new tokens from ``call.key`` and ``call.value``; no slot after
    ctx_len is read. The grid covers max_query_len rows, rounded up to tiles; later rows are not written.
    Raises KernelRejected for sinks with ALiBi, as the op's assertion does.
    """
    if call.sinks is not None and call.alibi_slopes is not None:
        raise KernelRejected("Sinks arg is not supported with alibi")
    _attend(PREFILL, call, target, grid_rows(contract(PREFILL, target, call.op), call))


def encoder_attention(call: KernelCall, target: Target) -> None:
    """Write the rows of every sequence to ``call.output``, as triton_prefill_attention does.

    Keys and values are ``call.key`` and ``call.value``. The grid covers max_query_len rows, in tiles.
    """
    _attend(ENCODER, call, target, grid_rows(contract(ENCODER, target, call.op), call))


def unified_attention(call: KernelCall, target: Target) -> None:
    """Write every row of every sequence to ``call.output``; no slot after seq_len is read."""
    _attend(UNIFIED, call, target, call.query.shape[0])


def decode_attention_fwd(call: KernelCall, target: Target) -> None:
    """Write the one row of every sequence to ``call.output``; no slot after seq_len is read."""
    _attend(DECODE_FWD, call, target, call.query.shape[0])


def _attend(name: str, call: KernelCall, target: Target, grid: int) -> None:
    """Write the rows of every sequence that a kernel serves, at most ``grid`` rows of each.

    Scores and sums are float32. Weights are rounded to the dtype of the values, the output to that of the
    query.
    """
    terms = contract(name, target, call.op)
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    cached = cached_lens(terms, call).tolist()
    for seq in torch.nonzero(served(terms, call)).flatten().tolist():
        start, stop = starts[seq], starts[seq + 1]
        _sequence(call, target, seq, start, stop, seq_lens[seq], cached[seq], grid)


def _sequence(
    call: KernelCall,
    target: Target,
    seq: int,
    start: int,
    stop: int,
    seq_len: int,
    cached: int,
    grid: int,
) -> None:
    """Write one sequence's rows, some KV heads at a time; ``cached`` tokens come from the cache."""
    ctx_len = seq_len - (stop - start)
    num_kv_heads, group = call.key.shape[1], call.num_queries_per_kv
    blocks = call.block_table[seq, : -(-cached // call.block_size)].long()
    mask = call.visibility.of_seq(seq, ctx_len, seq_len)
    rows_at_once = max(1, 2 * PREFILL_TILE // group)
    heads_at_once = max(1, _SCORES // (group * min(rows_at_once, stop - start) * seq_len))
    for first in range(0, num_kv_heads, heads_at_once):
        kv = slice(first, first + heads_at_once)
        heads = slice(first * group, (first + heads_at_once) * group)
        key, value = _keys_and_values(
            call, target, blocks, kv, cached, stop - (seq_len - cached), stop
        )
        query = call.query[start:stop, heads].unflatten(1, (-1, group)).permute(1, 2, 0, 3).float()
        for row in range(0, min(stop - start, grid), rows_at_once):
            last = min(row + rows_at_once, stop - start, grid)
            out = _tile(call, target, query[:, :, row:last], key, value, mask, row, heads)
            call.buffer[start + row : start + last, heads] = (
                out.permute(2, 0, 1, 3).flatten(1, 2).to(call.buffer.dtype)
            )


def _keys_and_values(
    call: KernelCall,
    target: Target,
    blocks: torch.Tensor,
    kv: slice,
    cached: int,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of some KV heads, each [heads, seq_len, head_size] float32.

    The first ``cached`` tokens come from the cache, the others from rows ``start`` to ``stop`` of the
    arguments.
    """
    format, dtype = paged.format_of(call, target), call.query.dtype
    cached_key = paged.keys(call.key_cache, blocks, kv)[:, :cached]
    cached_value = paged.values(call, blocks, kv)[:, :cached]
    key = paged.dequantised(cached_key, format, call.number("k_scale"), dtype)
    value = paged.dequantised(cached_value, format, call.number("v_scale"), dtype)
    new_key, new_value = (
        tensor[start:stop, kv].transpose(0, 1) for tensor in (call.key, call.value)
    )
    return torch.cat([key, new_key.float()], 1), torch.cat([value, new_value.float()], 1)


def _tile(
    call: KernelCall,
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    row: int,
    heads: slice,
) -> torch.Tensor:
    """Return attention of the new tokens ``row``, row + 1, … of a sequence.

    ``query`` and the result: [kv_heads, num_queries_per_kv, rows, head_size].
    """
    rows = query.shape[2]
    terms, position = contract(call.op, target, call.op), mask.ctx_len + row
    span = mask.span(position, position + rows - 1)
    begin, end = span.start, span.stop
    scores = query.flatten(1, 2) @ key[:, begin:end].transpose(1, 2)
    scores = scores.mul_(paged.scale_of(call, target)).view(*query.shape[:3], end - begin)
    scores = paged.capped(scores, call.softcap, terms.softcap == "overflows")
    at = torch.arange(position, position + rows)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[heads].view(*query.shape[:2], 1, 1)
        origin = at[:, None] if terms.alibi_from == "query" else mask.ctx_len
        scores += slopes * (torch.arange(begin, end) - origin).float()
    scores = _masked(scores, mask, at, begin, end)
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks[heads].float().view(*query.shape[:2], 1, 1)
    weights, sums = paged.weighed(scores, sinks)
    weights = paged.rounded(weights, call.value.dtype).flatten(1, 2)
    return (weights @ value[:, begin:end]).view(query.shape) / sums


def _masked(
    scores: torch.Tensor, mask: SequenceMask, at: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Add a bias to scores [..., rows, keys] and set those of hidden keys to -inf; changes ``scores``.

    ``at``: [rows], positions of the rows; ``begin``, ``end``: positions of the keys.
    """
    if mask.is_plain and not mask.rules.sliding_window:  # only the last keys are hidden
        rows = len(at)
        scores[..., -rows:].masked_fill_(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        return scores
    bias = mask.bias(at, begin, end)
    if bias is not None:
        scores += bias
    return scores.masked_fill_(~mask.visible(at, begin, end), float("-inf"))
