"""Proposals: the rules that are tried, chosen by what the measured weights look like."""

from collections.abc import Iterable, Iterator

import torch

from attnlab.weights.evidence import Traits
from attnlab.weights.fit import Law
from attnlab.weights.key_rules import KeyTimes, NoKeys, TopLeftMask, ZeroKeys
from attnlab.weights.magnitudes import fit_magnitudes, rules_of
from attnlab.weights.partition import LAST, LAST_SEEN, Partition
from attnlab.weights.plan import Plan
from attnlab.weights.rescale import Rescale
from attnlab.weights.rule import Constant, Edge, Rule, constants_near
from attnlab.weights.score_rules import (
    SINK_FAULTS,
    AlibiFactor,
    AlibiOrigin,
    Gain,
    LoopBase,
    MaskCapped,
    NotRescaled,
    Power,
    ScoreFactor,
    Sinks,
    Softcap,
)
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.slot_rules import HEAD_FORMS, SLOPE_FORMS, KeyHead, OtherSlots, SlopeOf
from attnlab.weights.stored_rules import StoredRead
from attnlab.weights.tile_rules import fitted_tiles, partitions

START = Edge("start")
_TILES = (8, 16, 32, 64, 128, 256)
_SHIFTS = (1, 2, 3)
_POWERS = ("0", "ln(2)", "log2(e)", "2", "-1")


def tile_sizes(setup: AttentionSetup) -> tuple[int, ...]:
    """Return the numbers of keys that a loop may take at once, as far as they matter here."""
    longest = int(setup.seq_len.max())
    sizes = {setup.call.block_size, *_TILES}
    below = sorted(size for size in sizes if size > 1)
    return tuple(size for size in below if size < 2 * longest) or (below[0],)


def proposals(
    plan: Plan, measured: torch.Tensor, traits: Traits, law: Law | None
) -> Iterator[Rule]:
    """Yield the rules that may explain the measured weights [R, H, N], given those that the plan has."""
    if bool((measured == 0).all()):
        yield NoKeys()
        return
    if plan.setup.stored is not None:
        yield from (StoredRead(name) for name in plan.setup.stored.reads)
    if traits.extra or traits.missing or traits.law:
        yield from _slots(plan.setup, traits)
    yield from _keys(plan.setup, traits)
    if traits.law or traits.parts or traits.extra:
        yield from _scores(plan, law)
        yield from _heads(plan)
    if traits.law or traits.sums:
        yield from _rescales(plan.setup)
    if traits.sums or traits.parts or plan.sinks is not None:
        yield from _sums(plan, measured)


def _ofs(traits: Traits, extra: bool) -> tuple[str, ...]:
    """Return which parts of the quotient a key rule may concern."""
    changed = traits.extra if extra else traits.missing or traits.law
    found = (*(("both",) if changed else ()), *(("values",) if changed and traits.sums else ()))
    return (*found, *(("sum",) if traits.sums else ()))


def _keys(setup: AttentionSetup, traits: Traits) -> Iterator[Rule]:
    """Yield a mask that is aligned wrongly, extra keys, missing ones, then keys that count twice."""
    if setup.call.visibility.is_plain and bool((setup.ctx_len > 0).any()):
        yield TopLeftMask()
    for of in _ofs(traits, True):
        for part, begin, end in _extra(setup):
            yield KeyTimes(part, begin, end, 1.0, of)
    for of in _ofs(traits, False):
        for part, begin, end in _inner(setup):
            yield KeyTimes(part, begin, end, 0.0, of)
            if traits.law or traits.sums:
                yield KeyTimes(part, begin, end, 2.0, of)


def parts_of(setup: AttentionSetup) -> tuple[tuple[str, str], ...]:
    """Return the parts of the keys that rows read, each with the feature at which it ends."""
    arguments = bool((setup.cached < setup.seq_len).any())
    cached = bool((setup.cached > 0).any())
    return (
        *((("cache", "cache end"),) if cached else ()),
        *((("new", "row"),) if arguments else ()),
    )


