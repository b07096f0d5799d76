"""Search: find the descriptions that explain measured weights, simplest first.

Each rule is tried on a sample of rows and heads. One that explains every weight within the bound is checked
on all of them. If none does, the best are combined with a second and a third rule.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from attnlab.weights.fit import (
    Evidence,
    Law,
    Traits,
    compare,
    explained,
    fit_law,
    fit_magnitudes,
    right_weights,
    rules_of,
    traits_of,
)
from attnlab.weights.plan import (
    EVERYTHING,
    LAST,
    LAST_SEEN,
    Constant,
    Description,
    Edge,
    Partition,
    Plan,
    Rescale,
    Rule,
    Scope,
    constants_near,
    right_plan,
)
from attnlab.weights.rules import (
    HEAD_FORMS,
    SINK_FAULTS,
    SLOPE_FORMS,
    AlibiFactor,
    AlibiOrigin,
    Gain,
    KeyHead,
    KeyTimes,
    LoopBase,
    MaskCapped,
    NoKeys,
    NotRescaled,
    OtherSlots,
    Power,
    ScoreFactor,
    Sinks,
    SlopeOf,
    Softcap,
    StoredRead,
    TopLeftMask,
    ZeroKeys,
    fitted_tiles,
    partitions,
)
from attnlab.weights.setup import AttentionSetup

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
        yield from (KeyHead(form) for form in HEAD_FORMS)
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
        yield part, Edge(first), end
        if part == "new" and not setup.call.visibility.is_plain:
            yield part, Edge(first), Edge("sequence")
        for shift in _SHIFTS:
            yield part, Edge(feature, -shift), end
            yield part, Edge(first), Edge(first, shift)
        for tile in tile_sizes(setup):
            yield from _tiles(setup, part, feature, first, tile)
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
    if plan.softcap is not None:  # the law of capped scores says little of their factor
        yield from (ScoreFactor(Constant(name)) for name in ("sm_scale", "1/sm_scale"))
    for part, _ in parts_of(setup):
        for name in ("k_scale", "1/k_scale", "v_scale/k_scale", "v_scale"):
            yield ScoreFactor(Constant(name), part)
        yield from (ScoreFactor(constant, part) for constant in names)
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
        yield from (Softcap("score", constant) for constant in names)
        yield from (MaskCapped(tile) for tile in (0, *tile_sizes(setup)))


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


MAX_RULES = 3
_ROWS, _HEADS = 12, 3
_BEAM = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The descriptions that explain all weights, simplest first; empty if none was found in time.

    ``tried``: the number of descriptions that were tried.
    """

    descriptions: tuple[Description, ...]
    tried: int


