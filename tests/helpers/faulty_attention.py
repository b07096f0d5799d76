"""Tiled attention in torch with faults: each function is a kernel for ``--backend faulty_attention.py:NAME``.

It works as vLLM's prefill kernel does, with running maximum and sum: one loop over the cached keys, one
over the new keys. ``sound`` has no fault. ``cached_*`` read every key from the cache.
"""

import dataclasses
import math
from types import SimpleNamespace

import torch

from attnlab.tensors.cache import to_flash

LOG2E = math.log2(math.e)
DEFAULTS = {
    "tile": 32,  # keys per step
    "mask_extra": 0,  # keys too many in the mask at the end of the cached keys; their loads are masked
    "load_extra": 0,  # keys too many at the end of the cached keys, loaded
    "causal_extra": 0,
    "top_left": False,  # row i sees the keys up to position i, whatever the context is
    "window_extra": 0,
    "window_extra_new": 0,
    "twice": "",  # "last" or "first" tile of the cached keys counts twice
    "full_blocks": False,  # cached keys after the last full block are skipped
    "rescale": 1.0,  # power of the factor of the weighted sum
    "rescale_sum": 1.0,
    "base": LOG2E,  # of the logits, for exp2
    "score_factor": 1.0,
    "unscaled": False,
    "alibi_factor": 1.0,
    "cap_after_mask": False,
    "swap_scales": False,
    "table_row": None,  # function of the sequence
    "divisor": 0,  # positions per block, if not the block size
    "key_head": None,
    "value_head": None,
    "element_shift": 0,
    "gain": 1.0,
    "only_head": None,  # the fault is in this head only
    "key_shift": 0,  # keys are those of the next position
    "weights": torch.float16,
    "sums": torch.float32,
    "scores": torch.float32,
}


def kernel(op="context_attention_fwd", **changes):
    """Return a kernel with changed settings."""
    faulty = SimpleNamespace(**{**DEFAULTS, **changes})
    sound = SimpleNamespace(**{**DEFAULTS, "tile": faulty.tile})

    def run(call):
        if faulty.only_head is None:
            _run(call, faulty, op)
            return
        _run(call, sound, op)
        right = call.output.clone()
        _run(call, faulty, op)
        heads = torch.arange(call.query.shape[1]) == faulty.only_head
        call.output.copy_(torch.where(heads[None, :, None], call.output, right))

    run.op = op
    return run


def _run(call, f, op):
    format = torch.float8_e4m3fn if call.kv_cache_dtype != "auto" else call.key_cache.dtype
    caches = [cache.view(format) for cache in to_flash(call.key_cache, call.value_cache)]
    scales = (call.k_scale, call.v_scale) if call.kv_cache_dtype != "auto" else (1.0, 1.0)
    scales = scales[::-1] if f.swap_scales else scales
    caches = [
        (cache.float() * scale).to(call.query.dtype).float().flatten(0, 1)
        for cache, scale in zip(caches, scales, strict=True)
    ]
    starts, heads = call.query_start_loc.tolist(), call.query.shape[1]
    own = torch.arange(heads) // call.num_queries_per_kv
    key_head = own if f.key_head is None else f.key_head(torch.arange(heads), call)
    value_head = own if f.value_head is None else f.value_head(torch.arange(heads), call)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        cached = seq_len - (query_len if op == "context_attention_fwd" else 0)
        state = _State(call, f, rows, seq_len - query_len)
        size = call.block_size
        row = seq if f.table_row is None else f.table_row(seq, len(call.seq_lens))
        last = cached // size * size if f.full_blocks else cached
        for begin in range(0, last, f.tile):
            at = torch.arange(begin, begin + f.tile)
            loaded = at < cached + f.load_extra
            shown = at < last + max(f.mask_extra, f.load_extra)
            block = at // (f.divisor or size)
            index = row * call.block_table.shape[1] + block
            block = call.block_table.flatten().long()[index.clamp(max=call.block_table.numel() - 1)]
            slot = (block * size + at % size).clamp(0, len(caches[0]) - 1)
            key_slot = (slot + f.key_shift) % len(caches[0])
            key = caches[0][key_slot][:, key_head] * loaded[:, None, None]
            value = caches[1][slot][:, value_head] * loaded[:, None, None]
            extra = f.causal_extra if op != "context_attention_fwd" else 1 << 30
            state.step(key, value, at, shown, extra, f.window_extra)
            if (f.twice == "last" and begin + f.tile >= last) or (f.twice == "first" and not begin):
                state.step(key, value, at, shown, extra, f.window_extra)
        if op == "context_attention_fwd":
            for begin in range(0, query_len, f.tile):
                at = torch.arange(begin, begin + f.tile)
                loaded = at < query_len
                index = (rows.start + at).clamp(max=call.query.shape[0] - 1)
                key = call.key[index][:, key_head].float() * loaded[:, None, None]
                value = call.value[index][:, value_head].float() * loaded[:, None, None]
                window = f.window_extra + f.window_extra_new
                state.step(key, value, seq_len - query_len + at, loaded, f.causal_extra, window)
        output = state.acc / state.sum[..., None] * f.gain
        output = output.roll(f.element_shift, -1)
        call.output[rows] = output.transpose(0, 1).to(call.output.dtype)