def _extra(setup: AttentionSetup) -> Iterator[tuple[str, Edge, Edge]]:
    """Yield ranges of keys that must not count."""
    tiles = tile_sizes(setup)
    for part, feature in parts_of(setup):
        for shift in (*_SHIFTS, setup.call.block_size):
            yield part, Edge(feature), Edge(feature, shift)
            yield part, Edge(feature), Edge(feature, shift, inside=True)
            for tile in tiles:
                yield part, Edge(feature), Edge(feature, shift, within=tile)
        for tile in tiles:
            yield part, Edge(feature), Edge(feature, up=tile)
            yield part, Edge(feature), Edge("sequence", up=tile)
        for end in (Edge("sequence"), Edge("sequence", 1), Edge("row")):
            yield part, Edge(feature), end
    if setup.call.sliding_window:
        yield from _before_window(setup)
    if len(parts_of(setup)) > 1:
        yield "all", Edge("row"), Edge("sequence")


def _before_window(setup: AttentionSetup) -> Iterator[tuple[str, Edge, Edge]]:
    """Yield ranges of keys before the sliding window."""
    window = Edge("window")
    for part in ("all", *(part for part, _ in parts_of(setup))):
        yield part, START, window
        for shift in _SHIFTS:
            yield part, Edge("window", -shift), window
            for tile in tile_sizes(setup):
                yield part, Edge("window", -shift, within=tile), window
        for tile in tile_sizes(setup):
            yield part, Edge("window", down=tile), window


def _inner(setup: AttentionSetup) -> Iterator[tuple[str, Edge, Edge]]:
    """Yield ranges of keys that must count once."""
    for part, feature in parts_of(setup):
        end = Edge(feature)
        first = "context" if part == "new" else "start"
        for shift in _SHIFTS:
            yield part, Edge(feature, -shift), end
            yield part, Edge(first), Edge(first, shift)
        for tile in tile_sizes(setup):
            yield from _tiles(setup, part, feature, first, tile)
        yield part, Edge(first), end
    for part in ("all", *(part for part, _ in parts_of(setup))):
        for shift in _SHIFTS:
            if setup.call.sliding_window:
                yield part, Edge("window"), Edge("window", shift)
            if part == "all":
                yield part, Edge("row", -shift), Edge("row")


