"""What an X-ray measured in one call, in words: weight_facts with its numbers, weight_traits without."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attnlab.weights.codes import NONE
from attnlab.weights.measurement import Examined
from attnlab.weights.plan import numbers, right_keys
from attnlab.weights.setup import AttentionSetup
from attnlab.weights.xray import XRay

_FLOOR = 4.0  # absolute precisions: a weight up to this is none
_CLEAR = 50.0  # floors of a weight whose factor is known
_SURE = 8.0  # floors that a weight must have to be missed
_SAME = 4.0  # bounds within which weights have one factor
_MOST = 2000  # wrong rows × heads; with more of them, no fact is stated
MOST_FACTS = 3
_MOST_RUNS = 3  # ranges of keys that are listed
_SEVERAL = {"s": "", "its": "their", "has": "have"}
_EDGES = {
    "all keys of the context": "the {0} keys of the context",
    "the last keys": "the last {0} of {its} keys",
    "the first keys": "the first {0} of {its} keys",
}
_LOST = "keys that must count have no weight"
_LESS = "the weights sum to less than is right"
_MORE = "the weights sum to more than is right"
_SAME_FACTOR = "every key has the same multiple of its weight"
_RISES = "earlier keys weigh too little in comparison with later ones"
_FALLS = "earlier keys weigh too much in comparison with later ones"
_NONE, _OWN = "no key has a weight", "the key of the row itself has no weight"
_IMPLIED = {
    _NONE: (_LOST, _LESS),
    **{f"{which} have no weight": (_LOST,) for which in _EDGES},
    _OWN: (_LOST,),
}
_FACTORS = {1.0: "all of", 0.5: "half of", 0.25: "a quarter of", 2.0: "twice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFact:
    """What was measured of the weights of some rows and heads: ``text`` in words, ``kind`` in one word."""

    kind: str
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """A statement whose numbers differ by row: ``text`` has {0}, {1}, … for ``ranges``, each the least and
    the largest number of the heads."""

    text: str
    ranges: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What was measured in one row: ``words`` from the most specific to the most general statement.

    The first holds these positions, those between relate them to the row, and the last counts them.
    ``traits``: as in :func:`weight_traits`, each with its heads.
    """

    kind: str
    row: int
    heads: tuple[int, ...]
    words: tuple[_Words, ...]
    traits: tuple[tuple[str, tuple[int, ...]], ...]


def weight_facts(found: XRay) -> tuple[WeightFact, ...]:
    """Return at most three facts about wrong weights, that of most rows and heads first.

    Rows with one fact are grouped. A weight must be off by four rounding bounds. Rows that are not written,
    and rows whose query is not finite, have none. A call with thousands of wrong rows and heads has none,
    either: this would take seconds.
    """
    seen: dict[str, list[_Seen]] = {}
    for one in _all_seen(found.examined.on_cpu):
        seen.setdefault(one.kind, []).append(one)
    most = MOST_FACTS if len(seen) == 1 else 2  # groups of rows of one kind
    facts = [fact for several in seen.values() for fact in _grouped(found.setup, several, most)]
    facts.sort(key=lambda one: (-len(one.rows) * len(one.heads), one.rows))
    return tuple(facts[:MOST_FACTS])


def weight_traits(found: Examined) -> dict[str, torch.Tensor] | None:
    """Return what is wrong with the weights of rows and heads, each with these: [rows, heads] bool.

    The sentences have no numbers, so that they can be compared with those of other calls. Rows without facts
    (:func:`weight_facts`) have no traits. All tensors of ``found`` are on the CPU. None if thousands of rows
    and heads are wrong.
    """
    if int(_wrong(found).sum()) > _MOST:
        return None
    traits: dict[str, torch.Tensor] = {}
    for one in _all_seen(found):
        for text, heads in one.traits:
            cells = traits.setdefault(text, torch.zeros(found.expected.shape[:2], dtype=torch.bool))
            cells[one.row, list(heads)] = True
    return traits


def without_implied(traits: Iterable[str]) -> list[str]:
    """Return traits without those that follow from others."""
    left = list(traits)
    for one in {*left} & _IMPLIED.keys():
        left = [other for other in left if other not in _IMPLIED[one]]
    return left


