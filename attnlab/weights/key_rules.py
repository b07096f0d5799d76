"""Rules about which keys count: missing, extra, counted twice, or only in the denominator."""

from dataclasses import dataclass

import torch

from attnlab.weights.plan import Plan
from attnlab.weights.rule import PARTS, Edge, Rule

_OF = {"both": "", "values": " in the weighted sum only", "sum": " in the denominator only"}


@dataclass(frozen=True, slots=True)
class KeyTimes(Rule):
    """Keys from ``begin`` up to ``end`` count ``times`` times.

    - ``part``: "cache", "new" or "all" keys.
    - ``of``: "values" (the weighted sum), "sum" (the denominator) or "both".
    """

    part: str
    begin: Edge
    end: Edge
    times: float
    of: str = "both"

    @property
    def complexity(self) -> int:  # type: ignore[override]
        edges = (self.begin, self.end)
        one_part = self.part != "all" and self.begin.feature == "window"
        return (
            1
            + sum(bool(e.down or e.up or e.within) for e in edges)
            + (self.of != "both")
            + one_part
        )

    def mask(self, plan: Plan) -> torch.Tensor:
        """Return which entries the rule concerns, [R, E] bool."""
        setup = plan.setup
        at, is_new = setup.entry_position, setup.is_new
        inside = (at >= self.begin.at(setup, self.part)[:, None]) & (setup.entry_slot >= 0)
        inside &= at < self.end.at(setup, self.part)[:, None]
        if self.part == "all":
            cached = at < setup.cached[:, None]
            return inside & torch.where(is_new, ~cached, cached)
        return inside & (is_new if self.part == "new" else ~is_new)

    def apply(self, plan: Plan) -> Plan:
        mask = self.mask(plan)
        visible, counted = plan.visible, plan.counted
        if self.of != "sum":
            visible = torch.where(mask, self._times(visible), visible)
        if self.of != "values":
            counted = torch.where(mask, self._times(counted), counted)
        return plan.change(visible=visible, counted=counted)

    def _times(self, old: torch.Tensor) -> torch.Tensor:
        """Return how often a key counts: once if it was hidden, a multiple of what it was otherwise."""
        return torch.ones_like(old) if self.times == 1 else old * self.times

    @property
    def text(self) -> str:
        return _key_text(self) + _OF[self.of]


def _key_text(rule: KeyTimes) -> str:
    """Return the rule without the part of the quotient that it concerns."""
    special = {0.0: _missing_text, 1.0: _extra_text}.get(rule.times)
    if special is not None and (words := special(rule)):
        return words
    verb = {0.0: "are missing", 1.0: "count", 2.0: "count twice"}.get(
        rule.times, f"count {rule.times:g} times"
    )
    return f"{PARTS[rule.part]} from {rule.begin.text} up to {rule.end.text} {verb}"


def _same_feature(rule: KeyTimes) -> bool:
    begin, end = rule.begin, rule.end
    return begin.feature == end.feature and not (begin.down or end.down or begin.up)


def _missing_text(rule: KeyTimes) -> str:
    """Return a rule about missing keys in words, or "" if it is none of the usual ones."""
    begin, end, keys = rule.begin, rule.end, PARTS[rule.part]
    if begin.feature == end.feature == "start":
        return f"the {keys} from position {begin.shift} to {end.shift - 1} are missing"
    if begin.feature == end.feature == "window":
        return f"the window is too narrow by {_count(end.shift)} ({keys})"
    if _same_feature(rule) and end.shift == 0 and begin.shift < 0:
        if begin.shift == -1:
            return f"the last key {_before(rule)} is missing"
        return f"the last {-begin.shift} keys {_before(rule)} are missing"
    if begin.down and begin.feature == end.feature and not (begin.shift or end.down):
        return f"no key counts after the last full group of {begin.down} {_before(rule)}"
    return ""


def _extra_text(rule: KeyTimes) -> str:
    """Return a rule about extra keys in words, or "" if it is none of the usual ones."""
    begin, end, keys = rule.begin, rule.end, PARTS[rule.part]
    if begin.feature == "window" and begin.shift < 0:
        return f"the window is too wide by {_count(-begin.shift)} ({keys}){_within(begin)}"
    if begin.feature == "start" and end.feature == "window":
        return f"the window is ignored ({keys})"
    if _same_feature(rule) and end.shift > 0 and not end.up:
        return f"{_count(end.shift)} too many {_after(rule)}{_within(end)}"
    if end.up:
        return f"all slots up to the next multiple of {end.up} count {_after(rule)}"
    if end.feature == "sequence" and begin.feature != "sequence":
        return f"{keys} count up to the end of the sequence: the causal mask is missing"
    return ""


def _count(number: int) -> str:
    return "one key" if number == 1 else f"{number} keys"


def _before(rule: KeyTimes) -> str:
    return {
        "context": "of the context",
        "cache end": "of the cached keys that the row sees",
        "row": "of the new keys that the row sees" if rule.part == "new" else "that the row sees",
        "sequence": "of the sequence",
    }.get(rule.end.feature, f"before {rule.end.text}")


def _after(rule: KeyTimes) -> str:
    return {
        "context": "at the end of the context",
        "cache end": "after the last cached key that the row sees",
        "row": "after the row's own position",
        "sequence": "after the end of the sequence",
    }.get(rule.begin.feature, f"after {rule.begin.text}")


def _within(edge: Edge) -> str:
    return ", inside its tile" if edge.within else ""


@dataclass(frozen=True, slots=True)
class ZeroKeys(Rule):
    """The denominator counts keys of score 0 whose values are 0: ``end`` - ``begin`` of them, if positive."""

    begin: Edge
    end: Edge
    part: str = "cache"

    @property
    def complexity(self) -> int:  # type: ignore[override]
        return 1 + bool(self.end.up or self.end.down) + bool(self.end.within)

    def apply(self, plan: Plan) -> Plan:
        begin, end = (e.at(plan.setup, self.part) for e in (self.begin, self.end))
        return plan.change(zero_keys=plan.zero_keys + (end - begin).clamp(min=0).double())

    @property
    def text(self) -> str:
        words = "with score 0 and value 0 in the denominator"
        if self.begin.feature == self.end.feature and not self.end.up:
            return f"{_count(self.end.shift)} too many {words}, at {self.begin.text}{_within(self.end)}"
        return f"a key {words} for each position from {self.begin.text} up to {self.end.text}"


@dataclass(frozen=True, slots=True)
class TopLeftMask(Rule):
    """New token i sees the keys at positions 0 to i: the causal mask lacks the length of the context."""

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        last = (setup.position - setup.ctx_len)[:, None]
        at, window = setup.entry_position, setup.call.sliding_window
        in_cache = at < setup.cached[:, None]
        seen = torch.where(setup.is_new, ~in_cache, in_cache) & (setup.entry_slot >= 0)
        seen &= (at <= last) & (at > last - window if window else at >= 0)
        return plan.change(visible=seen.double(), counted=seen.double())

    @property
    def text(self) -> str:
        return "the causal mask is aligned at its top left: new token i sees the keys at positions 0 to i"


@dataclass(frozen=True, slots=True)
class NoKeys(Rule):
    """The rows are 0: they attend to no key."""

    def apply(self, plan: Plan) -> Plan:
        return plan.change(visible=torch.zeros_like(plan.visible))

    @property
    def text(self) -> str:
        return "the output is 0: no key has a weight"
