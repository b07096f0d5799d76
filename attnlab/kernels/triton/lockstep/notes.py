"""Notes of a batch: int32 overflows and accesses outside of all tensors, by source line.

Of each line the log of a launch keeps the first note, in the order in which programs run one after another.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from attnlab.kernels.triton.lockstep.control import Refused, running
from attnlab.kernels.triton.run_log import (
    Key,
    OperationLog,
    Outside,
    Region,
    RunLog,
    Wrap,
    kernel_line,
)

Line = tuple[str, int]
Noted = dict[Line, tuple[int, int, Any]]  # number of the program, a time in the batch, the note


@dataclass(slots=True, eq=False)
class Notes(OperationLog):
    """The notes of a launch. It takes the place of its log while batches run.

    One operation serves all programs of a batch. ``_wraps`` and ``_outside`` are those of batches that
    ended, ``_new`` those of the batch that runs.
    """

    _time: int = 0
    _wraps: Noted = field(default_factory=dict)
    _outside: Noted = field(default_factory=dict)
    _new: tuple[Noted, Noted] = field(default_factory=lambda: ({}, {}))

    def _overflowed(self, left: Any, right: Any, wrong: Any) -> None:
        found = first_program(wrong)
        if found is None:
            return
        if running().scalar_loops:
            raise Refused("an int32 overflow in a loop that begins differently in each program")
        number, at = found
        own = np.zeros_like(wrong)
        own[at] = wrong[at]
        wrap = Wrap.of(left, right, own)
        self._keep(self._new[0], (wrap.file, wrap.line), number, wrap)

    def strayed(self, verb: str, number: int, place: str) -> None:
        """Note an access outside of all tensors by the program with a number."""
        file, line = kernel_line()
        note = Outside(file=file, line=line, verb=verb, place=place)
        self._keep(self._new[1], (file, line), number, note)

    def _keep(self, notes: Noted, line: Line, number: int, note: Any) -> None:
        self._time += 1
        if line not in notes or number < notes[line][0]:
            notes[line] = (number, self._time, note)

    def forget(self) -> None:
        """Forget the notes of a batch that does not end."""
        self._new = ({}, {})

    def end(self) -> None:
        """Keep the notes of the batch that ended."""
        for kept, new in zip((self._wraps, self._outside), self._new, strict=True):
            for line, noted in new.items():
                if line not in kept or noted[0] < kept[line][0]:
                    kept[line] = noted
        self.forget()

    def take(self, other: "Notes") -> None:
        """Add the notes of batches that a copy of the process ran."""
        self._new = other._wraps, other._outside
        self.end()

    def tell(self, log: RunLog) -> None:
        """Add the notes to the log of the launch."""
        for kept, known in ((self._wraps, log.wraps), (self._outside, log.outside)):
            for line, (*_, note) in sorted(kept.items(), key=lambda item: item[1][:2]):
                known.setdefault(line, note)
        log.operations += self.operations


def first_program(lanes: Any) -> tuple[int, int] | None:
    """Return the number of the first active program that has one of ``lanes``, (P or 1, …) bool, and its
    index in them; None if there is none."""
    batch = running()
    which = lanes.reshape(len(lanes), -1).any(axis=1)
    at = np.flatnonzero(np.broadcast_to(which, (batch.size,)) & batch.is_active)
    if not at.size:
        return None
    first = int(at[np.argmin(batch.numbers[at])])
    return int(batch.numbers[first]), first if len(lanes) > 1 else 0


# Record which rows and slots each program of a batch accesses, as a trace of one after another does.


_FAR = 1 << 40  # an access is noted as program × _FAR + index


@dataclass(slots=True, eq=False)
class Recorder:
    """Records what a launch's programs access; :meth:`end` ends a batch.

    ``found``: (number of the program, what it accesses). ``needs_one_value``: whether programs that store
    different bits in one element may not run together, because who looks at them needs the values.
    """

    needs_one_value: ClassVar[bool] = False
    found: list[tuple[int, Any]] = field(default_factory=list)

    def record(self, addresses: Any, program: Any, *, reads: bool) -> None:
        """Record loads or stores: addresses (uint64), and the program in the batch of each, or None for all
        active."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the accesses of a batch that does not end."""
        raise NotImplementedError

    def end(self) -> None:
        """End a batch: add what each program accesses."""
        raise NotImplementedError

    def take(self, other: "Recorder") -> None:
        """Add what a copy of the process recorded, which has what this one recorded before, too."""
        known = {number for number, _ in self.found}
        self.found += [one for one in other.found if one[0] not in known]

    def in_order(self) -> list[tuple[int, Any]]:
        """Return ``found`` in the order in which programs run one after the other."""
        return sorted(self.found, key=lambda one: one[0])


