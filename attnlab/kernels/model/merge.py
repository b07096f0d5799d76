"""Model of merge_attn_states (triton_merge_attn_states.py, vLLM 0.11.2 and 0.33.0), and its two inputs.

The op merges attention over the context (prefix) and over the new tokens (suffix), as in vLLM's chunked
prefill of MLA and in cascade attention. This module computes each part in float32 and rounds it to the
query's dtype.
"""

from dataclasses import dataclass

import torch

from attnlab.contracts.target import Target
from attnlab.kernels.model import cache_reads as paged
from attnlab.tensors.call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partials:
    """Attention over two parts of the keys.

    - ``prefix_output``, ``suffix_output``: [num_tokens, num_heads, head_size], in the query's dtype;
      0 if a row sees no key of the part.
    - ``prefix_lse``, ``suffix_lse``: [num_heads, num_tokens] float32, the log-sum-exp of the scores; -inf
      if a row sees no key of the part.
    """

    prefix_output: torch.Tensor
    prefix_lse: torch.Tensor
    suffix_output: torch.Tensor
    suffix_lse: torch.Tensor


def partials(call: KernelCall, target: Target) -> Partials:
    """Return the two parts of a call, on its device."""
    tokens, heads, _ = call.query.shape
    outputs = [torch.zeros_like(call.query) for _ in range(2)]
    sums = [
        call.query.new_full((heads, tokens), float("-inf"), dtype=torch.float32) for _ in range(2)
    ]
    starts, seq_lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        ctx_len = seq_len - (rows.stop - rows.start)
        context = _context(call, target, seq, ctx_len)
        new_tokens = tuple(t[rows].transpose(0, 1).float() for t in (call.key, call.value))
        for output, lse, (key, value), first in zip(
            outputs, sums, (context, new_tokens), (0, ctx_len), strict=True
        ):
            output[rows], lse[:, rows] = _attend(call, target, rows, key, value, first, ctx_len)
    return Partials(
        prefix_output=outputs[0],
        prefix_lse=sums[0],
        suffix_output=outputs[1],
        suffix_lse=sums[1],
    )


def merge_attn_states(call: KernelCall, target: Target) -> None:
    """Merge the two parts of the call into ``call.output``."""
    parts = partials(call, target)
    lse = torch.stack([parts.prefix_lse, parts.suffix_lse])
    weights = (lse - lse.amax(0)).exp()
    weights = (weights / weights.sum(0)).permute(0, 2, 1)[..., None]
    merged = weights[0] * parts.prefix_output.float() + weights[1] * parts.suffix_output.float()
    call.buffer.copy_(merged)


def _context(
    call: KernelCall, target: Target, seq: int, ctx_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value of a sequence's context, each [num_kv_heads, ctx_len, head_size] float32."""
    format, dtype = paged.format_of(call, target), call.query.dtype
    blocks = call.block_table[seq, : -(-ctx_len // call.block_size)].long()
    key = paged.keys(call.key_cache, blocks, slice(None))[:, :ctx_len]
    value = paged.values(call, blocks, slice(None))[:, :ctx_len]
    return (
        paged.dequantised(key, format, call.number("k_scale"), dtype),
        paged.dequantised(value, format, call.number("v_scale"), dtype),
    )


def _attend(
    call: KernelCall,
    target: Target,
    rows: slice,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    ctx_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [rows, num_heads, head_size] and the LSE [num_heads, rows] over some keys.

    The first key is at position ``first``, the first row at position ``ctx_len``.
    """
    group = call.num_queries_per_kv
    query = call.query[rows].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    scores = query @ key[:, None].transpose(2, 3) * paged.scale_of(call, target)
    at = torch.arange(first, first + key.shape[1], device=key.device)
    away = at - torch.arange(ctx_len, ctx_len + query.shape[2], device=key.device)[:, None]
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes.view(-1, group, 1, 1) * away.float()
    hidden = away > 0
    if call.sliding_window:
        hidden |= away <= -call.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (
        (scores - lse[..., None]).exp().nan_to_num(0.0)
    )  # -inf minus -inf: the row sees no key
    mixed = (weights @ value[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return mixed.to(call.query.dtype), lse.flatten(0, 1)
