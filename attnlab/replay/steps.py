"""Steps: the calls that are smaller than a call by one step, the largest steps first."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from attnlab.replay.masks import can_drop_first_rows
from attnlab.replay.parts import (
    KeptSequence,
    whole,
    with_fewer_blocks,
    with_head_size,
    with_kv_heads,
    with_query_head,
    with_sequences,
    without_tokens,
)
from attnlab.tensors.call import KernelCall

Step = tuple[str, KernelCall]  # what it does, in words, and its call
_SINGLE = 8  # sequences, heads or rows that are tried alone, the worst first
_PLAIN: dict[str, Any] = {
    "alibi_slopes": None,
    "sinks": None,
    "softcap": None,
    "sliding_window": 0,
    "causal": True,
    "mm_prefix_range": None,
    "rswa_prefix_lens": None,
    "chunk_lookback": -1,
    "qq_bias": None,
    "num_splits": None,
    "padding": 0,
    "strides": "contiguous",
}


def smaller_calls(call: KernelCall, ratio: torch.Tensor, *, runs: bool) -> Iterator[Step]:
    """Yield the calls that are smaller by one step.

    - ``ratio``: [num_tokens, num_heads], how wrong each row and head is; the worst are tried first.
    - ``runs``: False if the output cannot be computed again. Then only steps that leave the numbers of the
      remaining output unchanged are made.
    """
    yield from _fewer_sequences(call, ratio)
    yield from _fewer_heads(call, ratio)
    if runs or call.visibility.is_plain:  # under another mask a row may see the rows after it
        yield from _fewer_rows(call, ratio)
    if runs:
        yield from _shorter_contexts(call)
        yield from _plainer(call)
        yield from _smaller_heads(call)
    fewer = with_fewer_blocks(call)
    if fewer is not None:
        yield f"{fewer.key_cache.shape[0]} blocks", fewer


def _fewer_sequences(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one sequence, half of them, or all but one."""
    every = whole(call)
    if len(every) == 1:
        return
    starts = call.query_start_loc.tolist()
    worst = [_largest(ratio[starts[one.seq] : starts[one.seq + 1]]) for one in every]
    order = sorted(every, key=lambda one: -worst[one.seq])
    for one in order[:_SINGLE]:
        if one.last:
            yield f"sequence {one.seq} alone", with_sequences(call, [one])
    half = len(every) // 2
    for part in (every[:half], every[half:]) if half > 1 else ():
        yield f"{len(part)} sequences", with_sequences(call, part)
    if len(every) > 2:
        for one in order[::-1][:_SINGLE]:
            rest = [other for other in every if other.seq != one.seq]
            yield f"without sequence {one.seq}", with_sequences(call, rest)


def _fewer_heads(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one query head, one KV head, or half of the KV heads."""
    num_heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if num_heads == 1:
        return
    worst = ratio.nan_to_num(torch.inf).amax(0)
    order = worst.argsort(descending=True, stable=True).tolist()
    for head in order[:_SINGLE]:
        yield f"head {head} alone", with_query_head(call, head)
    if kv_heads == 1:
        return
    for kv_head in dict.fromkeys(head // call.num_queries_per_kv for head in order[:_SINGLE]):
        yield f"KV head {kv_head} alone", with_kv_heads(call, range(kv_head, kv_head + 1))
    half = kv_heads // 2
    if half > 1:
        for part in (range(half), range(half, kv_heads)):
            yield f"KV heads {part.start} to {part.stop - 1}", with_kv_heads(call, part)


def _fewer_rows(call: KernelCall, ratio: torch.Tensor) -> Iterator[Step]:
    """Yield one row of each sequence, or half of the rows.

    Rows before the kept ones become context, so this needs an op that reads new tokens from the cache.
    """
    kept, starts = whole(call), call.query_start_loc.tolist()
    for number, one in enumerate(kept):
        if one.last <= 1:
            continue
        own = ratio[starts[one.seq] : starts[one.seq + 1]].nan_to_num(torch.inf).amax(1)
        worst, half = int(own.argmax()), one.last // 2
        spans = [(0, worst + 1), (0, half), (0, one.last - 1)]
        if call.spec.new_tokens_from == "cache" and can_drop_first_rows(call):
            spans = [(worst, worst + 1), (half, one.last), (0, half), (1, one.last), *spans]
        for first, last in dict.fromkeys(spans):
            if (first, last) == (0, one.last):
                continue
            part = dataclasses.replace(one, first=first, last=last)
            text = f"rows {first} to {last - 1} of sequence {one.seq}"
            yield text, with_sequences(call, [*kept[:number], part, *kept[number + 1 :]])


def _shorter_contexts(call: KernelCall) -> Iterator[Step]:
    """Yield contexts without their first blocks; of a single sequence, also without some tokens."""
    kept, size = whole(call), call.block_size
    contexts = (call.seq_lens.long() - call.query_lens).tolist()
    most = [context // size for context in contexts]
    if max(most) > 0:
        for share in (1, 2, 4):
            parts = [_without_blocks(one, most[one.seq] // share) for one in kept]
            if any(one.blocks for one in parts):
                yield f"contexts without 1/{share} of their blocks", with_sequences(call, parts)
        for one in kept:
            if most[one.seq]:
                parts = [_without_blocks(other, int(other.seq == one.seq)) for other in kept]
                yield f"sequence {one.seq} without its first block", with_sequences(call, parts)
    if len(kept) == 1 and contexts[0]:
        for count in dict.fromkeys((contexts[0], -(-contexts[0] // 2), 1)):
            shorter = without_tokens(call, count)
            if shorter is not None:
                yield f"context of {contexts[0] - count}", shorter


def _without_blocks(one: KeptSequence, blocks: int) -> KeptSequence:
    return dataclasses.replace(one, blocks=blocks)


def _plainer(call: KernelCall) -> Iterator[Step]:
    """Yield calls without one feature, or with a window of half the size."""
    for field, plain in _PLAIN.items():
        given = getattr(call, field)
        if given is not None and (isinstance(given, torch.Tensor) or given != plain):
            yield f"{field} {plain}", dataclasses.replace(call, **{field: plain})
    yield from _fewer_ranges(call)
    if call.sliding_window > 1:
        half = call.sliding_window // 2
        right = None if call.window_right is None else min(call.window_right, half - 1)
        smaller = dataclasses.replace(call, sliding_window=half, window_right=right)
        yield f"sliding_window {half}", smaller


def _fewer_ranges(call: KernelCall) -> Iterator[Step]:
    """Yield calls without one of several ranges, or with the used ones only."""
    ranges = call.mm_prefix_range
    if ranges is None or ranges.shape[1] < 2:
        return
    for i in range(ranges.shape[1]):
        rest = torch.cat([ranges[:, :i], ranges[:, i + 1 :]], 1)
        yield f"without range {i}", dataclasses.replace(call, mm_prefix_range=rest)


def _smaller_heads(call: KernelCall) -> Iterator[Step]:
    """Yield heads of half the size, down to 16."""
    half = call.query.shape[2] // 2
    if half < 16:
        return
    smaller = with_head_size(call, half)
    if smaller is not None:
        yield f"head_size {half}", smaller


def _largest(ratio: torch.Tensor) -> float:
    return float(ratio.nan_to_num(torch.inf).max()) if ratio.numel() else 0.0
