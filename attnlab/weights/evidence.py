"""Evidence: how measured weights differ from predicted ones, and whether a prediction explains them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attnlab.weights.plan import right_plan
from attnlab.weights.setup import AttentionSetup

# Groups of heads: weights of a large call are computed by groups that fit into a processor's caches.
#
# A GPU computes larger groups, so that few kernels are launched.

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


# A rule explains weights within so many bounds: its scores may be larger than the right ones.
SLACK = 2.0
MOST_LEFT = 0.25  # of a predicted weight that a rule may leave, however large the bound is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Measured and predicted weights of a setup.

    - ``ratio``: [R, H], the largest |measured - predicted| in bounds. ``cost``: a mean that is small if few
      weights differ.
    """

    ratio: torch.Tensor
    cost: float

    @property
    def explained(self) -> torch.Tensor:
        """Return which rows and heads are explained, [R, H] bool."""
        return self.ratio <= 1.0

    @property
    def complete(self) -> bool:
        """Answer whether every row and head is explained."""
        return bool(self.explained.all())


def compare(
    setup: AttentionSetup, measured: torch.Tensor, predicted: torch.Tensor, slack: float = SLACK
) -> Evidence:
    """Compare weights, both [R, H, N]; NaN explains nothing."""
    found = [
        (ratio.amax(-1), torch.log1p(ratio).sum(-1))
        for ratio in _ratios(setup, measured, predicted, slack)
    ]
    worst, logs = (torch.cat(several, 1) for several in zip(*found, strict=True))
    cost = float(logs.mean()) + float((worst > 1).double().mean()) * 5
    return Evidence(ratio=worst, cost=cost)


def too_coarse(setup: AttentionSetup, expected: torch.Tensor) -> torch.Tensor:
    """Return the rows and heads of which the precision hides large errors, [R, H] bool.

    Their largest weight is known to no better than a quarter of it.
    """
    largest = expected.amax(-1)
    bound = largest * setup.relative[:, None] + setup.fixed[:, None]
    return (bound > MOST_LEFT * largest) & (largest > 0)


def explained(
    setup: AttentionSetup, measured: torch.Tensor, predicted: torch.Tensor, slack: float = SLACK
) -> torch.Tensor:
    """Return which rows and heads of measured weights a prediction explains, [R, H] bool."""
    ratios = _ratios(setup, measured, predicted, slack)
    return torch.cat([ratio.amax(-1) for ratio in ratios], 1) <= 1.0


def _ratios(
    setup: AttentionSetup, measured: torch.Tensor, predicted: torch.Tensor, slack: float
) -> Iterator[torch.Tensor]:
    """Yield |measured - predicted| in bounds for groups of heads, [R, heads of the group, N]."""
    relative, fixed = setup.relative[:, None, None], setup.fixed[:, None, None]
    if slack > 1:  # a rule: a bound that covers the error explains nothing
        relative = relative.clamp(max=MOST_LEFT / slack)
    for group in head_groups(measured.shape, measured.device):
        given, right = measured[:, group], predicted[:, group]
        bound = (right.abs() * relative).add_(fixed)
        yield (given - right).abs_().div_(slack * bound).nan_to_num_(1e30, 1e30, 1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the difference looks like: which rules are worth a try.

    ``law``: log weights differ within the cached or within the new keys of a row; ``parts``: between the two.
    """

    extra: bool
    missing: bool
    sums: bool
    law: bool
    parts: bool

    @property
    def count(self) -> int:
        """Return how many of the things that key and score rules change are still wrong."""
        return self.extra + self.missing + self.law


def traits_of(
    setup: AttentionSetup, measured: torch.Tensor, predicted: torch.Tensor, keys: torch.Tensor
) -> Traits:
    """Return the traits of measured weights against predicted ones; ``keys`` [R, H, N] bool have a weight."""
    floor = setup.fixed[:, None, None] * 4
    relative = setup.relative[:, None, None]
    extra = (measured.abs() > floor) & ~keys
    missing = (measured.abs() <= floor) & keys & (predicted > 50 * floor)
    both = keys & (measured > 50 * floor) & (predicted > 50 * floor)
    logs = torch.where(both, (measured / predicted).clamp(min=1e-300).log(), torch.nan)
    slots = setup.cache_slots
    middles = [logs[..., :slots].nanmedian(-1).values]
    middles += [logs[..., slots:].nanmedian(-1).values] if slots < logs.shape[-1] else middles
    limit = 4 * relative + 1e-6
    off = both.clone()
    off[..., :slots] &= (logs[..., :slots] - middles[0][..., None]).abs() > limit
    off[..., slots:] &= (logs[..., slots:] - middles[1][..., None]).abs() > limit
    between = (middles[0] - middles[1]).abs() > limit[..., 0]
    total = (measured.sum(-1) - predicted.sum(-1)).abs()
    sums = total > 2 * relative[..., 0] * predicted.sum(-1) + 4 * floor[..., 0]
    return Traits(
        extra=bool(extra.any()),
        missing=bool(missing.any()),
        sums=bool(sums.any()),
        law=bool(off.any()),
        parts=bool(between.any()),
    )
