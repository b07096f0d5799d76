"""Magnitudes: the scales of keys, values and output, fitted to measured weights by head, and as rules."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.weights.fit import usable
from attnlab.weights.head_rules import HeadGain, HeadScore
from attnlab.weights.plan import Plan
from attnlab.weights.rule import Constant, Rule, constants_near
from attnlab.weights.score_rules import Gain, ScoreFactor

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
        return bool(((every - 1).abs() < _SAME)[every.isfinite()].all())

    def _of_output(self) -> str:
        """Return what is known of the output's own factor."""
        if not self.has_new:
            return "a factor of the output is the same as one of the values"
        ratio = self.value / self.new_value
        if bool(((ratio - 1).abs() < _SAME).all()):
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
    gain_is_common = not found.has_new or bool(
        ((found.value / found.new_value - 1).abs() < _SAME).all()
    )
    score_is_common = not _known(found.key) or not _known(found.new_key)
    score_is_common |= bool(((found.key - found.new_key).abs() < _SAME).all())
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
            if not _known(factors) or bool(((factors - 1).abs() < _SAME).all()):
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


def _known(factors: torch.Tensor) -> bool:
    return not bool(factors.isnan().any())


def _is_one(factors: torch.Tensor) -> bool:
    return float(factors.max() - factors.min()) < _SAME * float(factors.abs().max())


def _slopes(plan: Plan, measured: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return the slope of the log weight against the score, of each head, [H]; NaN for too few weights."""
    used = used & (used.sum(-1, keepdim=True) > 1)
    scores = plan.scores()
    target = measured.clamp(min=1e-300).log() - (plan.logits() - scores * plan.power)
    count = used.sum(-1, keepdim=True).clamp(min=1)
    x, y = (
        torch.where(used, one - torch.where(used, one, 0.0).sum(-1, keepdim=True) / count, 0.0)
        for one in (scores, target)
    )
    slope = (x * y).sum((0, 2)) / x.square().sum((0, 2))
    return torch.where(used.sum((0, 2)) >= _FEW, slope, torch.nan)