def _all_seen(found: Examined) -> Iterator[_Seen]:
    """Yield what was measured in rows with wrong weights; nothing if there are thousands of them."""
    setup, wrong = found.setup, _wrong(found)
    chosen = wrong.any(1) & setup.query.isfinite().flatten(1).all(1)
    rows = torch.nonzero(chosen & ~found.measurement.unwritten).flatten().tolist()
    if int(wrong.sum()) > _MOST:
        return
    visible = right_keys(setup)
    for row in rows:
        yield from _of_row(found, row, wrong[row], visible[row])


def _wrong(found: Examined) -> torch.Tensor:
    """Return which rows and heads have weights that are off by more than some bounds, [rows, heads] bool."""
    error = (found.measurement.weights - found.expected).abs()
    return ~(error <= _SAME * found.bound).all(-1)


def _grouped(setup: AttentionSetup, seen: list[_Seen], most: int) -> Iterator[WeightFact]:
    """Yield facts of rows with one kind: by positions that all share, else by a relation that all share, else
    by the positions of up to ``most`` groups, else by what is true of all."""
    texts = [[words.text for words in one.words] for one in seen]
    relation = next((text for text in texts[0][:-1] if all(text in known for known in texts)), None)
    if relation is not None:
        yield _fact(setup, seen, relation)
        return
    level = 0 if len({known[0] for known in texts}) <= most else -1
    for text in sorted({known[level] for known in texts}):
        some = [one for one in seen if one.words[level].text == text]
        yield _fact(setup, some, text)


def _fact(setup: AttentionSetup, seen: list[_Seen], text: str) -> WeightFact:
    """Return the fact of rows that share a statement, with the ranges of its numbers."""
    rows = sorted({one.row for one in seen})
    ranges = [next(words.ranges for words in one.words if words.text == text) for one in seen]
    texts = [_range(column) for column in zip(*ranges, strict=True)]
    is_one = len(rows) == 1
    forms = {"s": "s", "its": "its", "has": "has"} if is_one else _SEVERAL
    seqs, names = sorted(set(setup.seq[rows].tolist())), setup.rows[rows].tolist()
    where = f"row{'' if is_one else 's'} {numbers(names)}"
    if is_one:
        token = int(setup.position[rows[0]] - setup.ctx_len[rows[0]])
        where += f" (sequence {seqs[0]}, token {token})"
    elif len(seqs) == 1:
        where += f" (sequence {seqs[0]})"
    heads = sorted({head for one in seen for head in one.heads})
    if len({one.heads for one in seen}) > 1:
        where += ", in some heads,"
    elif len(heads) < len(setup.heads):
        where += f", head{'' if len(heads) == 1 else 's'} {numbers(setup.heads[heads].tolist())},"
    return WeightFact(
        kind=seen[0].kind,
        rows=tuple(names),
        heads=tuple(setup.heads[heads].tolist()),
        text=f"{where} {text.format(*texts, **forms)}",
    )


def _range(ranges: Sequence[tuple[float, float]]) -> str:
    least = f"{min(low for low, _ in ranges):.4g}"
    most = f"{max(high for _, high in ranges):.4g}"
    return least if least == most else f"{least} to {most}"


def _ends(numbers: torch.Tensor) -> tuple[float, float]:
    return float(numbers.min()), float(numbers.max())


def _of_row(
    found: Examined, row: int, is_wrong: torch.Tensor, visible: torch.Tensor
) -> Iterator[_Seen]:
    """Yield what was measured in a row, for the heads that share it; ``is_wrong``: [H], ``visible``: [E]."""
    wrong = torch.nonzero(is_wrong).flatten()
    weights = found.measurement.weights[row, wrong]
    is_finite = weights.isfinite().all(1)
    is_none = (weights == 0).all(1) & bool(visible.any())
    for kind, chosen, text, traits in (
        (
            "not finite",
            ~is_finite,
            "{has} no finite weight, with finite keys and values",
            ("no weight is finite, with finite keys and values",),
        ),
        ("none", is_none, "give{s} no weight to any key", (_LOST, _NONE, _LESS)),
    ):
        heads = tuple(wrong[chosen].tolist())
        if heads:
            words, of_all = (_Words(text=text),), tuple((one, heads) for one in traits)
            yield _Seen(kind=kind, row=row, heads=heads, words=words, traits=of_all)
    groups: list[list[int]] = []
    for head in wrong[is_finite & ~is_none].tolist():
        known = next(
            (one for one in groups if _Keys(found, row, visible, [*one, head]).agree), None
        )
        if known is None:
            groups.append([head])
        else:
            known.append(head)
    for group in groups:
        yield _Keys(found, row, visible, group).seen()


