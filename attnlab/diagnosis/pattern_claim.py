"""PatternClaim: what a pattern says about other cases, so that running one can contradict it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.pattern_places import Sizes, row_rules, sequence_rules

_SCALE = "the output of another softmax scale: "
# What several facts have in common: the kinds of facts, and the statement.
_MULTIPLES = "multiples of the correct output: only the sum of the weights is wrong"
_ADDED = "the correct output and one number that is added to all elements of a head"
_FAMILIES = ((_MULTIPLES, {"zeros", "factor", "factors"}), (_ADDED, {"added"}))
_GENERAL = frozenset({_MULTIPLES, _ADDED})
EVERY, ALL = "every sequence", "all rows of these sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternClaim:
    """Rules of the wrong places that hold in all cases that were looked at.

    - ``sequences``, ``rows``: rules in words, each selects exactly the wrong ones, simplest first.
    - ``heads``: the wrong heads; ``all_heads``: whether these are all. ``elements``: the wrong elements of
      each head, None for all.
    - ``only_decodes``: no sequence had several new tokens.
    - ``values``: what the wrong cells hold, such as "all zeros", if that accounts for all of them. Of a wrong
      softmax scale, all expressions that give its number.
    """

    sequences: tuple[str, ...]
    rows: tuple[str, ...]
    heads: tuple[int, ...]
    all_heads: bool
    elements: tuple[int, ...] | None
    values: frozenset[str]
    only_decodes: bool = False

    @property
    def is_rule(self) -> bool:
        """Answer whether the claim excludes anything: some places, or some values."""
        if self.values:
            return True
        if not self.sequences or not self.rows:
            return False
        is_everywhere = self.sequences[0] == EVERY and self.rows[0] == ALL and self.all_heads
        return not is_everywhere or self.elements is not None

    def common(self, other: "PatternClaim") -> "PatternClaim | None":
        """Return the claim that both cases support, or None if heads or elements differ."""
        if (self.all_heads, self.elements) != (other.all_heads, other.elements):
            return None
        if not self.all_heads and self.heads != other.heads:
            return None
        return PatternClaim(
            sequences=tuple(text for text in self.sequences if text in other.sequences),
            rows=tuple(text for text in self.rows if text in other.rows),
            heads=self.heads,
            all_heads=self.all_heads,
            elements=self.elements,
            values=self._common_values(other.values),
            only_decodes=self.only_decodes and other.only_decodes,
        )

    def _common_values(self, others: frozenset[str]) -> frozenset[str]:
        is_scale = any(text.startswith(_SCALE) for text in self.values)
        if is_scale:
            return self.values & others
        return self.values if self.values == others else self.values & others & _GENERAL

    def predicts_none(self, sizes: Sizes) -> bool:
        """Answer whether no sequence of another batch has the rule, so that its output must be correct."""
        members = {text: seqs for text, seqs in sequence_rules(sizes)}
        return bool(self.sequences) and members.get(self.sequences[0], {0}) == set()

    @property
    def text(self) -> str:
        """Return the claim in words."""
        words = ["some rows are wrong"]
        if self.sequences:
            first = self.sequences[0]
            words = [
                "every sequence is wrong"
                if first == EVERY
                else f"the wrong sequences are those {first}"
            ]
        if self.rows and self.rows[0] != ALL:
            words.append(self.rows[0])
        if not self.all_heads:
            words.append(f"in heads {', '.join(map(str, self.heads))}")
        if self.elements is not None:
            words.append(f"in {len(self.elements)} elements, the first of them {self.elements[0]}")
        if self.values:
            shown = self.values - _GENERAL or self.values
            words = [f"{', '.join(words)}: {'; '.join(sorted(shown))}"]
        return ", ".join(words) + (" (only decodes ran)" if self.only_decodes else "")


def claim_of(
    is_wrong: torch.Tensor, ran_heads: list[int], sizes: Sizes, pattern: Pattern
) -> PatternClaim | None:
    """Return what an output's errors claim; None if nothing is wrong.

    ``is_wrong``: [num_tokens, num_heads] bool; ``ran_heads``: the heads that ran.
    """
    rows, heads = is_wrong.any(1), torch.nonzero(is_wrong.any(0)).flatten().tolist()
    if not heads:
        return None
    starts = sizes.row_starts
    tokens = {
        seq: torch.nonzero(rows[starts[seq] : starts[seq + 1]]).flatten().tolist()
        for seq in sizes.seqs
    }
    tokens = {seq: found for seq, found in tokens.items() if found}
    elements = [fact.values["elements"] for fact in pattern.of("elements")]
    return PatternClaim(
        sequences=_sequences(set(tokens), sizes),
        rows=_rows(tokens, sizes),
        heads=tuple(heads),
        all_heads=heads == ran_heads,
        elements=tuple(elements[0]) if elements else None,
        values=_values(pattern) if pattern.is_complete else frozenset(),
        only_decodes=max(sizes.query_lens, default=0) <= 1,
    )


def _values(pattern: Pattern) -> frozenset[str]:
    scales = pattern.of("softmax_scale")
    if scales:
        return frozenset(f"{_SCALE}{name}" for name in scales[0].values["names"])
    kinds = {fact.kind for fact in pattern.rules}
    general = {text for text, family in _FAMILIES if kinds <= family}
    if kinds == {"zeros"}:
        general = set()
    exact = set() if "factors" in kinds else {fact.what for fact in pattern.rules}
    return frozenset(exact | general)


def _sequences(wrong: set[int], sizes: Sizes) -> tuple[str, ...]:
    every = {seq for seq in sizes.seqs if sizes.query_lens[seq]}
    rules = [(EVERY, every), *sequence_rules(sizes)]
    return tuple(text for text, members in rules if members == wrong)


def _rows(tokens: dict[int, list[int]], sizes: Sizes) -> tuple[str, ...]:
    """Return the rules that select exactly the wrong rows of the wrong sequences."""
    rules: list[tuple[str, Callable[[int, int], bool]]] = [(ALL, lambda seq, token: True)]
    return tuple(
        text
        for text, is_member in [*rules, *row_rules(tokens, sizes)]
        if all(
            found == [t for t in range(sizes.query_lens[seq]) if is_member(seq, t)]
            for seq, found in tokens.items()
        )
    )