def _tiles(
    setup: AttentionSetup, part: str, feature: str, first: str, tile: int
) -> Iterator[tuple[str, Edge, Edge]]:
    """Yield single tiles of keys, the part of a last one, and all after the first."""
    end, last = Edge(feature), Edge("sequence")
    yield part, Edge(feature, down=tile), end
    yield part, Edge(feature, -tile, up=tile), end
    yield part, Edge(feature, -tile, down=tile), Edge(feature, down=tile)
    for index in range(min(4, int(setup.seq_len.max()) // tile + 1)):
        yield part, Edge(first, index * tile), Edge(first, (index + 1) * tile)
    yield part, Edge(first, tile), end
    yield part, Edge("sequence", -tile, up=tile), last
    yield part, Edge("sequence", down=tile), last


def _scores(plan: Plan, law: Law | None) -> Iterator[Rule]:
    """Yield factors of scores, soft caps and slopes."""
    setup = plan.setup
    names = [Constant(name) for name in ("log2(e)", "ln(2)", "2", "1/2")]
    found = names if law is None else constants_near(law.score, setup, 0.02)
    for constant in found:
        yield ScoreFactor(constant)
        yield Power(constant)
    for part, _ in parts_of(setup):
        for name in (
            "k_scale",
            "1/k_scale",
            "v_scale/k_scale",
            "v_scale",
            "log2(e)",
            "ln(2)",
            "2",
            "1/2",
        ):
            yield ScoreFactor(Constant(name), part)
    if plan.slopes is not None:
        for name in ("0", "-1", "log2(e)", "ln(2)", "sm_scale", "1/sm_scale", "2"):
            yield AlibiFactor(Constant(name))
        yield from (SlopeOf(form) for form in SLOPE_FORMS)
        yield AlibiOrigin()
    if plan.softcap is not None:
        yield Softcap("none")
        yield Softcap("before scale")
        if plan.slopes is not None:
            yield Softcap("after bias")
        for name in ("log2(e)", "ln(2)", "2", "1/2"):
            yield Softcap("score", Constant(name))
        yield from (MaskCapped(tile) for tile in (0, *tile_sizes(setup)))


def _heads(plan: Plan) -> Iterator[Rule]:
    """Yield the keys of other KV heads."""
    yield from (KeyHead(form) for form in HEAD_FORMS)


def _rescales(setup: AttentionSetup) -> Iterator[Rule]:
    """Yield wrong rescales of running sums and of merged parts."""
    loops = ("all", "context", "new") if len(parts_of(setup)) > 1 else ("all",)
    tiles = tile_sizes(setup)
    for tile in tiles:
        for loop in loops:
            for base in ("ln(2)", "log2(e)"):
                steps = Partition(tile, loop=loop)
                yield LoopBase(Rescale(of="both", steps=steps, power=1.0), Constant(base))
    for power in _POWERS:
        running = (Partition(tile, loop=loop) for tile in (1, *tiles) for loop in loops)
        merged = (Partition(tile) for tile in tiles)
        of_parts = [one for one in partitions(setup, tiles, (None,)) if one.parts]
        yield from _not_rescaled((*running, *of_parts), power, split=False)
        yield from _not_rescaled((*merged, *of_parts), power, split=True)
    yield from _not_rescaled(partitions(setup, tiles, (1, 2, 3, LAST, LAST_SEEN)), "0", split=False)
    yield from _not_rescaled(partitions(setup, tiles, (0, 1, 2, LAST, LAST_SEEN)), "0", split=True)


def _not_rescaled(steps: Iterable[Partition], power: str, *, split: bool) -> Iterator[Rule]:
    """Yield that the weighted sum, the denominator or both are rescaled with this power."""
    for one in steps:
        for of in ("values", "sum", "both"):
            rescale = Rescale(of=of, steps=one, power=1.0, split=split)
            yield NotRescaled(rescale, Constant(power))


def combinations(plan: Plan, measured: torch.Tensor, traits: Traits) -> Iterator[tuple[Rule, ...]]:
    """Yield rules with numbers that are fitted to the measured weights [R, H, N], alone or together."""
    if not (traits.law or traits.parts or traits.sums):
        return
    found = fit_magnitudes(plan, measured)
    if found is not None:
        yield from rules_of(found, plan)
    yield from ((one,) for one in fitted_tiles(plan, measured, tile_sizes(plan.setup)))


def _sums(plan: Plan, measured: torch.Tensor) -> Iterator[Rule]:
    """Yield what changes the sum of the weights alone."""
    setup = plan.setup
    for part, feature in parts_of(setup):
        for shift in _SHIFTS:
            yield ZeroKeys(Edge(feature), Edge(feature, shift), part)
            for tile in tile_sizes(setup):
                yield ZeroKeys(Edge(feature), Edge(feature, shift, within=tile), part)
        for tile in tile_sizes(setup):
            yield ZeroKeys(Edge(feature), Edge(feature, up=tile), part)
            yield ZeroKeys(Edge(feature), Edge("sequence", up=tile), part)
            yield ZeroKeys(Edge("sequence"), Edge("sequence", up=tile), part)
    if plan.sinks is not None:
        yield from (Sinks(how) for how in SINK_FAULTS)
        if plan.slopes is not None:
            yield AlibiOrigin()
    total, right = measured.sum(-1), plan.weights().sum(-1)
    factor = float((total / right.clamp(min=1e-12)).median())
    for constant in constants_near(factor, setup, 0.01):
        yield Gain(constant)
    for part, _ in parts_of(setup):
        for name in ("k_scale", "1/k_scale", "k_scale/v_scale", "v_scale", "1/v_scale", "2", "1/2"):
            yield Gain(Constant(name), part)


def _slots(setup: AttentionSetup, traits: Traits) -> Iterator[Rule]:
    """Yield other blocks and positions."""
    size = setup.call.block_size
    begins = (START, Edge("start", size), Edge("cache end", -1), Edge("cache end", down=size))
    several = len(setup.call.seq_lens) > 1
    for of in ("both", "value", "key"):
        for begin in begins:
            for row in ("first", "next", "previous", "last") if several else ():
                yield OtherSlots(of, row, begin=begin)
            for column in (-1, 1):
                yield OtherSlots(of, column=column, begin=begin)
            for shift in (-1, 1):
                yield OtherSlots(of, shift=shift, begin=begin)
                for slots in (1, size):
                    yield OtherSlots(of, slot_shift=shift * slots, begin=begin)
        for tile in (*tile_sizes(setup), 4):
            if tile != size:
                yield OtherSlots(of, divisor=tile)
                yield OtherSlots(of, modulus=tile)
                yield OtherSlots(of, divisor=tile, modulus=tile)
