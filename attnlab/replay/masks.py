"""The data of a mask for a part of a call: cut to the rows and keys that are kept.

Positions of keys are counted from the begin of a sequence. If its first tokens are dropped, ranges and
prefixes move to the front by as many positions. Chunks keep their size; their edges move, unless whole chunks
are dropped.
"""

from collections.abc import Sequence
from typing import Any

import torch

from attnlab.tensors.call import KernelCall
from attnlab.tensors.cut_masks import cut_prefixes, cut_ranges


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


def cut_bias(call: KernelCall, firsts: Sequence[int], lens: Sequence[int]) -> dict[str, Any]:
    """Return the bias of a tree for the rows that remain: of each sequence ``lens`` rows, from ``firsts`` on.

    All sequences share one bias, so it is cut in front by the first row that every sequence drops. Rows that
    one sequence alone drops would need a bias of their own: then the bias is not cut in front.
    """
    if call.qq_bias is None:
        return {}
    first = firsts[0] if len(set(firsts)) == 1 else 0
    rows = slice(first, first + max(lens))
    return {"qq_bias": call.qq_bias[rows, rows].clone()}


def can_drop_first_rows(call: KernelCall) -> bool:
    """Answer whether a single sequence of a call can lose its first rows: a tree has one bias for all."""
    return call.qq_bias is None or len(call.seq_lens) == 1
