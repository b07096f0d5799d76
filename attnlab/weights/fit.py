"""Fits of measured weights: how log weights depend on scores and distances, and sums."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.weights.codes import SlotOwners
from attnlab.weights.plan import Constant, Plan, Rule, constants_near, numbers, right_plan, usable
from attnlab.weights.rules import Gain, HeadGain, HeadScore, ScoreFactor
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A linear fit of the log weight, with a constant per row and head.

    - ``score``: the slope against the expected score, 1 is right; ``score_error``: its standard error.
    - ``distance``: the slopes against the key's distance in addition to ALiBi's expected bias, by head, [H].
    - ``spread``: the standard deviation of the residuals; ``count``: the number of weights in the fit.
    """

    score: float
    score_error: float
    distance: tuple[float, ...]
    spread: float
    count: int


def fit_law(plan: Plan, weights: torch.Tensor) -> Law | None:
    """Fit the log of the measured weights [R, H, N] of the keys that the plan sees.

    Returns None if there are too few. Distances count with ALiBi alone.
    """
    measured, used = usable(plan, weights)
    used &= used.sum(-1, keepdim=True) > 2
    count = int(used.sum())
    if count < 8:
        return None
    target = _without_bias(plan, measured)
    columns = [plan.scores()]
    for head in range(weights.shape[1] if plan.slopes is not None else 0):
        columns.append(torch.zeros_like(target))
        columns[-1][:, head] = plan.distance()
    design = torch.stack([_centred(column, used) for column in columns], -1)[used]
    values = _centred(target, used)[used]
    if float(design[:, 0].square().mean()) < 1e-12:
        return None
    solution = _least_squares(design, values)
    residual = values - design @ solution
    spread = float(residual.square().mean().sqrt())
    error = spread / float(design[:, 0].square().sum().sqrt())
    return Law(
        score=float(solution[0]),
        score_error=error,
        distance=tuple(solution[1:].tolist()),
        spread=spread,
        count=count,
    )


