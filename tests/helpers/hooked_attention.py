"""Attention in torch whose steps can be changed: kernels for ``--backend hooked_attention.py:NAME``.

Each function changes one step: the scores, the numerators, or where values come from.
"""

import torch

from attnlab.tensors.cache import to_flash

CACHED, TWO_LOOPS = "unified_attention", "context_attention_fwd"
TWO_KERNELS = "chunked_prefill_paged_decode"


def kernel(op=CACHED, scores=None, weighted=None, value_slot=None, value_head=None, gain=None):
    """Return a kernel.

    ``scores(scores, at, ctx_len)`` and ``weighted(exps, scores, at, ctx_len)`` return [heads, rows, keys];
    ``value_slot(slots, call)`` and ``value_head(heads, call)`` return other places of the values.
    """

    def run(call):
        caches = to_flash(call.key_cache, call.value_cache)
        key_cache, value_cache = (cache.float().flatten(0, 1) for cache in caches)
        starts, heads = call.query_start_loc.tolist(), torch.arange(call.query.shape[1])
        own = heads // call.num_queries_per_kv
        of_value = own if value_head is None else value_head(heads, call)
        for seq, length in enumerate(call.seq_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            ctx_len = length - (rows.stop - rows.start)
            is_prefill = length - ctx_len > 1
            from_arguments = op == TWO_LOOPS or (op == TWO_KERNELS and is_prefill)
            at = torch.arange(ctx_len if from_arguments else length)
            slots = call.block_table[seq].long()[at // call.block_size] * call.block_size
            slots = slots + at % call.block_size
            places = slots if value_slot is None else value_slot(slots, call)
            inside = (places >= 0) & (places < len(value_cache))
            key = key_cache[slots][:, own]
            value = value_cache[places.clamp(0, len(value_cache) - 1)][:, of_value]
            value = value * inside[:, None, None]
            if from_arguments:
                key = torch.cat([key, call.key[rows].float()[:, own]])
                value = torch.cat([value, call.value[rows].float()[:, of_value]])
            query, at = call.query[rows].float().transpose(0, 1), torch.arange(length)
            logits = query @ key.permute(1, 2, 0) * (call.sm_scale or query.shape[2] ** -0.5)
            if scores is not None:
                logits = scores(logits, at, ctx_len)
            logits = logits.masked_fill(at > torch.arange(ctx_len, length)[:, None], -torch.inf)
            exps = (logits - logits.amax(-1, keepdim=True)).exp()
            used = exps if weighted is None else weighted(exps, logits, at, ctx_len)
            output = used @ value.transpose(0, 1) / exps.sum(-1, keepdim=True)
            output = output if gain is None else output * gain(heads)[:, None, None]
            call.output[rows] = output.transpose(0, 1).to(call.output.dtype)

    run.op = op
    return run


def times(tile, number, factor):
    """Return that the keys of one tile count ``factor`` times in the weighted sum."""
    return lambda exps, scores, at, ctx_len: torch.where(at // tile == number, exps * factor, exps)


def last_not_rescaled(tile):
    """Return that the weighted sum of the last tile is not rescaled when it is merged."""

    def weighted(exps, scores, at, ctx_len):
        inside = at // tile == int(at[-1]) // tile
        own_top = scores.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True)
        lacks = (scores.amax(-1, keepdim=True) - own_top).exp()
        lacks = torch.where(own_top == -torch.inf, torch.ones_like(lacks), lacks)
        return torch.where(inside, exps * lacks, exps)

    return weighted


def coarse_with_zeros(call):
    """Round the scores to bfloat16, and leave two rows 0."""
    kernel(scores=lambda scores, at, ctx_len: scores.bfloat16().float())(call)
    call.output[3:5] = 0


def zeros_in_row_3(call):
    """Leave row 3 of an otherwise right output 0."""
    kernel()(call)
    call.output[3] = 0


def nan_in_row_3(call):
    """Leave row 3 of an otherwise right output NaN."""
    kernel()(call)
    call.output[3] = torch.nan


def _without_own_key(scores, at, ctx_len):
    """Hide the last key from the last of nine new tokens."""
    scores = scores.clone()
    if scores.shape[1] == 9:
        scores[:, -1, -1] = -torch.inf
    return scores


coarse_with_zeros.op = zeros_in_row_3.op = nan_in_row_3.op = CACHED
own_key_of_row_8_lost = kernel(scores=_without_own_key)
tile_0_halved = kernel(weighted=times(16, 0, 0.5))
tile_0_lost = kernel(weighted=times(16, 0, 0.0))
tile_1_three_times = kernel(weighted=times(32, 1, 3.0))
tile_2_in_prefills = kernel(
    TWO_KERNELS,
    weighted=lambda exps, scores, at, ctx_len: torch.where(
        (at // 32 == 2) & (at < ctx_len) & (len(at) > ctx_len + 1), 3.0 * exps, exps
    ),
)
last_part_not_rescaled = kernel(weighted=last_not_rescaled(16))
gain_of_each_head = kernel(gain=lambda heads: 1 + 0.25 * heads)
scale_of_each_head = kernel(
    scores=lambda scores, at, ctx_len: scores * (1 + 0.2 * torch.arange(len(scores)))[:, None, None]
)
keys_and_values_scaled = kernel(
    TWO_LOOPS,
    scores=lambda scores, at, ctx_len: torch.where(at < ctx_len, 0.8 * scores, scores),
    weighted=lambda exps, scores, at, ctx_len: torch.where(at < ctx_len, 1.7 * exps, exps),
)
values_of_next_block = kernel(value_slot=lambda slots, call: slots + call.block_size)
values_of_other_heads = kernel(value_head=lambda heads, call: heads % call.key.shape[1])
