"""Record which rows and slots each program of a batch accesses, as a trace of one after another does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnlab.kernels.triton.lockstep.control import running
from attnlab.kernels.triton.run_log import Key, Region

Accessed = tuple[
    str, Any
]  # a region's name; program × _FAR + index of each access, without repetition
_FAR = 1 << 40


@dataclass(slots=True, eq=False)
class Reads:
    """The accesses of a launch's programs to some regions. :meth:`end` ends a batch.

    ``found``: (number of the program, its slots by name and rows).
    """

    regions: list[Region]
    found: list[tuple[int, dict[Key, set[int]]]] = field(default_factory=list)
    _rows: list[Any] = field(default_factory=list)
    _slots: dict[str, list[Any]] = field(default_factory=dict)

    def loaded(self, addresses: Any, program: Any) -> None:
        """Record loads: addresses (uint64), and the program in the batch of each, or None for all active."""
        self._record(addresses, program, reads=True)

    def stored(self, addresses: Any, program: Any) -> None:
        """Record stores, as :meth:`loaded`."""
        self._record(addresses, program, reads=False)

    def _record(self, addresses: Any, program: Any, reads: bool) -> None:
        if not addresses.size:
            return
        low, high = addresses.min(), addresses.max()
        for region in self.regions:
            if high < region.begin or low >= region.end or (region.is_cache and not reads):
                continue
            index = region.index_of(addresses)
            inside = index >= 0
            if program is None:
                batch = running()
                active = (
                    np.arange(batch.size) if batch.active is None else np.flatnonzero(batch.active)
                )
                keys = np.unique(index[inside])[None] + active[:, None] * _FAR
            else:
                keys = index[inside] + program[inside].astype(np.int64) * _FAR
            part = np.unique(keys)
            (self._slots.setdefault(region.name, []) if region.is_cache else self._rows).append(
                part
            )

    def clear(self) -> None:
        """Forget the accesses of a batch that does not end."""
        self._rows, self._slots = [], {}

    def end(self) -> None:
        """End a batch: add the slots of each program."""
        batch = running()
        rows = _by_program(self._rows, batch.size)
        slots = {name: _by_program(parts, batch.size) for name, parts in self._slots.items()}
        for i, number in enumerate(batch.numbers.tolist()):
            key = tuple(rows[i])
            found = {(name, key): set(of[i]) for name, of in slots.items() if of[i]}
            self.found.append((number, found))
        self.clear()

    def take(self, other: "Reads") -> None:
        """Add what a copy of the process recorded, which has what this one recorded before, too."""
        known = {number for number, _ in self.found}
        self.found += [one for one in other.found if one[0] not in known]

    def by_program(self) -> Iterator[tuple[Key, set[int]]]:
        """Yield the slots of each program, in the order in which programs run one after the other."""
        for _, found in sorted(self.found, key=lambda one: one[0]):
            yield from found.items()


def _by_program(parts: list[Any], size: int) -> list[list[int]]:
    if not parts:
        return [[] for _ in range(size)]
    keys = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
    ends = np.searchsorted(keys, np.arange(1, size + 1) * _FAR)
    return [part.tolist() for part in np.split(keys % _FAR, ends[:-1])]
