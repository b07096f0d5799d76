"""Address rules: a kernel reads queries, keys, values or the block table at wrong addresses.

Each rule changes one term of one tensor's address. It is a Defect that is made for a call, so that it is
compared with an output, and confirmed on further cases, as the catalogue's defects are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from attnlab.diagnosis.address_memory import (
    INSTEAD,
    Features,
    TensorMemory,
    Term,
)

FAMILY = "addresses"
SLOT = -2
_OF_SLOT = ("block", "p % block_size")
NOUNS = {
    "query": "queries",
    "key": "new keys",
    "value": "new values",
    "key_cache": "cached keys",
    "value_cache": "cached values",
    "block_table": "entries of the block table",
    "output": "the output",
    "lse": "the log-sum-exp",
    "prefix_output": "outputs of the prefix",
    "suffix_output": "outputs of the suffix",
    "prefix_lse": "log-sum-exps of the prefix",
    "suffix_lse": "log-sum-exps of the suffix",
}


@dataclass(frozen=True, slots=True)
class AddressRule:
    """One changed term of the address of a tensor's elements.

    - ``index``: which term; None if all terms are missing, so that the tensor's first element is read;
      SLOT for the terms of the block and of the slot in it together, which a kernel may compute as one.
    - ``feature``, ``stride``: what the term is instead; ``sign``: -1 if it is subtracted.
    """

    tensor: str
    index: int | None
    feature: str = "0"
    stride: str = "1"
    sign: int = 1

    @property
    def name(self) -> str:
        """Return a name that no other rule has."""
        if self.index is None:
            return f"{self.tensor} at 0"
        return f"{self.tensor} term {self.index}: {self.sign} × {self.feature} × {self.stride}"

    def address(
        self, terms: tuple[Term, ...], features: Features, sizes: dict[str, int]
    ) -> torch.Tensor:
        """Return the wrong addresses, relative to the tensor's begin."""
        if self.index is None:
            return features["0"]
        found = features["0"]
        if self.index == SLOT:
            found = found + features[self.feature] * sizes[self.stride]
        for i, (feature, stride) in enumerate(terms):
            if self.index == SLOT and feature in _OF_SLOT:
                continue
            if i == self.index:
                found = found + self.sign * features[self.feature] * sizes[self.stride]
            else:
                found = found + features[feature] * sizes[stride]
        return found

    def text(self, terms: tuple[Term, ...]) -> str:
        """Return the rule as a clause."""
        verb = "is written to" if self.tensor in ("output", "lse") else "are read at"
        what = f"{NOUNS.get(self.tensor, self.tensor)} {verb} a wrong address"
        if self.index is None:
            return f"{what}: always that of the first element"
        feature, stride = _own_term(terms, self.index)
        right = f"{_braced(feature)} × {stride}"
        if self.feature == "0":
            return f"{what}: the term {right} is missing"
        if (self.feature, self.stride) == (feature, stride):
            return f"{what}: the term {right} is subtracted"
        factor = {"1": ""}.get(self.feature, f"{_braced(self.feature)} × ")
        sign = "-" if self.sign < 0 else ""
        return f"{what}: with {sign}{factor}{self.stride} in place of {right}"


def _own_term(terms: tuple[Term, ...], index: int) -> Term:
    """Return the term that a rule changes."""
    if index != SLOT:
        return terms[index]
    return "slot", next(stride for feature, stride in terms if feature == _OF_SLOT[1])


def _braced(feature: str) -> str:
    return f"({feature})" if " " in feature else feature


def rules_of(
    tensor: str, memory: TensorMemory, sizes: dict[str, int], of_others: Iterable[str] = ()
) -> Iterator[AddressRule]:
    """Yield the rules of a tensor that differ by their numbers.

    ``sizes`` also has the strides; ``of_others`` are those of other tensors, which replace strides only.
    """
    others = set(of_others)
    yield AddressRule(tensor, None)
    has_slots = {feature for feature, _ in memory.terms} >= set(_OF_SLOT)
    for index in (*range(len(memory.terms)), *([SLOT] if has_slots else [])):
        own, stride = _own_term(memory.terms, index)
        seen = {(own, sizes[stride])}
        options = [(feature, stride) for feature in INSTEAD.get(own, ())]
        options += [(own, other) for other in sizes if other != stride]
        options += [("1", other) for other in sizes if other not in others]
        for feature, other in options:
            key = ("0", 0) if feature == "0" else (feature, sizes[other])
            if key not in seen:
                seen.add(key)
                yield AddressRule(tensor, index, feature, other)
        yield AddressRule(tensor, index, own, stride, -1)


@dataclass(frozen=True, slots=True)
class SharedRule:
    """A wrong number that the addresses of several tensors share.

    ``feature`` is taken for ``instead``, or, if ``shift`` is not 0, positions are off by ``shift``.
    """

    tensors: tuple[str, ...]
    feature: str
    instead: str
    shift: int = 0

    @property
    def name(self) -> str:
        """Return a name that no other rule has."""
        return f"{'+'.join(self.tensors)}: {self.instead} + {self.shift} for {self.feature}"

    @property
    def text(self) -> str:
        """Return the rule as a clause."""
        nouns = [NOUNS[tensor] for tensor in self.tensors]
        what = f"{', '.join(nouns[:-1])} and {nouns[-1]}"
        if self.shift:
            return (
                f"{what} are read from position p {'+' if self.shift > 0 else '-'} 1 in place of p"
            )
        return f"{what} are read at wrong addresses: with {self.instead} in place of {self.feature}"


Rule = AddressRule | SharedRule
OWN = AddressRule("", -1)  # changes no term
_CACHES, _NEW = ("key_cache", "value_cache"), ("key", "value")


def shared_rules(tensors: Iterable[str]) -> Iterator[SharedRule]:
    """Yield the rules that concern several of the tensors at once."""
    present = set(tensors)
    groups = [group for group in (_CACHES, _NEW, (*_CACHES, *_NEW)) if present >= set(group)]
    for group in groups:
        features = ["KV head", *(["p % block_size"] if group == _CACHES else [])]
        features += ["token"] if group == _NEW else []
        for feature in features:
            for instead in INSTEAD[feature]:
                yield SharedRule(group, feature, instead)
        if group in (_CACHES, _NEW):
            yield from (SharedRule(group, "p", "p", shift) for shift in (1, -1))
