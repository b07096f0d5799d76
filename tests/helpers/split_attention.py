"""Decode attention in torch that splits each sequence and merges the parts, with faults.

It works as vLLM's ``decode_attention_fwd`` does: each split stores its output and log-sum-exp in scratch
memory full of NaN, and a second loop merges them one after the other.
"""

import torch

from attnlab.tensors.cache import to_flash
from attnlab.tensors.call import KernelCall

SPLITS = 4


def split_attention(
    call: KernelCall,
    *,
    new=torch.exp,
    old=torch.exp,
    tile_pads: int = 0,
    most_pads: int | None = None,
    head_stride: int | None = None,
    log=torch.log,
    is_late: bool = False,
) -> None:
    """Run it on a call whose sequences have one new token each.

    ``new``, ``old``: the exponentials of the part that is added and of those before it. ``tile_pads``: tiles
    of so many slots, whose slots after the last key, at most ``most_pads``, count with score 0 and value 0.
    ``head_stride``: with which the second loop reads the outputs of the parts. ``log``: the logarithm of the
    sum of a part. With ``is_late`` the second loop rescales the output after it adds a part.
    """
    keys, values = (
        cache.flatten(0, 1).float() for cache in to_flash(call.key_cache, call.value_cache)
    )
    seqs, heads, size = call.query.shape
    parts = torch.full((seqs, heads, SPLITS, size + 1), torch.nan)
    own = torch.arange(heads) // call.num_queries_per_kv
    for seq, length in enumerate(call.seq_lens.tolist()):
        at = torch.arange(length)
        slots = call.block_table[seq].long()[at // call.block_size] * call.block_size
        slots = slots + at % call.block_size
        step = -(-length // SPLITS)
        for split, start in enumerate(range(0, length, step)):
            chosen = slots[start : start + step]
            key, value = keys[chosen][:, own], values[chosen][:, own]
            scores = torch.einsum("hd,khd->hk", call.query[seq].float(), key) * call.sm_scale
            pads = -len(chosen) % tile_pads if tile_pads else 0
            pads = pads if most_pads is None else min(pads, most_pads)
            scores = torch.cat([scores, scores.new_zeros(heads, pads)], 1)
            value = torch.cat([value, value.new_zeros(pads, heads, size)])
            weights = scores.softmax(1)
            parts[seq, :, split, :size] = torch.einsum("hk,khd->hd", weights, value)
            top = scores.amax(1, keepdim=True)
            parts[seq, :, split, size] = top[:, 0] + log((scores - top).exp().sum(1))
        call.output[seq] = _merged(parts, seq, -(-length // step), new, old, head_stride, is_late)


def _merged(parts, seq, count, new, old, head_stride, is_late):
    heads, size = parts.shape[1], parts.shape[3] - 1
    strides = list(parts.stride())
    wrong = parts.flatten().as_strided(
        (heads, count, size),
        (head_stride if head_stride is not None else strides[1], strides[2], 1),
        seq * strides[0],
    )
    top, total, output = (
        torch.full((heads,), -torch.inf),
        torch.zeros(heads),
        torch.zeros(heads, size),
    )
    for split in range(count):
        log = parts[seq, :, split, size]
        higher = torch.maximum(top, log)
        added, kept = new(log - higher), old(top - higher)
        part = added[:, None] * wrong[:, split]
        output = (output + part) * kept[:, None] if is_late else output * kept[:, None] + part
        total, top = total * kept + added, higher
    return (output / total[:, None]).half()
