"""Rules about which keys count: missing, extra, counted twice, or only in the denominator."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.weights.plan import (
    LAST,
    LAST_SEEN,
    PARTS,
    Constant,
    Edge,
    Partition,
    Plan,
    Rescale,
    Rule,
    read_entries,
    usable,
)
from attnlab.weights.setup import AttentionSetup, misread

# Rules about scores, the denominator and magnitudes.


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

    words = "ALiBi's distances count from the first new token, so the sink's share is wrong"

    def apply(self, plan: Plan) -> Plan:
        return plan.change(alibi_from="first new token")


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
        hidden = (plan.visible == 0) & (setup.entry_position < setup.seq_len[:, None])
        hidden &= read_entries(setup)
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

    words = "the sinks are {0.how}"

    how: str

    def apply(self, plan: Plan) -> Plan:
        sinks, every = plan.sinks, plan.setup.call.sinks
        if sinks is None or every is None:
            return plan
        return plan.change(sinks=_OTHER_SINKS[self.how](plan, sinks, every.cpu().double()))


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
class HeadFactors(Rule):
    """Query heads have factors of their own; heads that are not listed have 1."""

    factors: Factors

    complexity = 3

    def times(self, old: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        """Return the factor of each head of a plan, [H] float64, times ``old`` if there is one."""
        known = {head: constant.of(plan.setup) for head, constant in self.factors}
        own = [known.get(head, 1.0) for head in plan.setup.heads.tolist()]
        found = torch.tensor(own, dtype=torch.float64)
        return found if old is None else old * found

    @property
    def text(self) -> str:
        groups: dict[str, list[str]] = {}
        for head, constant in self.factors:
            groups.setdefault(constant.text, []).append(str(head))
        by_head = "; ".join(
            f"{'head' if len(heads) == 1 else 'heads'} {', '.join(heads)} × {text}"
            for text, heads in groups.items()
        )
        return f"{self.words} multiplied by a further constant for each head: {by_head}"


class HeadScore(HeadFactors):
    """The factors are those of the scores."""

    words = "the scores are"

    def apply(self, plan: Plan) -> Plan:
        return plan.change(head_factor=self.times(plan.head_factor, plan))


class HeadGain(HeadFactors):
    """The factors are those of the output."""

    words = "the output is"

    def apply(self, plan: Plan) -> Plan:
        return plan.change(head_gain=self.times(plan.head_gain, plan))


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
    def complexity(self) -> int:
        edges = (self.begin, self.end)
        one_part = self.part != "all" and self.begin.feature == "window"
        rounded = sum(bool(e.down or e.up or e.within) for e in edges)
        return 1 + rounded + (self.of != "both") + one_part

    def mask(self, plan: Plan) -> torch.Tensor:
        """Return which entries the rule concerns, [R, E] bool."""
        setup = plan.setup
        at, is_new = setup.entry_position, setup.is_new
        inside = (at >= self.begin.at(setup, self.part)[:, None]) & (setup.entry_slot >= 0)
        inside &= at < self.end.at(setup, self.part)[:, None]
        if self.part == "all":
            return inside & read_entries(setup)
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
    def complexity(self) -> int:
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

    words = (
        "the causal mask is aligned at its top left: new token i sees the keys at positions 0 to i"
    )

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        last = (setup.position - setup.ctx_len)[:, None]
        at, window = setup.entry_position, setup.call.sliding_window
        seen = read_entries(setup)
        seen &= (at <= last) & (at > last - window if window else at >= 0)
        return plan.change(visible=seen.double(), counted=seen.double())


@dataclass(frozen=True, slots=True)
class NoKeys(Rule):
    """The rows are 0: they attend to no key."""

    words = "the output is 0: no key has a weight"

    def apply(self, plan: Plan) -> Plan:
        return plan.change(visible=torch.zeros_like(plan.visible))


# Rules about one step of the keys: a tile, block or part that counts a constant number of times.

_WHICH = (0, 1, 2, 3, LAST, LAST_SEEN)
_SPREAD = 0.01  # of the logarithm of a factor, if it is a constant


@dataclass(frozen=True, slots=True)
class TileTimes(Rule):
    """The keys of one step count a constant number of times.

    ``of``: "values" (the weighted sum), "sum" (the denominator) or "both".
    """

    steps: Partition
    times: Constant
    of: str = "both"

    complexity = 3

    def mask(self, plan: Plan) -> torch.Tensor:
        """Return which entries the rule concerns, [R, E] bool."""
        return mask_of(self.steps, plan)

    def apply(self, plan: Plan) -> Plan:
        times = torch.where(self.mask(plan), self.times.of(plan.setup), 1.0)
        visible, counted = plan.visible, plan.counted
        return plan.change(
            visible=visible if self.of == "sum" else visible * times,
            counted=counted if self.of == "values" else counted * times,
        )

    @property
    def text(self) -> str:
        return f"the keys of {self.steps.which} count {self.times.text} times{_OF[self.of]}"


def mask_of(steps: Partition, plan: Plan) -> torch.Tensor:
    """Return which entries that count are in the steps concerned, [R, E] bool."""
    setup = plan.setup
    at, counts = steps.steps(setup), (plan.visible > 0) | (plan.counted > 0)
    has_keys = torch.zeros(len(at), int(at.max()) + 1)
    has_keys.scatter_add_(1, at, counts.float())
    return counts & steps.concerned(setup, has_keys > 0).gather(1, at)


def partitions(
    setup: AttentionSetup, tiles: tuple[int, ...], which: tuple[int | None, ...]
) -> Iterator[Partition]:
    """Yield the ways in which the kernels of a call may divide the keys."""
    cached = bool((setup.cached > 0).any())
    loops = (
        ("context", "new") if cached and bool((setup.cached < setup.seq_len).any()) else ("all",)
    )
    op = setup.call.spec
    counts = op.split_counts(setup.call.num_splits)
    step = op.split_step or setup.call.block_size
    longest = int(setup.seq_len.max())
    for only in which:
        for tile in tiles:
            for loop in loops:
                yield Partition(tile, loop=loop, only=only)
        for parts, tile in itertools.product(counts, (step,) if op.splits_decodes else tiles):
            if parts > 1 and longest > parts * tile:  # else they are the tiles
                yield Partition(tile, parts=parts, only=only)


def fitted_tiles(plan: Plan, weights: torch.Tensor, tiles: tuple[int, ...]) -> Iterator[TileTimes]:
    """Yield one step with the constant that the measured weights [R, H, N] give it, if it is one."""
    measured, used = usable(plan, weights)
    ratio = torch.where(used, (measured / plan.entry_weights()).log(), torch.nan)
    total = weights.sum(-1)
    is_whole = bool(((total - plan.weights().sum(-1)).abs() < _SPREAD).all())
    known: dict[tuple[bool, ...], tuple[tuple[float, str], ...]] = {}
    for steps in partitions(plan.setup, tiles, _WHICH):
        mask = mask_of(steps, plan)
        key = tuple(mask.flatten().tolist())
        if key not in known:
            known[key] = tuple(_fits(plan, mask, ratio, is_whole=is_whole))
        yield from (TileTimes(steps, Constant("", times), of) for times, of in known[key])


def _fits(
    plan: Plan, mask: torch.Tensor, ratio: torch.Tensor, *, is_whole: bool
) -> Iterator[tuple[float, str]]:
    """Yield how often the keys of a mask [R, E] count, and in what, if that is one number.

    ``ratio``: the logarithm of measured over predicted weights [R, H, E]; ``is_whole``: the sums are right.
    """
    if not bool(mask.any()):
        return
    inside = torch.where(mask[:, None], ratio, torch.nan)
    outside = torch.where(mask[:, None], torch.nan, ratio)
    of_rest = outside.nanmedian(-1, keepdim=True).values
    times = _constant(inside - of_rest)
    if times is not None and _is_near(outside - of_rest):
        yield from ((times, of) for of in (("both",) if is_whole else ("both", "values")))
    elif (times := _of_sum(plan, mask, ratio)) is not None:
        yield times, "sum"


def _constant(logs: torch.Tensor) -> float | None:
    """Return the factor whose logarithm all numbers are; None if they differ or it is 1."""
    known = logs[logs.isfinite()]
    if not known.numel():
        return None
    middle = float(known.median())
    if abs(middle) < 4 * _SPREAD or float((known - middle).abs().max()) > _SPREAD:
        return None
    return float(known.mean().exp())


def _is_near(logs: torch.Tensor) -> bool:
    known = logs[logs.isfinite()]
    return not known.numel() or float(known.abs().max()) < _SPREAD


def _of_sum(plan: Plan, mask: torch.Tensor, ratio: torch.Tensor) -> float | None:
    """Return how often the step counts in the denominator, from what the weights of each row lack."""
    of_row = ratio.nanmedian(-1).values  # [R, H]
    share = (plan.entry_weights() * mask[:, None]).sum(-1)
    seen = (share > 0.05) & of_row.isfinite()
    if not bool(seen.any()):
        return None
    times = 1 + ((-of_row).exp() - 1)[seen] / share[seen]
    middle = float(times.median())
    is_one = float((times - middle).abs().max()) < _SPREAD * max(1.0, abs(middle))
    return middle if is_one and abs(middle - 1) > _SPREAD and middle > -0.01 else None


# Rules about where keys and values come from: blocks, positions and heads.

_START = Edge("start")
_WHAT = {"both": "keys and values", "key": "keys", "value": "values"}


@dataclass(frozen=True, slots=True)
class OtherSlots(Rule):
    """Cached positions from ``begin`` on are read from other slots.

    Position p comes from slot block_table[row, p // divisor + column] × block_size + p % modulus +
    slot_shift, where divisor and modulus are the block size if they are 0. A column after the last one is
    in the next row.

    - ``of``: "key", "value" or "both".
    - ``row``: "own", "first", "last", "next" or "previous" row of the block table.
    """

    of: str = "both"
    row: str = "own"
    column: int = 0
    divisor: int = 0
    modulus: int = 0
    shift: int = 0
    slot_shift: int = 0
    begin: Edge = _START

    @property
    def complexity(self) -> int:
        numbers = (self.column, self.divisor, self.modulus, self.shift, self.slot_shift)
        others = (self.row != "own", self.of != "both", self.begin != _START)
        return sum(map(bool, numbers + others))

    def apply(self, plan: Plan) -> Plan:
        setup, slots = plan.setup, self.slots(plan.setup)
        begin = self.begin.at(setup, "cache")[:, None]
        here = ~setup.is_new & (setup.entry_position >= begin)
        changes: dict[str, torch.Tensor] = {}
        if self.of != "value":
            changes["key_slot"] = torch.where(here, slots, plan.key_slot)
        if self.of != "key":
            changes["value_slot"] = torch.where(here, slots, plan.value_slot)
        return plan.change(**changes)

    def slots(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the slot of each entry by this rule, [R, E]; -1 outside of the cache."""
        table, size = setup.call.block_table.long().cpu(), setup.call.block_size
        at, seqs = setup.entry_position, len(table)
        row = {
            "own": setup.seq,
            "first": torch.zeros_like(setup.seq),
            "last": torch.full_like(setup.seq, seqs - 1),
            "next": (setup.seq + 1) % seqs,
            "previous": (setup.seq - 1) % seqs,
        }[self.row]
        moved = at + self.shift
        column = moved // (self.divisor or size) + self.column
        index = row[:, None] * table.shape[1] + column
        inside = (index >= 0) & (index < table.numel())
        block = table.flatten()[index.clamp(0, table.numel() - 1)]
        slot = block * size + moved % (self.modulus or size) + self.slot_shift
        return setup.of_memory(torch.where(inside, slot, -1))

    @property
    def text(self) -> str:
        where = []
        if self.row != "own":
            sequence = {"first": "sequence 0", "last": "the last sequence"}
            name = sequence.get(self.row, f"the {self.row} sequence")
            where.append(f"from the blocks of {name}")
        if self.column:
            where.append(f"from the block {_shifted(self.column)} in the block table")
        if self.divisor:
            where.append(f"from block p // {self.divisor} for position p")
        if self.modulus:
            where.append(f"at offset p % {self.modulus}")
        if self.shift:
            where.append(f"from the position {_shifted(self.shift)}")
        if self.slot_shift:
            where.append(f"from the slot {_shifted(self.slot_shift)} in memory")
        begin = "" if self.begin == _START else f", from {self.begin.text} on"
        return f"cached {_WHAT[self.of]} are read {' '.join(where)}{begin}"


def _shifted(number: int) -> str:
    count = "one" if abs(number) == 1 else str(abs(number))
    return f"{count} {'later' if number > 0 else 'earlier'}"


HEAD_FORMS = {
    "the remainder by the number of KV heads": lambda head, group, heads: head % (heads // group),
    "the next KV head": lambda head, group, heads: (head // group + 1) % (heads // group),
    "the previous KV head": lambda head, group, heads: (head // group - 1) % (heads // group),
    "KV head 0": lambda head, group, heads: head * 0,
    "the last KV head": lambda head, group, heads: head * 0 + heads // group - 1,
    "the reversed order": lambda head, group, heads: heads // group - 1 - head // group,
    "head / (group + 1)": lambda head, group, heads: head // (group + 1),
}


@dataclass(frozen=True, slots=True)
class KeyHead(Rule):
    """Query heads use the keys of other KV heads."""

    words = "query heads use the keys of other KV heads: {0.form}"

    form: str

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        return plan.change(kv_head=other_head(self.form, setup))


def other_head(form: str, setup: AttentionSetup) -> torch.Tensor:
    """Return the KV head of each query head by a form, [H]."""
    heads = setup.call.query.shape[1]
    found: torch.Tensor = HEAD_FORMS[form](setup.heads, setup.call.num_queries_per_kv, heads)
    return found


# Whose slopes each head of a setup has instead, of so many heads.
_SLOPES_OF: dict[str, Callable[[AttentionSetup, int], torch.Tensor]] = {
    "the KV head's index": lambda setup, heads: setup.kv_head,
    "head 0": lambda setup, heads: torch.zeros_like(setup.heads),
    "the next head": lambda setup, heads: (setup.heads + 1) % heads,
    "the head within its group": lambda setup, heads: setup.heads % setup.call.num_queries_per_kv,
}
SLOPE_FORMS = tuple(_SLOPES_OF)


@dataclass(frozen=True, slots=True)
class SlopeOf(Rule):
    """ALiBi's slopes are those of other heads."""

    words = "ALiBi's slopes are those of {0.form}"

    form: str

    def apply(self, plan: Plan) -> Plan:
        slopes = plan.setup.call.alibi_slopes
        if slopes is None:
            return plan
        index = _SLOPES_OF[self.form](plan.setup, len(slopes))
        return plan.change(slopes=slopes.cpu().double()[index])


@dataclass(frozen=True, slots=True)
class StoredRead(Rule):
    """The kernel decodes the cache with a wrong read of ``argument_reference``, by its name."""

    name: str

    def apply(self, plan: Plan) -> Plan:
        stored = plan.setup.stored
        if stored is None:
            return plan
        key, gain = misread(stored, self.name)
        setup = dataclasses.replace(plan.setup, key=key.to(plan.setup.device))
        return plan.change(setup=setup, value_gain=gain.to(setup.device)[:, setup.kv_head].T)

    @property
    def text(self) -> str:
        return f"wrong read of the cache: {self.name.replace('_', ' ')}"
