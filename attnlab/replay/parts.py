"""Parts of a call: some of its sequences, rows, heads and blocks. Each function returns a new, smaller call.

What remains has the same numbers: the part of a sequence has the same queries, keys and values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import cut_prefixes, cut_ranges

# The data of a mask for a part of a call: cut to the rows and keys that are kept.
#
# Positions of keys are counted from the begin of a sequence. If its first tokens are dropped, ranges and
# prefixes move to the front by as many positions. Chunks keep their size; their edges move, unless whole
# chunks are dropped.


def cut_masks(
    call: KernelCall, seqs: Sequence[int], dropped: Sequence[int], seq_lens: Sequence[int]
) -> dict[str, Any]:
    """Return the changed fields of a call that keeps some sequences, or parts of them.

    - ``seqs``: the kept sequences. ``dropped``: of each, the number of tokens before its first kept key.
    - ``seq_lens``: of each, the length that it keeps.
    """
    changes: dict[str, Any] = {}
    if isinstance(call.causal, torch.Tensor):
        changes["causal"] = call.causal[list(seqs)]
    if call.mm_prefix_range is not None:
        kept = call.mm_prefix_range[list(seqs)]
        changes["mm_prefix_range"] = cut_ranges(kept, dropped, seq_lens)
    if call.rswa_prefix_lens is not None:
        kept = call.rswa_prefix_lens[list(seqs)]
        changes["rswa_prefix_lens"] = cut_prefixes(kept, dropped, seq_lens)
    return changes


def cut_bias(
    call: KernelCall,
    seqs: Sequence[int],
    firsts: Sequence[int],
    lens: Sequence[int],
    dropped: Sequence[int],
    seq_lens: Sequence[int],
) -> dict[str, Any]:
    """Return the bias for the rows that remain: of each sequence ``lens`` rows, from ``firsts`` on.

    A bias of each sequence is cut to its keys as in :func:`cut_masks`.

    If all sequences share one bias, it is cut in front by the first row that every sequence drops. Rows that
    one sequence alone drops would need a bias of their own: then the bias is not cut in front.
    """
    if call.qq_bias is None:
        return {}
    if call.qq_bias.dim() == 3:
        cut = call.qq_bias.new_zeros(len(seqs), max(lens), max(seq_lens))
        for i, (seq, first, count) in enumerate(zip(seqs, firsts, lens, strict=True)):
            keys = slice(dropped[i], dropped[i] + seq_lens[i])
            cut[i, :count, : seq_lens[i]] = call.qq_bias[seq, first : first + count, keys]
        return {"qq_bias": cut}
    first = firsts[0] if len(set(firsts)) == 1 else 0
    rows = slice(first, first + max(lens))
    return {"qq_bias": call.qq_bias[rows, rows].clone()}


def can_drop_first_rows(call: KernelCall) -> bool:
    """Answer whether a single sequence of a call can lose its first rows: a tree has one bias for all."""
    return call.qq_bias is None or call.qq_bias.dim() == 3 or len(call.seq_lens) == 1


_BY_TOKEN = ("query", "key", "value", "output", "before", "lse", "slot_mapping")
_BY_HEAD = {**dict.fromkeys(("query", "output", "before", "lse"), 1), "alibi_slopes": 0, "sinks": 0}
_BY_KV_HEAD = dict.fromkeys(("key", "value", "key_cache", "value_cache"), 1)

_Take = Callable[[torch.Tensor, int, range], torch.Tensor]  # some entries of a dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSequence:
    """A sequence of a call, and what is kept of it: new tokens from ``first`` to ``last``, and its keys
    without the first ``blocks`` blocks and without those after the last kept token."""

    seq: int
    first: int
    last: int
    blocks: int = 0


def whole(call: KernelCall) -> list[KeptSequence]:
    """Return every sequence of a call, complete."""
    return [
        KeptSequence(seq=seq, first=0, last=length)
        for seq, length in enumerate(call.query_lens.tolist())
    ]


def with_sequences(call: KernelCall, kept: Sequence[KeptSequence]) -> KernelCall:
    """Return a call with some sequences, or parts of them.

    The maxima become the true ones, unless the call's are smaller. Tokens before ``first`` become context:
    the cache must hold them. The data of a mask are cut to what is kept (:mod:`attnlab.replay.parts`).
    """
    starts, query_lens = call.query_start_loc.tolist(), call.query_lens.tolist()
    rows = [torch.arange(starts[one.seq] + one.first, starts[one.seq] + one.last) for one in kept]
    index = torch.cat(rows)
    seqs = [one.seq for one in kept]
    lens = [one.last - one.first for one in kept]
    cut = [query_lens[one.seq] - one.last + one.blocks * call.block_size for one in kept]
    seq_lens = call.seq_lens[seqs] - torch.tensor(cut, dtype=call.seq_lens.dtype)
    changes: dict[str, Any] = {
        name: tensor[index] for name in _BY_TOKEN if (tensor := getattr(call, name)) is not None
    }
    for name in ("k_scale", "v_scale", "q_scale"):
        scale = getattr(call, name)
        if isinstance(scale, torch.Tensor) and scale.dim() == 2:
            changes[name] = scale[seqs]
    dropped = [one.blocks * call.block_size for one in kept]
    changes |= cut_masks(call, seqs, dropped, seq_lens.tolist())
    firsts = [one.first for one in kept]
    changes |= cut_bias(call, seqs, firsts, lens, dropped, seq_lens.tolist())
    kind = call.query_start_loc.dtype
    return dataclasses.replace(
        call,
        **changes,
        query_start_loc=torch.tensor([0, *lens]).cumsum(0).to(kind),
        seq_lens=seq_lens,
        block_table=_table(call, kept, seq_lens.tolist()),
        max_query_len=min(call.max_query_len, max(lens)),
        max_seq_len=min(call.max_seq_len, int(seq_lens.max())),
    )


def _table(call: KernelCall, kept: Sequence[KeptSequence], seq_lens: Sequence[int]) -> torch.Tensor:
    """Return the rows of the block table without the dropped blocks, as wide as the longest sequence."""
    columns = max(1, *(-(-length // call.block_size) for length in seq_lens))
    table = call.block_table.new_zeros(len(kept), columns)
    for row, one in zip(table, kept, strict=True):
        blocks = call.block_table[one.seq, one.blocks :][:columns]
        row[: len(blocks)] = blocks
    return table


def with_kv_heads(call: KernelCall, heads: range, *, views: bool = False) -> KernelCall:
    """Return a call with copies, or ``views``, of some of the KV heads and their query heads."""
    group = call.num_queries_per_kv
    own = range(heads.start * group, heads.stop * group)
    return _with_heads(call, own, heads, _view if views else _copied)


def with_query_head(call: KernelCall, head: int) -> KernelCall:
    """Return a call with copies of one query head and its KV head."""
    kv_head = head // call.num_queries_per_kv
    return _with_heads(call, range(head, head + 1), range(kv_head, kv_head + 1), _copied)


def _with_heads(call: KernelCall, heads: range, kv_heads: range, take: _Take) -> KernelCall:
    changes: dict[str, Any] = {}
    for part, fields in ((heads, _BY_HEAD), (kv_heads, _BY_KV_HEAD)):
        for name, dim in fields.items():
            if (tensor := getattr(call, name)) is not None:
                changes[name] = take(tensor, dim, part)
    for name in ("k_scale", "v_scale", "q_scale"):
        scale = getattr(call, name)
        if isinstance(scale, torch.Tensor):
            changes[name] = take(scale, scale.dim() - 1, kv_heads)
    return dataclasses.replace(call, **changes)


def _view(tensor: torch.Tensor, dim: int, part: range) -> torch.Tensor:
    return tensor.narrow(dim, part.start, len(part))


def _copied(tensor: torch.Tensor, dim: int, part: range) -> torch.Tensor:
    """Return a copy of some entries of a dimension, with the dimensions of memory in the same order."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride()[d])
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    dense = _view(tensor, dim, part).permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute(back)


