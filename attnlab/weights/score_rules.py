"""Rules about scores, the denominator and magnitudes."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.weights.plan import Plan, Rescale
from attnlab.weights.rule import PARTS, Constant, Rule


def _factors(part: str, old: tuple[float, float], value: float) -> tuple[float, float]:
    return (
        old[0] * (value if part != "new" else 1.0),
        old[1] * (value if part != "cache" else 1.0),
    )


_ONE = Constant()
_LN_2 = math.log(2)
_LOOPS = {"all": "", "context": " over the cached keys", "new": " over the new keys"}


def _is_part(one: Rescale) -> int:
    """Return 1 for each way in which not all steps are affected."""
    return (one.steps.loop != "all") + (one.steps.only is not None)


@dataclass(frozen=True, slots=True)
class ScoreFactor(Rule):
    """The scores of a part of the keys have another factor, before soft cap and ALiBi."""

    factor: Constant
    part: str = "all"

    def apply(self, plan: Plan) -> Plan:
        value = self.factor.of(plan.setup)
        return plan.change(factor=_factors(self.part, plan.factor, value))

    @property
    def text(self) -> str:
        if self.factor.name == "1/sm_scale":
            return f"the scores of {PARTS[self.part]} are not multiplied by the scale"
        return f"the scores of {PARTS[self.part]} are multiplied by a further {self.factor.text}"


@dataclass(frozen=True, slots=True)
class Power(Rule):
    """The exponential is taken of a multiple of the whole logit, ALiBi and soft cap included."""

    factor: Constant

    def apply(self, plan: Plan) -> Plan:
        return plan.change(power=plan.power * self.factor.of(plan.setup))

    @property
    def text(self) -> str:
        if self.factor.name == "ln(2)":
            return "the exponential has base 2 where it should have base e (logits times ln(2))"
        if self.factor.name == "log2(e)":
            return "the exponential has base e where it should have base 2 (logits times log2(e))"
        return f"the logits are multiplied by a further {self.factor.text}"


@dataclass(frozen=True, slots=True)
class AlibiFactor(Rule):
    """ALiBi's bias has another factor."""

    factor: Constant

    def apply(self, plan: Plan) -> Plan:
        if plan.slopes is None:
            return plan
        return plan.change(slopes=plan.slopes * self.factor.of(plan.setup))

    @property
    def text(self) -> str:
        words = {"0": "ALiBi's bias is missing", "-1": "ALiBi's bias has the wrong sign"}
        return words.get(self.factor.name, f"ALiBi's bias is multiplied by {self.factor.text}")


@dataclass(frozen=True, slots=True)
class AlibiOrigin(Rule):
    """ALiBi counts distances from the first new token: with a sink, this changes the sums."""

    def apply(self, plan: Plan) -> Plan:
        return plan.change(alibi_from="first new token")

    @property
    def text(self) -> str:
        return "ALiBi's distances count from the first new token, so the sink's share is wrong"


@dataclass(frozen=True, slots=True)
class Softcap(Rule):
    """The soft cap is elsewhere, missing, or another number.

    ``place``: see :class:`attnlab.weights.plan.Plan`, or "none".
    """

    place: str
    factor: Constant = _ONE

    @property
    def complexity(self) -> int:
        return 1 + (self.factor != _ONE) + (not self.factor.name)

    def apply(self, plan: Plan) -> Plan:
        if plan.softcap is None:
            return plan
        if self.place == "none":
            return plan.change(softcap=None)
        cap = plan.softcap * self.factor.of(plan.setup)
        return plan.change(softcap=cap, cap_place=self.place)

    @property
    def text(self) -> str:
        if self.place == "none":
            return "the soft cap is missing"
        if self.factor != _ONE:
            return f"the soft cap is {self.factor.text} times as large"
        places = {
            "after bias": "after ALiBi's bias was added",
            "before scale": "before the softmax scale",
        }
        return f"the soft cap is applied {places[self.place]}"


@dataclass(frozen=True, slots=True)
class MaskCapped(Rule):
    """The soft cap is applied after the mask: hidden keys have the score -softcap instead of -inf.

    ``tile``: each loop ends at a multiple of so many keys, and slots after the last key have the value 0;
    0: it ends with the last key.
    """

    tile: int = 0

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        if plan.softcap is None:
            return plan
        at = setup.entry_position
        source = torch.where(setup.is_new, at >= setup.cached[:, None], at < setup.cached[:, None])
        hidden = (plan.visible == 0) & (at < setup.seq_len[:, None]) & source
        hidden &= setup.entry_slot >= 0
        after = torch.zeros_like(setup.cached)
        for length in (setup.cached, setup.seq_len - setup.cached) if self.tile else ():
            after = after + -length % self.tile
        zero_keys = plan.zero_keys + after * math.exp(-plan.softcap)
        visible = torch.where(hidden, 1.0, plan.visible)
        counted = torch.where(hidden, 1.0, plan.counted)
        fixed = torch.where(hidden, -plan.softcap, torch.nan)
        return plan.change(visible=visible, counted=counted, fixed_logit=fixed, zero_keys=zero_keys)

    @property
    def text(self) -> str:
        words = f", as have the slots up to the end of a tile of {self.tile}" if self.tile else ""
        return f"the soft cap is applied after the mask: hidden keys have the score -softcap{words}"


