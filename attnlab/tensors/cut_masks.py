"""The data of masks for a part of a sequence: without its first keys, and without those after a new end."""

from collections.abc import Sequence

import torch


def cut_ranges(
    ranges: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return ranges [num_seqs, n, 2] that are moved to the front and end within the sequence.

    ``dropped``: of each sequence, the number of tokens before its first kept key; ``seq_lens``: the tokens
    that it keeps. A range that keeps fewer than two positions becomes (0, 0), which is unused.
    """
    moved, last_key = _column(dropped, ranges), _column(seq_lens, ranges) - 1
    first = (ranges[..., 0] - moved).clamp(min=0)
    last = (ranges[..., 1] - moved).minimum(last_key)
    is_used = (first < last) & (ranges[..., 0] < ranges[..., 1])
    return torch.stack([first, last], -1) * is_used[..., None]


def cut_prefixes(
    lens: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return the visible prefixes [num_seqs] of what is kept; the arguments are those of cut_ranges."""
    kept = (lens - _column(dropped, lens)[:, 0]).clamp(min=0)
    return kept.minimum(_column(seq_lens, lens)[:, 0])


def _column(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype)[:, None]