class _Keys:
    """The weights of the keys of one row, for some heads."""

    def __init__(self, found: Examined, row: int, visible: torch.Tensor, heads: list[int]) -> None:
        setup = found.setup
        self.found, self.row, self.heads = found, row, heads
        self.position = int(setup.position[row])
        slots = setup.entry_slot[row][visible]
        positions, order = setup.entry_position[row][visible].sort()
        self.at, self.slots = positions, slots[order]
        self.floor = _FLOOR * float(setup.fixed[row])
        weights = found.measurement.weights[row, heads]
        self.measured, self.expected = (
            weights[:, self.slots],
            found.expected[row, heads][:, self.slots],
        )
        is_hidden = torch.ones(setup.num_slots, dtype=torch.bool)
        is_hidden[self.slots] = False
        self.extra = torch.nonzero(is_hidden & (weights > self.floor).any(0)).flatten()
        self.extra_sum = weights[:, self.extra].sum(1)
        self.missing, self.present = self._presence()

    def _presence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which keys have no weight in a head, and which have one in a head, both [K] bool.

        A key whose weight may be too small to be measured is neither.
        """
        if not len(self.at):
            none = torch.zeros(0, dtype=torch.bool)
            return none, none
        known = (self.measured > self.floor) & (self.expected > _CLEAR * self.floor)
        ratio = torch.where(known, self.measured / self.expected, torch.nan)
        usual = ratio.nanmedian(1, keepdim=True).values.nan_to_num(1.0)
        is_none = self.measured.abs() <= self.floor
        missing = is_none & (self.expected * usual.clamp(max=1.0) > _SURE * self.floor)
        # another softmax scale makes small weights vanish: these keys are not skipped
        is_law = ~self._is_close(self.measured, usual * self.expected) & known
        middle = torch.where(known, self.expected, torch.nan).nanmedian(1, keepdim=True).values
        heaviest = torch.where(missing, self.expected, 0.0).amax(1, keepdim=True)
        missing &= ~is_law.any(1, keepdim=True) | (heaviest > middle.nan_to_num(0.0))
        return missing.any(0), (self.measured > self.floor).any(0)

    @property
    def agree(self) -> bool:
        """Answer whether no head gives a weight to a key that another one does not read."""
        return not bool((self.missing & self.present).any())

    def seen(self) -> _Seen:
        """Return what was measured."""
        kinds, rest = [], self._rest()
        words: list[_Words] = [_Words(text="")]
        if bool(self.missing.any()):
            kinds.append("missing")
            words = list(self._missing())
        if len(self.extra):
            kinds.append("extra")
            more = self._extra()
            link = ", and a weight to " if bool(self.missing.any()) else "give{s} a weight to "
            words = [_joined(one, link, more) for one in words]
        if not kinds:
            kinds.append("factors")
            words = list(self._factors())
        elif rest is not None:
            words = [_joined(one, "; ", rest) for one in words]
        return _Seen(
            kind=" and ".join(kinds),
            row=self.row,
            heads=tuple(self.heads),
            words=tuple(words),
            traits=tuple(self._traits()),
        )

    def _traits(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield what is wrong, without numbers, each with its heads.

        A key without a weight concerns all heads: none gives it one, and it may be too small to be measured.
        """
        every = tuple(self.heads)
        if bool(self.missing.any()):
            yield _LOST, every
            if bool(self.missing[self.at == self.position].any()):
                yield _OWN, every
            yield from ((f"{which} have no weight", every) for which, _ in self._edges())
        for kind in self._kinds_of_extra():
            yield f"{kind} have a weight and must not count", every
        if not len(self.at):  # the row must see no key
            return
        more = self.measured.sum(1) + self.extra_sum - self.expected.sum(1)
        bound = _SAME * float(self.found.setup.relative[self.row]) + self.floor * len(self.at)
        known = self.expected > _CLEAR * self.floor
        ratio, spread = self._spread()
        low = (ratio - spread).masked_fill(~known, -torch.inf)
        high = (ratio + spread).masked_fill(~known, torch.inf)
        differs, is_whole = low.amax(1) > high.amin(1), not bool(self.missing.any())
        for text, chosen in (
            (_LESS, more < -bound),
            (_MORE, more > bound),
            (_SAME_FACTOR, known.any(1) & ~differs & (is_whole and not len(self.extra))),
            (_RISES, differs & (low.cummax(1).values <= high).all(1)),
            (_FALLS, differs & (high.cummin(1).values >= low).all(1)),
        ):
            if bool(chosen.any()):
                yield text, tuple(head for head, is_so in zip(every, chosen, strict=True) if is_so)

    def _missing(self) -> Iterator[_Words]:
        """Yield statements about the keys without a weight."""
        missing = torch.nonzero(self.missing).flatten()
        runs = self._runs(missing.tolist())
        is_own = len(missing) == 1 and int(self.at[missing[0]]) == self.position
        if len(runs) <= _MOST_RUNS:
            text = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)
            noun = "key" if runs == [(runs[0][0], runs[0][0])] else "keys"
            own = ", {its} own" if is_own else ""
            yield _Words(text=f"give{{s}} no weight to {noun} {text}{own}")
        if is_own:
            yield _Words(text="give{s} no weight to {its} own key")
        for which, count in self._edges():
            text = _EDGES[which]
            yield _Words(text=f"give{{s}} no weight to {text}", ranges=((count, count),))
        count = sum(b - a + 1 for a, b in runs)
        yield _Words(text="give{s} no weight to {0} of {its} keys", ranges=((count, count),))

    def _edges(self) -> Iterator[tuple[str, int]]:
        """Yield which keys without a weight are the first or the last ones, as in _EDGES, and how many."""
        missing, present = torch.nonzero(self.missing).flatten(), self.present
        first, last = int(missing[0]), int(missing[-1])
        context = int((self.at < int(self.found.setup.ctx_len[self.row])).sum())
        if last < context and not bool(present[:context].any()):
            yield "all keys of the context", context
        if not bool(present[first:].any()):
            yield "the last keys", len(self.at) - first
        if not bool(present[: last + 1].any()):
            yield "the first keys", last + 1

    def _runs(self, missing: list[int]) -> list[tuple[int, int]]:
        """Return ranges of positions without a weight: from one key that is missed to another, with none
        between that has a weight."""
        runs: list[list[int]] = []
        for one in missing:
            if runs and not bool(self.present[runs[-1][1] : one].any()):
                runs[-1][1] = one
            else:
                runs.append([one, one])
        return [(int(self.at[a]), int(self.at[b])) for a, b in runs]

    def _extra(self) -> _Words:
        """Return how many keys have a weight that the row must not see, and which."""
        which = ", ".join(self._kinds_of_extra()).replace("its", "{its}")
        text = f"keys that must not count: {which} ({{0}})"
        return _Words(text=text, ranges=((len(self.extra), len(self.extra)),))

    def _kinds_of_extra(self) -> list[str]:
        """Return which keys have a weight that the row must not see, in words."""
        owners, seq = self.found.owners, int(self.found.setup.seq[self.row])
        kinds = []
        for slot in self.extra.tolist():
            owner, at = int(owners.seq[slot]), int(owners.position[slot])
            if owner == NONE:
                kinds.append("slots of no sequence")
            elif owner != seq:
                kinds.append("keys of other sequences")
            elif bool(owners.is_tail[slot]):
                kinds.append("slots after the end of its sequence")
            else:
                kinds.append("later keys" if at > self.position else "earlier keys")
        return sorted(set(kinds))

    def _rest(self) -> _Words | None:
        """Return how the other keys' weights are wrong, too, or None if they follow from what is missing and
        extra."""
        kept = ~self.missing
        measured, expected = self.measured[:, kept], self.expected[:, kept]
        known = expected.sum(1) > _CLEAR * self.floor
        if not bool(known.all()):
            more = (measured.sum(1) - expected.sum(1))[~known]
            return (
                _Words(text="other keys have more weight than is right")
                if bool((more > self.floor).any())
                else None
            )
        extra = self.extra_sum
        factor = measured.sum(1) / expected.sum(1)
        if not bool(self._is_close(measured, factor[:, None] * expected).all()):
            text = "{its} other keys have {0} times their weight"
            return _Words(text=text, ranges=(_ends(self._ratios(measured, expected)),))
        lost = torch.where(self.missing, self.expected, 0.0).sum(1)
        sums = measured.sum(1) + extra
        normal = expected.sum(1) * (1 - extra) / (1 - lost).clamp(min=1e-9)
        if bool(self._is_close(measured.sum(1), normal).all()):
            return None
        text = "{its} weights sum to {0}, where {1} is right"
        return _Words(text=text, ranges=(_ends(sums), _ends(self.expected.sum(1))))

    def _is_close(self, measured: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        relative, fixed = self.found.setup.relative[self.row], self.found.setup.fixed[self.row]
        count = 1 if measured.ndim > 1 else len(self.at)  # of a sum
        return (measured - expected).abs() <= _SAME * (relative * expected.abs() + count * fixed)

    def _ratios(self, measured: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Return the factors of the weights that are large enough, at least one."""
        known = expected >= min(_CLEAR * self.floor, float(expected.max()))
        return (measured / expected)[known]

    def _factors(self) -> Iterator[_Words]:
        """Yield by which factors the weights differ, of ranges of keys if a range has one."""
        starts = self._starts()
        if starts is not None and len(starts) <= _MOST_RUNS:
            yield self._parts(starts)
        text = "give{s} {its} keys {0} times their weight"
        yield _Words(text=text, ranges=(_ends(self._ratios(self.measured, self.expected)),))

    def _starts(self) -> list[int] | None:
        """Return the indices at which another factor of the weights begins, in any head; None for many."""
        known = torch.nonzero((self.expected > _CLEAR * self.floor).all(0)).flatten().tolist()
        if not known:
            return None
        starts = [known[0]]
        ratio, spread = self._spread()
        low, high = ratio - spread, ratio + spread
        least, most = low[:, known[0]], high[:, known[0]]
        for one in known[1:]:
            least, most = torch.maximum(least, low[:, one]), torch.minimum(most, high[:, one])
            if bool((least > most).any()):
                starts.append(one)
                least, most = low[:, one], high[:, one]
            if len(starts) > _MOST_RUNS:
                return None
        return starts

    def _spread(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor of each weight, [heads, keys], and by how much it may be off."""
        relative, fixed = self.found.setup.relative[self.row], self.found.setup.fixed[self.row]
        ratio = self.measured / self.expected
        return ratio, _SAME * (relative * ratio.abs().clamp(min=1) + fixed / self.expected)

    def _factor(self, begin: int, end: int) -> torch.Tensor:
        """Return the factor of the weights of a range of keys, [heads], from those that are large enough."""
        known = self.expected[:, begin:end] > _CLEAR * self.floor
        measured, expected = self.measured[:, begin:end], self.expected[:, begin:end]
        total: torch.Tensor = torch.where(known, expected, 0.0).sum(1)
        return torch.where(known, measured, 0.0).sum(1) / total

    def _parts(self, starts: list[int]) -> _Words:
        """Return the factor of each range of keys, of all heads."""
        texts, ranges = list[str](), list[tuple[float, float]]()
        ends = [*starts[1:], len(self.at)]  # the first key after each range
        for i, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            low, high = _ends(self._factor(begin, end))
            last = int(self.at[end - 1])
            keys = f"keys {int(self.at[begin])}–{last}" if i else f"keys up to {last}"
            keys = keys if end < len(self.at) else f"keys from {int(self.at[begin])} on"
            near = [n for f, n in _FACTORS.items() if max(abs(low - f), abs(high - f)) < 5e-3 * f]
            if not near:
                ranges.append((low, high))
            how = near[0] if near else f"{{{len(ranges) - 1}}} times"
            if len(starts) == 1:
                texts.append(f"every key {how} its weight")
            else:
                texts.append(f"{how} their weight to {keys}")
        every = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
        return _Words(text=f"give{{s}} {every}", ranges=tuple(ranges))


def _joined(one: _Words, link: str, other: _Words) -> _Words:
    """Return two statements as one."""
    text = other.text
    for i in reversed(range(len(other.ranges))):
        text = text.replace(f"{{{i}}}", f"{{{i + len(one.ranges)}}}")
    return _Words(text=f"{one.text}{link}{text}", ranges=(*one.ranges, *other.ranges))
