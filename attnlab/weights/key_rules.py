"""Rules about which keys count: missing, extra, counted twice, or only in the denominator."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.weights.fit import usable
from attnlab.weights.plan import LAST, LAST_SEEN, Partition, Plan
from attnlab.weights.rule import PARTS, Constant, Edge, Rule
from attnlab.weights.setup import AttentionSetup, misread

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
        parts = (
            self.row != "own",
            self.column,
            self.divisor,
            self.modulus,
            self.shift,
            self.slot_shift,
        )
        return sum(map(bool, parts)) + (self.of != "both") + (self.begin != _START)

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

    form: str

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        return plan.change(kv_head=other_head(self.form, setup))

    @property
    def text(self) -> str:
        return f"query heads use the keys of other KV heads: {self.form}"


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

    form: str

    def apply(self, plan: Plan) -> Plan:
        slopes = plan.setup.call.alibi_slopes
        if slopes is None:
            return plan
        index = _SLOPES_OF[self.form](plan.setup, len(slopes))
        return plan.change(slopes=slopes.cpu().double()[index])

    @property
    def text(self) -> str:
        return f"ALiBi's slopes are those of {self.form}"


# StoredRead: a rule about caches with a scale per token and head: they are read in a wrong way.


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