def _least_squares(design: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the solution [columns] of design [n, columns] × solution = values [n].

    A GPU only sums products, because its solvers refuse columns that depend on each other.
    """
    where = design.device
    if where.type != "cpu":
        design, values = (design.T @ design).cpu(), (design.T @ values).cpu()
    solution: torch.Tensor = torch.linalg.lstsq(design, values[:, None]).solution[:, 0]
    return solution.to(where)


def _without_bias(plan: Plan, measured: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of measured weights without what the plan adds to the scores."""
    return measured.clamp(min=1e-300).log() - (plan.logits() - plan.scores() * plan.power)


def _centred(values: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return the values minus their mean over the used entries of each row and head."""
    values = torch.where(used, values, 0.0)
    count = used.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(used, values - values.sum(-1, keepdim=True) / count, 0.0)


_SAME = 4e-3  # numbers that differ by less are one
_MOST_NAMES = 2
_FEW = 12  # weights that a slope needs
_SPREAD = 0.02  # of the logarithm of a factor within a head, if it is one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Magnitudes:
    """Factors that a kernel applies in addition to the right ones, of each head, [H]; NaN if not known.

    - ``key``, ``new_key``: of the scores of keys from the cache and of new keys.
    - ``value``, ``new_value``: of what values from the cache and new values add to the output.
    - ``has_new``: whether new keys come from the arguments.
    - ``is_constant``: whether these factors give all measured weights, up to the spread of a fit.
    """

    heads: torch.Tensor
    key: torch.Tensor
    new_key: torch.Tensor
    value: torch.Tensor
    new_value: torch.Tensor
    has_new: bool
    is_constant: bool

    @property
    def text(self) -> str:
        """Return the factors of keys, values and output in words; "" if they say nothing."""
        if not self.is_constant or self._is_right():
            return ""
        parts = [("cached keys", self.key), ("cached values", self.value)]
        if self.has_new:
            parts += [("new keys", self.new_key), ("new values", self.new_value)]
        words = "; ".join(f"{name} × {self._text(found)}" for name, found in parts if _known(found))
        return f"scales: {words}; {self._of_output()}"

    def _is_right(self) -> bool:
        every = torch.cat([self.key, self.new_key, self.value, self.new_value])
        return _are_near(every[every.isfinite()])

    def _of_output(self) -> str:
        """Return what is known of the output's own factor."""
        if not self.has_new:
            return "a factor of the output is the same as one of the values"
        if _are_near(self.value / self.new_value):
            return f"output × {self._text(self.value)} (the same factor for cached and new values)"
        return "output × 1, or a common factor of both values"

    def _text(self, found: torch.Tensor) -> str:
        known = found[found.isfinite()]
        if _is_one(known):
            return f"{float(known.median()):.4g}"
        return f"{float(known.min()):.4g} to {float(known.max()):.4g} by head"

    def to_dict(self) -> dict[str, Any]:
        """Return the factors by head."""
        return {
            "heads": self.heads.tolist(),
            "key": self.key.tolist(),
            "value": self.value.tolist(),
            "new_key": self.new_key.tolist() if self.has_new else None,
            "new_value": self.new_value.tolist() if self.has_new else None,
            "explains_all_weights": self.is_constant,
        }


def fit_magnitudes(plan: Plan, weights: torch.Tensor) -> Magnitudes | None:
    """Fit the factors of measured weights [R, H, N] under a plan; None if there are too few weights."""
    setup = plan.setup
    measured, used = usable(plan, weights)
    is_new = setup.is_new.expand_as(used)
    slopes = [_slopes(plan, measured, used & part) for part in (~is_new, is_new)]
    if all(bool(one.isnan().all()) for one in slopes):
        return None
    scaled = plan.change(
        factor=(1.0, 1.0),
        head_factor=None,
        entry_factor=torch.where(setup.is_new, slopes[1][:, None], slopes[0][:, None]).nan_to_num(
            1.0
        ),
    )
    ratio = torch.where(used, (measured / scaled.entry_weights()).log(), torch.nan)
    gains, spreads = [], []
    for part in (~is_new, is_new):
        logs = torch.where(part, ratio, torch.nan).transpose(0, 1).flatten(1)
        gains.append(logs.nanmedian(1).values.exp())
        spreads.append((logs - logs.nanmedian(1, keepdim=True).values).abs().nan_to_num(0.0).max())
    return Magnitudes(
        heads=setup.heads,
        key=slopes[0],
        new_key=slopes[1],
        value=gains[0],
        new_value=gains[1],
        has_new=bool((used & is_new).any()),
        is_constant=bool(max(spreads) < _SPREAD),
    )


def rules_of(found: Magnitudes, plan: Plan) -> Iterator[tuple[Rule, ...]]:
    """Yield combinations of rules with the fitted factors, the named ones first."""
    if not found.is_constant:
        return
    setup = plan.setup
    gain_is_common = not found.has_new or _are_near(found.value / found.new_value)
    score_is_common = not _known(found.key) or not _known(found.new_key)
    score_is_common |= _are_near(found.key, found.new_key)
    choices: list[list[Rule]] = []
    for common, whole, new, of, of_head in (
        (score_is_common, found.key, found.new_key, ScoreFactor, HeadScore),
        (gain_is_common, found.value, found.new_value, Gain, HeadGain),
    ):
        pairs = (
            [("all", whole if _known(whole) else new)]
            if common
            else [("cache", whole), ("new", new)]
        )
        for part, factors in pairs:
            if not _known(factors) or _are_near(factors):
                continue
            if _is_one(factors):
                names = constants_near(float(factors.median()), setup, _SAME)
                short = [*names[:-1][:_MOST_NAMES], names[-1]]
                choices.append([of(one, part) for one in short])
            elif _is_one(factors[(factors - 1).abs() >= _SAME]):
                return  # a rule of these heads says the same
            elif part == "all":
                choices.append([of_head(_of_heads(setup.heads, factors))])
            else:
                return
    if choices:
        yield from itertools.product(*choices)


def _of_heads(heads: torch.Tensor, factors: torch.Tensor) -> tuple[tuple[int, Constant], ...]:
    pairs = zip(heads.tolist(), factors.tolist(), strict=True)
    return tuple((head, Constant("", one)) for head, one in pairs if abs(one - 1) >= _SAME)


def _are_near(factors: torch.Tensor, others: torch.Tensor | float = 1.0) -> bool:
    """Answer whether factors are the same as others; NaN is not."""
    return bool(((factors - others).abs() < _SAME).all())


def _known(factors: torch.Tensor) -> bool:
    return not bool(factors.isnan().any())


def _is_one(factors: torch.Tensor) -> bool:
    return float(factors.max() - factors.min()) < _SAME * float(factors.abs().max())


def _slopes(plan: Plan, measured: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return the slope of the log weight against the score, of each head, [H]; NaN for too few weights."""
    used = used & (used.sum(-1, keepdim=True) > 1)
    x, y = _centred(plan.scores(), used), _centred(_without_bias(plan, measured), used)
    slope = (x * y).sum((0, 2)) / x.square().sum((0, 2))
    return torch.where(used.sum((0, 2)) >= _FEW, slope, torch.nan)


def pattern(
    setup: AttentionSetup,
    measured: torch.Tensor,
    expected: torch.Tensor,
    owners: SlotOwners,
    law: Law | None,
) -> list[str]:
    """Return sentences about the weights that differ, [R, H, N]; rows must be finite."""
    off = (measured - expected).abs() > setup.bound(expected)
    wrong = off.any(-1)
    if not bool(wrong.any()):
        return []
    sentences = [_where(setup, wrong), _sums(measured, wrong)]
    floor = 4 * setup.fixed[:, None, None]
    extra = off & (expected <= floor) & (measured.abs() > floor)
    missing = off & (measured.abs() <= floor)
    for mask, words in (
        (extra, " that must not count {have} a weight"),
        (missing, " {have} no weight"),
    ):
        if bool(mask.any()):
            sentences.append(
                _keys(setup, mask, measured if mask is extra else expected, owners, words)
            )
    if law is not None and abs(law.score - 1) > max(5 * law.score_error, 0.01):
        sentences.append(
            f"the log weight rises with the score by {law.score:.4g} ± {law.score_error:.1g}; 1 is right"
        )
    return sentences


def _where(setup: AttentionSetup, wrong: torch.Tensor) -> str:
    rows, heads = setup.rows[wrong.any(1)].tolist(), setup.heads[wrong.any(0)].tolist()
    words = f"wrong weights in {len(rows)} of {len(setup.rows)} rows ({numbers(rows)})"
    seqs = sorted(set(setup.seq[wrong.any(1)].tolist()))
    if len(seqs) < len(setup.seq.unique()):
        words += f", of sequence{'' if len(seqs) == 1 else 's'} {numbers(seqs)}"
    if len(heads) < len(setup.heads):
        words += f", in {len(heads)} of {len(setup.heads)} heads ({numbers(heads)})"
    else:
        words += ", in every head" if len(heads) > 1 else ""
    return words


def _sums(measured: torch.Tensor, wrong: torch.Tensor) -> str:
    sums = measured.sum(-1)[wrong]
    least, most = float(sums.min()), float(sums.max())
    if most - least < 1e-3:
        return f"the weights of these rows sum to {least:.4g}"
    return f"the weights of these rows sum to {least:.4g} to {most:.4g}"


def _keys(
    setup: AttentionSetup,
    mask: torch.Tensor,
    weights: torch.Tensor,
    owners: SlotOwners,
    words: str,
) -> str:
    """Return how many keys a mask [R, H, N] has per row, and the heaviest of them."""
    counts = mask.any(1).sum(1)
    counts = counts[counts > 0]
    least, most = int(counts.min()), int(counts.max())
    # not torch.unravel_index, which imports sympy: seconds
    first, slot = divmod(int(torch.where(mask, weights, -1.0).argmax()), mask.shape[2])
    row, head = divmod(first, mask.shape[1])
    weight = float(weights[row, head, slot])
    seq, position = int(setup.seq[row]), int(setup.position[row])
    kind = owners.kind(slot, seq, position)
    at = int(owners.position[slot])
    in_memory = slot if setup.kept is None else int(setup.kept[slot])
    where = f"position {at}, {kind}" if at >= 0 else f"slot {in_memory}, {kind}"
    number = f"{least}" if least == most else f"{least} to {most}"
    what = ("key" if most == 1 else "keys") + words.format(have="has" if most == 1 else "have")
    return (
        f"in {len(counts)} rows, {number} {what}; the largest, {weight:.3g}, is row {int(setup.rows[row])}, "
        f"head {int(setup.heads[head])}, key at {where}"
    )
