"""Values of query, key and value that random numbers do not have, by the names of a Case's ``distribution``.

Each is a change of numbers with a normal distribution, so that the rest of them stays random.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from attnlab.case.lengths import Lengths

LARGE = 384.0  # exact in FP8; the product of two is 147456
_TAGGED = 16  # tokens that share a tag: a block of the cache in most cases
_NEAR = (0.7, 0.95)  # magnitudes of values, as parts of 65504, the largest float16
_DOMINANT = (16.0, 64.0)  # in the query and in the key; their product is 1024

Change = Callable[[Lengths, torch.Tensor, torch.Tensor, torch.Tensor], None]


def change_values(
    distribution: str, lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Change normal numbers to those of a distribution; modifies the tensors.

    ``query``: [num_tokens, num_heads, head_size]; ``key``, ``value``: [sum(seq_lens), num_kv_heads,
    head_size], all tokens sequence by sequence.
    """
    if distribution in CHANGES:
        CHANGES[distribution](lengths, query, key, value)


def _large_scores(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let all scores of a row be near 147456 times sm_scale, or near its negative in every second row."""
    key[..., 0] = LARGE
    query[..., 0] = LARGE
    query[1::2, ..., 0] = -LARGE


def _ties(lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Let all tokens have one key, so that all scores of a row are equal, and let values be tags.

    A tag is a vector of signs for each head and 16 tokens of a sequence.
    """
    key.copy_(key[:1].clone())
    for first, last in _sequences(lengths):
        begins = torch.arange(last - first, device=value.device) // _TAGGED * _TAGGED
        value[first:last] = torch.where(value[first:last][begins] < 0, -1.0, 1.0).to(value.dtype)


def _dominant_key(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let one key of each sequence and head have a score that is larger by 1024 times sm_scale.

    Its position depends on the head.
    """
    heads = key.shape[1]
    query[..., 0] = _DOMINANT[0]
    for first, last in _sequences(lengths):
        for head in range(heads):
            key[first + (last - first) * (head + 1) // (heads + 1), head, 0] = _DOMINANT[1]


def _near_limit(
    lengths: Lengths, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Let values be near the limit of float16, with one sign per head and element, so that sums are, too."""
    low, high = (part * torch.finfo(torch.float16).max for part in _NEAR)
    sign = torch.where(value[:1] < 0, -1.0, 1.0).to(value.dtype)
    size = low + (high - low) * value.float().abs().clamp(max=1.0)
    value.copy_(size.to(value.dtype) * sign)


def _sequences(lengths: Lengths) -> list[tuple[int, int]]:
    """Return the first row of each sequence among all tokens, and the row after its last."""
    return [*pairwise(lengths.kv_start_loc)]


CHANGES: Mapping[str, Change] = {
    "large_scores": _large_scores,
    "ties": _ties,
    "dominant_key": _dominant_key,
    "near_limit": _near_limit,
}
