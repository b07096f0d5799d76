"""SlotShadows: which token each cache slot of each layer holds, by the writes that were seen.

Layers of one KV-cache group get the same slot_mapping, so they share one array. A layer that writes anything
else, or does not write in a step, gets an array of its own from then on.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnlab.serving.requests import Hashes, Integers

NO_TOKEN = 0
_NUMBERS = itertools.count()


class TokenTable:
    """The tokens that were written, by number: request, position, step, and the hash of the prefix.

    Number 0 stands for no token.
    """

    def __init__(self) -> None:
        self._size = 1
        self._integers = np.full((3, 1024), -1, np.int64)
        self._prefixes = np.zeros(1024, np.uint64)

    def __len__(self) -> int:
        return self._size

    @property
    def requests(self) -> Integers:
        """Return the number of the request of each token."""
        return self._integers[0, : self._size]

    @property
    def positions(self) -> Integers:
        """Return the position of each token in its request."""
        return self._integers[1, : self._size]

    @property
    def steps(self) -> Integers:
        """Return the step in which each token was computed."""
        return self._integers[2, : self._size]

    @property
    def prefixes(self) -> Hashes:
        """Return the hash of the prefix of each token."""
        return self._prefixes[: self._size]

    def add(self, requests: Integers, positions: Integers, step: int, prefixes: Hashes) -> Integers:
        """Add the tokens of a step; return their numbers."""
        first, end = self._size, self._size + len(requests)
        if end > len(self._prefixes):
            room = max(end, 2 * len(self._prefixes)) - len(self._prefixes)
            self._integers = np.pad(self._integers, ((0, 0), (0, room)), constant_values=-1)
            self._prefixes = np.pad(self._prefixes, (0, room))
        self._integers[0, first:end], self._integers[1, first:end] = requests, positions
        self._integers[2, first:end], self._prefixes[first:end] = step, prefixes
        self._size = end
        return np.arange(first, end)

    def keep(self, numbers: Integers) -> None:
        """Keep only the tokens with these numbers, rising and without 0; they are numbered anew from 1."""
        kept = np.concatenate([[NO_TOKEN], numbers])
        self._integers = np.ascontiguousarray(self._integers[:, kept])
        self._prefixes = self._prefixes[kept].copy()
        self._size = len(kept)


@dataclass(slots=True, kw_only=True, eq=False)
class Write:
    """A cache write: the tokens ``numbers`` [n] went to ``slots`` [n], which held ``old`` [n]."""

    slots: Integers
    numbers: Integers
    old: Integers

    def is_same(self, slots: Integers, numbers: Integers) -> bool:
        """Answer whether another write does the same."""
        return (self.slots is slots or np.array_equal(self.slots, slots)) and (
            self.numbers is numbers or np.array_equal(self.numbers, numbers)
        )


class SlotShadow:
    """The tokens in the slots of some layers.

    - ``number``: of this array, unique in the process.
    - ``numbers``: [num_slots], the token in each slot. ``layers``: the names of the layers.
    - ``block_step``: [num_blocks], the step of the last write to each block of ``block_size`` slots.
    - ``step``, ``journal``: the writes of the last step. ``counts``: how many of them each layer did.
    """

    def __init__(self, num_slots: int, block_size: int, layers: Iterable[str]) -> None:
        self.number = next(_NUMBERS)
        self.numbers: Integers = np.zeros(num_slots, np.int64)
        self.block_size = block_size
        self.block_step: Integers = np.full(-(-num_slots // block_size), -1, np.int64)
        self.layers = set(layers)
        self.step = -1
        self.journal: list[Write] = []
        self.counts: dict[str, int] = {}

    def apply(self, slots: Integers, numbers: Integers) -> None:
        """Write tokens to slots, and note it in the journal."""
        self.journal.append(Write(slots=slots, numbers=numbers, old=self.numbers[slots]))
        self.numbers[slots] = numbers
        self.block_step[slots // self.block_size] = self.step

    def split(self, layers: set[str], count: int) -> "SlotShadow":
        """Return an array of their own for layers that did only the first ``count`` writes of the step."""
        own = SlotShadow(0, self.block_size, layers)
        own.numbers, own.block_step = self.numbers.copy(), self.block_step.copy()
        own.step, own.journal = self.step, list(self.journal[:count])
        own.counts = dict.fromkeys(layers, count)
        for write in reversed(self.journal[count:]):
            own.numbers[write.slots] = write.old
        self.layers -= layers
        for layer in layers:
            self.counts.pop(layer, None)
        return own


class SlotShadows:
    """The slots of all layers of a process."""

    def __init__(self) -> None:
        self.table = TokenTable()
        self._of: dict[str, SlotShadow] = {}

    def __contains__(self, layer: str) -> bool:
        return layer in self._of

    @property
    def shadows(self) -> list[SlotShadow]:
        """Return every array once."""
        return list({id(one): one for one in self._of.values()}.values())

    def add_group(self, layers: Iterable[str], num_slots: int, block_size: int) -> None:
        """Add the layers of a KV-cache group, with empty slots."""
        shadow = SlotShadow(num_slots, block_size, layers)
        self._of |= dict.fromkeys(shadow.layers, shadow)

    def write(self, layer: str, step: int, slots: Integers, numbers: Integers) -> None:
        """Take note that a layer wrote tokens to slots, which must be in the cache."""
        shadow = self._in_step(layer, step)
        count = shadow.counts.get(layer, 0)
        if count < len(shadow.journal) and not shadow.journal[count].is_same(slots, numbers):
            shadow = self._split(shadow, {layer}, count)
        if count == len(shadow.journal):
            shadow.apply(slots, numbers)
        shadow.counts[layer] = count + 1

    def of(self, layer: str, step: int) -> SlotShadow:
        """Return the slots as a layer reads them now, with its own writes only."""
        shadow = self._in_step(layer, step)
        count = shadow.counts.get(layer, 0)
        if count < len(shadow.journal):
            shadow = self._split(shadow, {layer}, count)
        return shadow

    def compact(self) -> NDArray[np.int64]:
        """Drop the tokens that no slot holds; return the numbers of the requests that are left."""
        held = [shadow.numbers for shadow in self.shadows]
        journals = [
            part for one in self.shadows for w in one.journal for part in (w.numbers, w.old)
        ]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *held, *journals]))
        for one in self.shadows:
            one.numbers = np.searchsorted(live, one.numbers)
            for write in one.journal:
                write.numbers = np.searchsorted(live, write.numbers)
                write.old = np.searchsorted(live, write.old)
        self.table.keep(live[1:])
        found: NDArray[np.int64] = np.unique(self.table.requests[1:])
        return found

    def _in_step(self, layer: str, step: int) -> SlotShadow:
        """Return the array of a layer, after the end of earlier steps: who did not write then, splits off."""
        shadow = self._of[layer]
        if shadow.step != step:
            late: dict[int, set[str]] = {}
            for name in shadow.layers:
                count = shadow.counts.get(name, 0)
                if count < len(shadow.journal):
                    late.setdefault(count, set()).add(name)
            for count, names in late.items():
                own = self._split(shadow, names, count)
                own.step, own.journal, own.counts = step, [], {}
            shadow.step, shadow.journal, shadow.counts = step, [], {}
        return self._of[layer]

    def _split(self, shadow: SlotShadow, layers: set[str], count: int) -> SlotShadow:
        own = shadow.split(layers, count)
        self._of |= dict.fromkeys(layers, own)
        return own