class _State:
    def __init__(self, call, f, rows, ctx_len):
        self.call, self.f = call, f
        self.query = call.query[rows].transpose(0, 1).float()
        heads, count, _ = self.query.shape
        self.position = ctx_len + torch.arange(count)
        self.top = torch.full((heads, count), -torch.inf)
        self.sum = torch.zeros(heads, count, dtype=f.sums)
        self.acc = torch.zeros(self.query.shape, dtype=f.sums)

    def step(self, key, value, at, shown, causal_extra, window_extra):
        call, f = self.call, self.f
        scale = 1.0 if f.unscaled else call.sm_scale or self.query.shape[2] ** -0.5
        scores = self.query @ key.permute(1, 2, 0) * scale * f.score_factor
        scores = scores.to(f.scores).float()
        last = torch.arange(len(self.position)) if f.top_left else self.position
        hidden = ~shown | (at > last[:, None] + causal_extra)
        if call.sliding_window:
            hidden = hidden | (at <= self.position[:, None] - call.sliding_window - window_extra)
        if f.cap_after_mask:
            scores = scores.masked_fill(hidden, -torch.inf)
        if call.softcap:
            scores = call.softcap * (scores / call.softcap).tanh()
        if call.alibi_slopes is not None:
            away = (at - self.position[:, None]).float()
            scores = scores + f.alibi_factor * call.alibi_slopes[:, None, None] * away
        if not f.cap_after_mask:
            scores = scores.masked_fill(hidden, -torch.inf)
        scores = scores * f.base
        top = torch.maximum(self.top, scores.amax(-1))
        safe = top.clamp(min=-1e30)
        weights = torch.exp2(scores - safe[..., None])
        rise = torch.where(self.top == -torch.inf, torch.zeros_like(top), self.top - safe)
        self.acc = self.acc * torch.exp2(f.rescale * rise)[..., None].to(f.sums)
        self.sum = self.sum * torch.exp2(f.rescale_sum * rise).to(f.sums)
        self.sum = self.sum + weights.sum(-1).to(f.sums)
        rounded = weights.to(f.weights).float()
        self.acc = self.acc + (rounded @ value.transpose(0, 1)).to(f.sums)
        self.top = top


def _cached(**changes):
    return kernel("unified_attention", **changes)


def _inspecting(dims, least):
    """Return a kernel that divides the values by their maximum over some dimensions, or by ``least``."""

    def run(call):
        largest = call.value_cache.abs().amax(dims, keepdim=True).clamp(min=least)
        value = call.value / largest.flatten()
        cache = call.value_cache / largest
        _run(
            dataclasses.replace(call, value_cache=cache, value=value),
            SimpleNamespace(**DEFAULTS),
            run.op,
        )

    run.op = "context_attention_fwd"
    return run


def overflows(call):
    """Write infinities."""
    call.output.fill_(math.inf)


overflows.op = "context_attention_fwd"
scaled_by_maximum = _inspecting((0, 1, 2, 3), 1.0)
scaled_by_channel = _inspecting((0, 1, 3), 0.0)
sound = kernel()
context_mask_one_too_many = kernel(mask_extra=1)
context_one_too_many = kernel(load_extra=1)
causal_one_too_many = kernel(causal_extra=1)
window_too_wide = kernel(window_extra=1)
window_too_wide_new = kernel(window_extra_new=1)
window_too_narrow = kernel(window_extra=-1)
last_tile_twice = kernel(twice="last")
first_tile_twice = kernel(twice="first")
full_blocks_only = kernel(full_blocks=True)
values_not_rescaled = kernel(rescale=0.0)
sum_not_rescaled = kernel(rescale_sum=0.0)
nothing_rescaled = kernel(rescale=0.0, rescale_sum=0.0)
rescale_base = kernel(rescale=LOG2E, rescale_sum=LOG2E)
exp2_for_exp = kernel(base=1.0)
scales_swapped = kernel(swap_scales=True)
scale_squared = kernel(score_factor=0.125)
scale_missing = kernel(unscaled=True)
next_sequence = kernel(table_row=lambda seq, count: (seq + 1) % count)
page_for_tile = kernel(divisor=8)
alibi_sign = kernel(alibi_factor=-1.0)
cap_after_mask = _cached(cap_after_mask=True)
key_head_remainder = kernel(key_head=lambda head, call: head % call.key.shape[1])
value_head_remainder = kernel(value_head=lambda head, call: head % call.key.shape[1])
elements_rolled = kernel(element_shift=1)
halved = kernel(gain=0.5)
key_head_halved = kernel(key_head=lambda head, call: head // call.num_queries_per_kv // 2)
head_3_halved = kernel(gain=0.5, only_head=3)
cached_sound = _cached()
cached_top_left = _cached(top_left=True)
cached_keys_shifted = _cached(key_shift=1)
bfloat16_sums = kernel(sums=torch.bfloat16)
bfloat16_weights = kernel(weights=torch.bfloat16)
bfloat16_scores = kernel(scores=torch.bfloat16)
tile_16 = kernel(tile=16)
tile_64 = kernel(tile=64)