def with_head_size(call: KernelCall, size: int) -> KernelCall | None:
    """Return a call with the first ``size`` elements of every head; None if keys and values differ in width,
    or if the key cache cannot be cut there."""
    chunk = call.key_cache.shape[4]
    if call.query.shape[2] != call.value_cache.shape[2] or size % chunk:
        return None
    changes: dict[str, Any] = {
        name: tensor[..., :size].clone()
        for name in ("query", "key", "value", "output", "before")
        if (tensor := getattr(call, name)) is not None
    }
    changes["key_cache"] = _copied(call.key_cache, 2, range(size // chunk))
    changes["value_cache"] = _copied(call.value_cache, 2, range(size))
    return dataclasses.replace(call, **changes, lse=None)


def without_tokens(call: KernelCall, count: int) -> KernelCall | None:
    """Return a call of one sequence without the first ``count`` tokens of its context; None if it cannot be.

    The other tokens move to the front of the sequence's blocks, with their bytes.
    """
    seq_len, query_len = int(call.seq_lens[0]), int(call.query_lens[0])
    has_scales = isinstance(call.k_scale, torch.Tensor)
    if len(call.seq_lens) != 1 or count > seq_len - query_len or has_scales:
        return None
    size, blocks = call.block_size, call.block_table[0].long()
    old, new = torch.arange(count, seq_len), torch.arange(seq_len - count)
    caches: dict[str, Any] = {}
    for name in ("key_cache", "value_cache"):
        cache = getattr(call, name)
        moved = cache.clone()
        kept = cache.movedim(3, 1)[blocks[old // size], old % size]
        moved.movedim(3, 1)[blocks[new // size], new % size] = kept
        caches[name] = moved
    shorter = dataclasses.replace(
        call,
        **caches,
        **cut_masks(call, [0], [count], [seq_len - count]),
        **cut_bias(call, [0], [0], [query_len], [count], [seq_len - count]),
        seq_lens=call.seq_lens - count,
        max_seq_len=min(call.max_seq_len, seq_len - count),
    )
    return with_sequences(shorter, whole(shorter))


def with_fewer_blocks(call: KernelCall) -> KernelCall | None:
    """Return a call with only the blocks that its table names; None if it has no others."""
    smaller = call.with_named_blocks()
    return smaller if smaller.key_cache.shape[0] < call.key_cache.shape[0] else None