@dataclass(slots=True, eq=False)
class ProgramAccesses(Recorder):
    """All accesses: ``found`` has the unique addresses of loads and of stores of each program (uint64)."""

    needs_one_value = True
    _loads: list[Any] = field(default_factory=list)
    _stores: list[Any] = field(default_factory=list)

    def record(self, addresses: Any, program: Any, *, reads: bool) -> None:
        """Record loads or stores as :class:`Recorder` says."""
        flat = addresses.reshape(-1), None if program is None else program.reshape(-1)
        (self._loads if reads else self._stores).append(flat)

    def clear(self) -> None:
        """Forget the accesses of a batch that does not end."""
        self._loads, self._stores = [], []

    def end(self) -> None:
        """End a batch."""
        batch = running()
        both = (_addresses_of(parts, batch.size) for parts in (self._loads, self._stores))
        self.found += zip(batch.numbers.tolist(), zip(*both, strict=True), strict=True)
        self.clear()


def _addresses_of(parts: list[Any], size: int) -> list[Any]:
    """Return the unique addresses of each program of a batch.

    ``parts``: addresses and the program of each, or None for all.
    """
    shared = [addresses for addresses, program in parts if program is None]
    own = [part for part in parts if part[1] is not None]
    programs = np.concatenate([program for _, program in own] or [np.zeros(0, np.int64)])
    order = np.argsort(programs, kind="stable")
    addresses = np.concatenate([some for some, _ in own] or [np.zeros(0, np.uint64)])[order]
    ends = np.searchsorted(programs[order], np.arange(1, size))
    return [np.unique(np.concatenate([one, *shared])) for one in np.split(addresses, ends)]


@dataclass(slots=True, eq=False)
class Reads(Recorder):
    """The accesses to some regions: ``found`` has the slots of each program by name and rows."""

    regions: list[Region] = field(kw_only=True)
    _rows: list[Any] = field(default_factory=list)
    _slots: dict[str, list[Any]] = field(default_factory=dict)

    def record(self, addresses: Any, program: Any, *, reads: bool) -> None:
        """Record loads or stores as :class:`Recorder` says."""
        if not addresses.size:
            return
        low, high = addresses.min(), addresses.max()
        for region in self.regions:
            if high < region.begin or low >= region.end or (region.is_cache and not reads):
                continue
            index = region.index_of(addresses)
            inside = index >= 0
            if program is None:
                active = np.flatnonzero(running().is_active)
                keys = np.unique(index[inside])[None] + active[:, None] * _FAR
            else:
                keys = index[inside] + program[inside].astype(np.int64) * _FAR
            known = self._slots.setdefault(region.name, []) if region.is_cache else self._rows
            known.append(np.unique(keys))

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

    def add_to(self, reads: dict[Key, set[int]]) -> None:
        """Add the slots of each program to those of a trace."""
        for _, found in self.in_order():
            for key, slots in found.items():
                reads.setdefault(key, set()).update(slots)


def _by_program(parts: list[Any], size: int) -> list[list[int]]:
    if not parts:
        return [[] for _ in range(size)]
    keys = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
    ends = np.searchsorted(keys, np.arange(1, size + 1) * _FAR)
    return [part.tolist() for part in np.split(keys % _FAR, ends[:-1])]