@dataclass(slots=True, eq=False)
class Search:
    """The search for descriptions of measured weights [R, H, N], finite in every row of the setup."""

    setup: AttentionSetup
    measured: torch.Tensor
    limit_s: float
    max_rules: int = MAX_RULES
    tried: int = 0
    # of this thread: other work does not count
    began: float = field(default_factory=time.thread_time)

    def run(self) -> Found:
        """Return what explains the weights."""
        wrong = ~explained(self.setup, self.measured, right_weights(self.setup), 1.0)
        for depth in range(1, self.max_rules + 1):
            for scope in scopes(self.setup, wrong):
                found = self._search(scope, wrong, depth)
                if depth == 1 and not found:
                    found = list(self._fitted(scope, wrong))
                if found:
                    found += self._narrower(found, wrong)
                    found.sort(key=lambda one: one.complexity)
                    return Found(descriptions=tuple(found), tried=self.tried)
                if self._is_late():
                    break
        return Found(descriptions=(), tried=self.tried)

    def _is_late(self) -> bool:
        return time.thread_time() - self.began > self.limit_s

    def _search(self, scope: Scope, wrong: torch.Tensor, depth: int) -> list[Description]:
        """Return the descriptions of ``depth`` rules that explain everything."""
        rows, heads = sample(self.setup, wrong, scope)
        setup = self.setup.take(rows, heads)
        measured = self.measured[rows][:, heads]
        beam: list[tuple[float, tuple[Rule, ...], Plan]] = [(0.0, (), right_plan(setup))]
        whole: list[Description] = []
        for level in range(depth):
            scored: list[tuple[float, tuple[Rule, ...], Plan]] = []
            for cost, rules, plan, evidence in self._level(
                setup, measured, beam, level < depth - 1
            ):
                if evidence.complete and level == depth - 1:
                    one = Description(rules=rules, scope=scope)
                    if self.explains(one):
                        whole.append(one)
                scored.append((cost, rules, plan))
            scored.sort(key=lambda one: one[0])
            beam = scored[:_BEAM]
        return whole

    def _narrower(self, found: list[Description], wrong: torch.Tensor) -> list[Description]:
        """Return descriptions of all rows for the kernel of the wrong rows alone.

        They predict the same here if the rules change no other row of this call. Another case decides.
        """
        kernels = [one for one in scopes(self.setup, wrong) if one.kernels and one.heads is None]
        return [
            Description(rules=one.rules, scope=scope)
            for one in found
            for scope in kernels
            if one.scope == EVERYTHING
        ]

    def _fitted(self, scope: Scope, wrong: torch.Tensor) -> Iterator[Description]:
        """Yield the descriptions with fitted numbers that explain everything."""
        rows, heads = sample(self.setup, wrong, scope, len(self.setup.heads))
        setup, measured = self.setup.take(rows, heads), self.measured[rows][:, heads]
        plan = right_plan(setup)
        predicted = plan.weights()
        traits = traits_of(setup, measured, predicted, predicted > 0)
        for rules in combinations(plan, measured, traits):
            if self._is_late():
                return
            self.tried += 1
            one = Description(rules=rules, scope=scope)
            changed = one.plan(plan)
            if compare(setup, measured, changed.weights()).complete and self.explains(one):
                yield one

    def _level(
        self,
        setup: AttentionSetup,
        measured: torch.Tensor,
        beam: list[tuple[float, tuple[Rule, ...], Plan]],
        ranked: bool,
    ) -> Iterator[tuple[float, tuple[Rule, ...], Plan, Evidence]]:
        """Yield every rule added to every plan of the beam, with its cost and its evidence.

        A second fitted number would only correct the first.
        """
        for _, rules, plan in beam:
            has_fitted = any(one.is_fitted for one in rules)
            predicted = plan.weights()
            traits = traits_of(setup, measured, predicted, predicted > 0)
            law = fit_law(plan, measured)
            for rule in proposals(plan, measured, traits, law):
                if self._is_late():
                    return
                if rule.is_fitted and has_fitted:
                    continue
                self.tried += 1
                new = rule.apply(plan)
                weights = new.weights()
                if torch.equal(weights, predicted):
                    continue
                evidence = compare(setup, measured, weights)
                left = traits_of(setup, measured, weights, weights > 0).count if ranked else 0
                yield 1e6 * left + evidence.cost, (*rules, rule), new, evidence

    def explains(self, one: Description) -> bool:
        """Answer whether a description explains every row and head, and changes those that are wrong."""
        return bool(explained(self.setup, self.measured, one.weights(self.setup)).all())


def scopes(setup: AttentionSetup, wrong: torch.Tensor) -> Iterator[Scope]:
    """Yield the scopes that contain all wrong rows and heads: everything first, then smaller ones."""
    yield EVERYTHING
    rows, heads = wrong.any(1), wrong.any(0)
    kernels = {name for name, bad in zip(setup.kernels, rows.tolist(), strict=True) if bad}
    kernel_scope = tuple(sorted(kernels)) if kernels != set(setup.kernels) else None
    head_scope = tuple(setup.heads[heads].tolist()) if not bool(heads.all()) else None
    seqs = setup.seq[rows].unique()
    seq_scope = tuple(seqs.tolist()) if len(seqs) < len(setup.seq.unique()) else None
    if kernel_scope is not None:
        yield Scope(kernels=kernel_scope)
    if head_scope is not None:
        yield Scope(kernels=kernel_scope, heads=head_scope)
    if seq_scope is not None and kernel_scope is None:
        yield Scope(seqs=seq_scope, heads=head_scope)


def sample(
    setup: AttentionSetup, wrong: torch.Tensor, scope: Scope, most_heads: int = _HEADS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and heads to try rules on, as indices: wrong ones first, spread over sequences."""
    rows, heads = scope.rows_of(setup), scope.heads_of(setup)
    row_order = _spread(torch.nonzero(rows).flatten(), wrong.any(1), setup.seq, _ROWS)
    head_order = _spread(torch.nonzero(heads).flatten(), wrong.any(0), setup.kv_head, most_heads)
    return row_order, head_order


def _spread(
    indices: torch.Tensor, wrong: torch.Tensor, group: torch.Tensor, most: int
) -> torch.Tensor:
    """Return at most ``most`` of the indices, from every group in turn, wrong ones first; ascending."""
    if len(indices) <= most:
        return indices
    queues: dict[int, list[int]] = {}
    generator = torch.Generator().manual_seed(0)
    shuffled = indices[torch.randperm(len(indices), generator=generator)]
    for index in sorted(shuffled.tolist(), key=lambda i: not bool(wrong[i])):
        queues.setdefault(int(group[index]), []).append(index)
    picked: list[int] = []
    while len(picked) < most:
        for queue in queues.values():
            if queue and len(picked) < most:
                picked.append(queue.pop(0))
    return torch.tensor(sorted(picked))
