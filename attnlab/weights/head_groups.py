"""Groups of heads: weights of a large call are computed by groups that fit into a processor's caches.

A GPU computes larger groups, so that few kernels are launched.
"""

from collections.abc import Iterator, Sequence

import torch

from attnlab.weights.plan import right_plan
from attnlab.weights.setup import AttentionSetup

_NUMBERS = 1 << 21  # of a group: 16 MiB of float64
_NUMBERS_ON_GPU = 1 << 25


def head_groups(shape: Sequence[int], device: torch.device) -> Iterator[slice]:
    """Yield ranges of the heads of weights [rows, heads, slots], each with at least one and few numbers."""
    rows, heads, slots = shape
    most = _NUMBERS if device.type == "cpu" else _NUMBERS_ON_GPU
    step = max(1, most // max(1, rows * slots))
    yield from (slice(first, min(first + step, heads)) for first in range(0, heads, step))


def right_weights(setup: AttentionSetup) -> torch.Tensor:
    """Return the weights of a correct kernel, [R, H, N] float64."""
    rows, heads, slots = len(setup.rows), len(setup.heads), setup.num_slots
    groups = list(head_groups((rows, heads, slots), setup.device))
    if len(groups) == 1:
        return right_plan(setup).weights()
    weights = torch.empty(rows, heads, slots, dtype=torch.float64, device=setup.device)
    every = torch.arange(heads, device=setup.device)
    for group in groups:
        weights[:, group] = right_plan(setup.of_heads(every[group])).weights()
    return weights


def some_rows(setup: AttentionSetup, most: int = 1 << 22) -> torch.Tensor:
    """Return indices of rows whose weights are about ``most`` numbers at most.

    They are evenly spaced, with the first and the last row of every sequence; all rows of a small setup.
    """
    rows = torch.arange(len(setup.rows), device=setup.device)
    numbers = len(rows) * len(setup.heads) * setup.num_slots
    step = -(-numbers // most)
    if step <= 1:
        return rows
    is_edge = torch.ones(len(rows) + 1, dtype=torch.bool, device=setup.device)
    is_edge[1:-1] = setup.seq[1:] != setup.seq[:-1]
    return rows[(rows % step == 0) | is_edge[:-1] | is_edge[1:]]