@dataclass(frozen=True, slots=True)
class NotRescaled(Rule):
    """Partial sums are rescaled wrongly when the running maximum rises, or when parts are merged."""

    rescale: Rescale
    factor: Constant

    @property
    def complexity(self) -> int:
        return 1 + (self.factor.name != "0") + _is_part(self.rescale)

    def apply(self, plan: Plan) -> Plan:
        one = dataclasses.replace(self.rescale, power=self.factor.of(plan.setup))
        return plan.change(rescale=(*plan.rescale, one))

    @property
    def text(self) -> str:
        one = self.rescale
        what = {
            "values": "the weighted sum is",
            "sum": "the denominator is",
            "both": "the weighted sum and the denominator are",
        }[one.of]
        how = "not rescaled" if self.factor.name == "0" else "rescaled by a wrong power"
        if self.factor.name != "0":
            how += f" ({self.factor.text}) of the factor"
        steps = one.steps
        if one.split:
            if steps.only is not None:
                what = {
                    "values": "the weighted sum of",
                    "sum": "the denominator of",
                    "both": "what comes from",
                }[one.of]
                return f"{what} {steps.which} is {how} when the parts are merged"
            return f"{what} {how} when the parts are merged ({steps.keys})"
        if steps.only is not None:
            return f"{what} {how} when the maximum rises in {steps.which}"
        return f"{what} {how} when the maximum rises in the loop{_LOOPS[steps.loop]} ({steps.keys})"


@dataclass(frozen=True, slots=True)
class LoopBase(Rule):
    """The exponential of a loop has another base, and the factor that rescales partial sums has not."""

    rescale: Rescale
    factor: Constant

    @property
    def complexity(self) -> int:
        return 2 + _is_part(self.rescale)

    def apply(self, plan: Plan) -> Plan:
        one = dataclasses.replace(self.rescale, inner=self.factor.of(plan.setup))
        return plan.change(rescale=(*plan.rescale, one))

    @property
    def text(self) -> str:
        bases = {"ln(2)": "base 2 where it should have base e"}
        base = bases.get(self.factor.name, "base e where it should have base 2")
        steps = self.rescale.steps
        return (
            f"the exponential in the loop{_LOOPS[steps.loop]} has {base}, the rescaling has not "
            f"({steps.keys})"
        )


# What the sinks are instead, from those of the plan's heads and of all heads.
_OTHER_SINKS: dict[str, Callable[[Plan, torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda plan, sinks, every: None,
    "counted twice": lambda plan, sinks, every: sinks + _LN_2,
    "multiplied by ln(2)": lambda plan, sinks, every: sinks * _LN_2,
    "multiplied by log2(e)": lambda plan, sinks, every: sinks / _LN_2,
    "multiplied by the softmax scale": lambda plan, sinks, every: sinks * plan.setup.sm_scale,
    "those of the KV head's index": lambda plan, sinks, every: every[plan.setup.kv_head],
    "those of the next head": lambda plan, sinks, every: every[(plan.setup.heads + 1) % len(every)],
    "those of head 0": lambda plan, sinks, every: every[torch.zeros_like(plan.setup.heads)],
}
SINK_FAULTS = tuple(_OTHER_SINKS)


@dataclass(frozen=True, slots=True)
class Sinks(Rule):
    """Attention sinks are left out, counted twice, scaled, or those of other heads."""

    how: str

    def apply(self, plan: Plan) -> Plan:
        sinks, every = plan.sinks, plan.setup.call.sinks
        if sinks is None or every is None:
            return plan
        return plan.change(sinks=_OTHER_SINKS[self.how](plan, sinks, every.cpu().double()))

    @property
    def text(self) -> str:
        return f"the sinks are {self.how}"


@dataclass(frozen=True, slots=True)
class Gain(Rule):
    """The output, or what one part of the keys adds to it, has another factor."""

    factor: Constant
    part: str = "all"

    def apply(self, plan: Plan) -> Plan:
        return plan.change(gain=_factors(self.part, plan.gain, self.factor.of(plan.setup)))

    @property
    def text(self) -> str:
        what = {"all": "the output is", "cache": "cached values are", "new": "new values are"}
        return f"{what[self.part]} multiplied by a further {self.factor.text}"


# Rules with a constant for each head.

Factors = tuple[tuple[int, Constant], ...]


@dataclass(frozen=True, slots=True)
class HeadScore(Rule):
    """The scores of query heads have factors of their own; heads that are not listed have 1."""

    factors: Factors

    complexity = 3

    def apply(self, plan: Plan) -> Plan:
        found = _by_head(self.factors, plan)
        return plan.change(head_factor=_product(plan.head_factor, found))

    @property
    def text(self) -> str:
        return (
            f"the scores are multiplied by a further constant for each head: {_text(self.factors)}"
        )


@dataclass(frozen=True, slots=True)
class HeadGain(Rule):
    """The output of query heads has factors of its own; heads that are not listed have 1."""

    factors: Factors

    complexity = 3

    def apply(self, plan: Plan) -> Plan:
        return plan.change(head_gain=_product(plan.head_gain, _by_head(self.factors, plan)))

    @property
    def text(self) -> str:
        return (
            f"the output is multiplied by a further constant for each head: {_text(self.factors)}"
        )


def _product(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one * other


def _by_head(factors: Factors, plan: Plan) -> torch.Tensor:
    """Return the factor of each head of a plan, [H] float64."""
    known = {head: constant.of(plan.setup) for head, constant in factors}
    return torch.tensor(
        [known.get(head, 1.0) for head in plan.setup.heads.tolist()], dtype=torch.float64
    )


def _text(factors: Factors) -> str:
    """Return the heads of each factor in words."""
    groups: dict[str, list[str]] = {}
    for head, constant in factors:
        groups.setdefault(constant.text, []).append(str(head))
    return "; ".join(
        f"{'head' if len(heads) == 1 else 'heads'} {', '.join(heads)} × {text}"
        for text, heads in groups.items()
    )
