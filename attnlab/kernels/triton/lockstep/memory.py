"""Loads and stores of programs that run together.

- Offsets of a tile are mostly a sum of rows and columns. Such a load gathers whole rows.
- Stores are kept until the programs have ended; then :meth:`Tensors.commit` writes them.
- Programs that run one after the other see each other's stores. So a tensor that is both loaded and stored is
  refused. An element that several programs store has what the last one of them stores; a recorder that asks
  for one value of each element refuses other bits.
- Accesses outside of all tensors are masked and noted.
"""

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnlab.kernels.triton.lockstep.control import Refused, running
from attnlab.kernels.triton.lockstep.notes import Notes, Recorder, first_program
from attnlab.kernels.triton.lockstep.operations import shape_of
from attnlab.kernels.triton.patches import decoded, element_of, encoded
from attnlab.kernels.triton.run_log import Memory, values_outside

_SEVERAL = np.int32(2**31 - 1)  # owns elements that several programs stored
_CHUNK = 1 << 24


@dataclass(slots=True, eq=False)
class Storage:
    """The memory of a tensor of the launch.

    - ``own``: its first address. ``bytes``: its contents, uint8, not a copy.
    - ``owner``: for each element, 0, or 1 + the number in the launch of the last program that stored it, or
      ``_SEVERAL``.
      ``before``: the bits of stored elements from before the launch. Both have the length of the storage, and
      take memory only where elements are stored. ``stored``: 1 for each stored element; processes share it,
      if several run.
    """

    own: int
    bytes: Any
    is_loaded: bool = False
    is_stored: bool = False
    before: Any = None
    owner: Any = None
    stored: Any = None


@dataclass(slots=True, eq=False)
class Store:
    """What a batch stores in one storage: index, program in the batch, and bits of each element."""

    storage: Storage
    index: Any
    program: Any
    bits: Any


@dataclass(slots=True, eq=False, kw_only=True)
class Part:
    """What a copy of the process did: why it ``failed``, or what its programs did.

    ``loaded``, ``stored``: first addresses of storages; the latter with the number of stored elements.
    """

    failed: str = ""
    notes: Notes | None = None
    reads: Recorder | None = None
    loaded: frozenset[int] = frozenset()
    stored: dict[int, int] = field(default_factory=dict)


def _zeros(length: int, dtype: Any, is_shared: bool) -> Any:
    """Return an array of zeros, which takes memory only where it is written."""
    if not is_shared:
        return np.zeros(length, dtype=dtype)
    size = length * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype)


@dataclass(slots=True, eq=False)
class Tensors:
    """The tensors of a launch; ``stores`` are those of the batch that runs.

    ``is_shared``: copies of this process may store, too. ``is_copy``: this is one.
    """

    memory: Memory
    notes: Notes
    reads: Recorder | None = None
    is_shared: bool = False
    is_copy: bool = False
    stores: list[Store] = field(default_factory=list)
    _apart: dict[int, int] = field(default_factory=dict)
    _storages: dict[int, Storage] = field(default_factory=dict)

    def storage(self, low: int, high: int) -> tuple[Storage, int]:
        """Return the storage with all bytes of [low, high), and what to subtract from its addresses.

        Raises Refused if there is none.
        """
        found = self.memory.extent(low, high)
        if found is None:
            raise Refused("an access outside of all tensors")
        base, own, size = found
        if own not in self._storages:
            bytes_ = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(own))
            self._storages[own] = Storage(own=own, bytes=bytes_)
        return self._storages[own], base

    def forget(self) -> None:
        """Forget what the batch that ran stores and accesses, because it did not end."""
        self.stores.clear()
        self.notes.forget()
        if self.reads is not None:
            self.reads.clear()

    def commit(self) -> None:
        """Write the stores of the batch that ran."""
        stores, self.stores = self.stores, []
        self.notes.end()
        if self.reads is not None:
            self.reads.end()
        ranks = running().numbers.astype(np.int32) + 1
        for store in stores:
            storage, elements = store.storage, store.storage.bytes.view(store.bits.dtype)
            if storage.before is None:
                if self.is_copy:
                    raise Refused("a tensor that only late programs store")
                storage.before = _zeros(len(elements), elements.dtype, self.is_shared)
                storage.owner = _zeros(len(elements), np.int32, is_shared=False)
                storage.stored = _zeros(len(elements), np.uint8, self.is_shared)
            elif storage.before.dtype != elements.dtype:
                raise Refused("stores of elements of several types in one tensor")
            is_stored = storage.stored[store.index] != 0  # also by another process
            new = store.index[~is_stored] if is_stored.any() else store.index
            storage.before[new] = elements[new]
            storage.stored[new] = 1
            put = _put_alike if self.reads is not None and self.reads.needs_one_value else _put_last
            put(storage, elements, store, ranks[store.program])

    def undo(self) -> None:
        """Give the tensors the contents from before the launch."""
        for storage in self._storages.values():
            for begin in range(0, 0 if storage.before is None else len(storage.before), _CHUNK):
                stored = begin + np.flatnonzero(storage.stored[begin : begin + _CHUNK])
                storage.bytes.view(storage.before.dtype)[stored] = storage.before[stored]

    def stored_elements(self) -> dict[int, int]:
        """Return how many elements the programs of this process stored, by storage."""
        return {
            own: int(np.count_nonzero(one.owner))
            for own, one in self._storages.items()
            if one.before is not None
        }

    def stored_addresses(self) -> Iterator[Any]:
        """Yield the addresses of the elements that were stored, of one storage after the other (uint64)."""
        for own, one in self._storages.items():
            if one.before is not None:
                size = np.uint64(one.before.dtype.itemsize)
                yield np.uint64(own) + np.flatnonzero(one.stored).astype(np.uint64) * size

    def part(self) -> Part:
        """Return what this copy of the process did, with what was done before it was made."""
        loaded = frozenset(own for own, one in self._storages.items() if one.is_loaded)
        return Part(
            notes=self.notes, reads=self.reads, loaded=loaded, stored=self.stored_elements()
        )

    def take(self, part: Part, before: Mapping[int, int]) -> None:
        """Add what a copy did; ``before``: the stored elements when it was made. Raises Refused."""
        if part.failed or part.notes is None:
            raise Refused(part.failed)
        for own in part.loaded:
            if own in self._storages and self._storages[own].is_stored:
                raise Refused("a tensor that is both loaded and stored")
        for own, number in part.stored.items():
            if self._storages[own].is_loaded:
                raise Refused("a tensor that is both loaded and stored")
            self._apart[own] = self._apart.get(own, 0) + number - before[own]
        self.notes.take(part.notes)
        if self.reads is not None and part.reads is not None:
            self.reads.take(part.reads)

    def check_apart(self) -> None:
        """Raise Refused if two processes stored the same element."""
        for own, number in self.stored_elements().items():
            if number + self._apart.get(own, 0) != np.count_nonzero(self._storages[own].stored):
                raise Refused("several programs store the same element")

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any, is_short: bool = False) -> Any:
        """Return loaded elements of a NumPy dtype, (P or 1, …); ``is_short``: as float32, of bfloat16 bits.

        ``pointers``: a handle. ``mask``: bool, or None; ``other``: what masked elements get, or None for 0.
        Both have as many axes as the pointers.
        """
        batch, shape = running(), shape_of(pointers)
        if mask is not None:
            shape = np.broadcast_shapes(shape, mask.shape)
            mask = None if mask.all() else mask
        if batch.active is not None and shape[0] != 1:
            active = batch.active.reshape(-1, *(1,) * (len(shape) - 1))
            mask = active if mask is None else mask & active
        if mask is not None and not mask.any():
            data = _filled(shape, other, dtype)
            return decoded(data) if is_short else data
        data, asked, given = None, mask, None
        if hasattr(pointers, "parts"):
            data = self._rows(pointers, mask, dtype)
        if data is None:
            given = np.broadcast_to(pointers.data, shape)
            addresses, mask = self._inside("reads", given, mask, dtype.itemsize)
            data = self._elements(addresses, mask, dtype)
        if mask is not None:
            if data.shape != shape:
                data = np.broadcast_to(data, shape).copy()
            fill = dtype.type(0) if other is None else other
            np.copyto(data, fill, where=~mask, casting="unsafe")
        data = decoded(data) if is_short else data
        if mask is not asked:
            asked = True if asked is None else asked
            data = values_outside(data, asked, mask, given, dtype.itemsize)
        return data

    def _inside(self, verb: str, addresses: Any, mask: Any, size: int) -> tuple[Any, Any]:
        """Return addresses, and the mask without those that are in no tensor, which are noted.

        The addresses are given back, those in tensors as they are.
        """
        live = addresses if mask is None else addresses[np.broadcast_to(mask, addresses.shape)]
        if not live.size or self.memory.extent(int(live.min()), int(live.max()) + size) is not None:
            return addresses, mask
        asked = np.broadcast_to(True if mask is None else mask, addresses.shape)
        own, inside, stray = self.memory.inside(addresses, asked, size)
        if stray and (found := first_program(asked & ~inside)) is not None:
            number, at = found
            one = np.broadcast_to(addresses, asked.shape)[at], asked[at]
            self.notes.strayed(verb, number, self.memory.inside(*one, size)[2])
        return own, inside if stray else mask

    def _elements(self, addresses: Any, mask: Any, dtype: Any) -> Any:
        """Return the elements at addresses; 0 where the mask is false."""
        if mask is not None:
            mask = np.broadcast_to(mask, addresses.shape)
        live = addresses if mask is None else addresses[mask]
        programs = None if self.reads is None else _programs(addresses, mask)
        values = np.empty(live.shape, dtype=dtype)
        for storage, base, chosen in self._pieces(live, dtype.itemsize):
            self._note_load(storage)
            if self.reads is not None:
                some = programs if programs is None else programs[chosen]
                own = live[chosen] - np.uint64(base - storage.own)
                self.reads.record(own, some, reads=True)
            elements, index = _indexed(storage, live[chosen] - np.uint64(base), dtype)
            values[chosen] = elements[index]
        if mask is None:
            return values
        data = np.zeros(addresses.shape, dtype=dtype)
        data[mask] = values
        return data

    def _pieces(self, live: Any, size: int) -> Iterator[tuple[Storage, int, Any]]:
        """Yield the storages of addresses in tensors: storage, base, and which addresses are in it."""
        rest = live
        while rest.size:
            low = int(rest.min())
            storage, base = self.storage(low, low + size)
            end = np.uint64(base + len(storage.bytes))
            rest = rest[rest >= end]
            everything = rest.size == 0 and low == int(live.min())
            yield storage, base, ... if everything else (live >= np.uint64(base)) & (live < end)

    def _note_load(self, storage: Storage) -> None:
        if storage.is_stored:
            raise Refused("a tensor that is both loaded and stored")
        storage.is_loaded = True

    def _rows(self, pointers: Any, mask: Any, dtype: Any) -> Any:
        """Return the elements at addresses that are rows plus columns, or None if they are not.

        The columns are runs of neighbours at equal distances. Masked rows may be outside of all tensors.
        """
        split = separated(pointers, dtype.itemsize)
        if split is None:
            return None
        axis, rows, run, step, runs = split
        if mask is not None:
            has_any = mask.any(axis=axis, keepdims=True)
            if not has_any.all():
                live = np.broadcast_to(has_any, np.broadcast_shapes(rows.shape, has_any.shape))
                rows = np.broadcast_to(rows, live.shape)
                rows = np.where(live, rows, rows[live][0])
        width = (step * (runs - 1) + run) * dtype.itemsize
        low, high = int(rows.min()), int(rows.max())
        found = self.memory.extent(low, high + width)
        if found is None:
            return None
        storage, base = self.storage(low, high + width)
        self._note_load(storage)
        if len(storage.bytes) % dtype.itemsize:
            return None
        elements, index = _indexed(storage, rows - np.uint64(base), dtype)
        if self.reads is not None:
            addresses = np.broadcast_to(pointers.data, pointers.shape)
            if mask is not None:
                shape = np.broadcast_shapes(addresses.shape, mask.shape)
                addresses, mask = np.broadcast_to(addresses, shape), np.broadcast_to(mask, shape)
            live = addresses if mask is None else addresses[mask]
            own, programs = live - np.uint64(base - storage.own), _programs(addresses, mask)
            self.reads.record(own, programs, reads=True)
        places = len(elements) - width // dtype.itemsize + 1
        view = np.lib.stride_tricks.as_strided(
            elements,
            (places, runs, run),
            tuple(dtype.itemsize * n for n in (1, step, 1)),
            writeable=False,
        )
        index = np.squeeze(index, axis)
        data = view[index].reshape(*index.shape, runs * run)
        return np.ascontiguousarray(np.moveaxis(data, -1, axis))

    def store(self, pointers: Any, mask: Any, bits: Any) -> None:
        """Keep a store; ``mask``, ``bits``: arrays with as many axes as the pointers."""
        batch = running()
        shape = np.broadcast_shapes(shape_of(pointers), mask.shape, bits.shape)
        shape = (batch.size, *shape[1:])
        if batch.active is not None:
            mask = mask & batch.active.reshape(-1, *(1,) * (len(shape) - 1))
        addresses, bits = (np.broadcast_to(one, shape) for one in (pointers.data, bits))
        addresses, mask = self._inside("writes", addresses, mask, bits.dtype.itemsize)
        places = np.arange(batch.size) if batch.places is None else batch.places
        program = np.broadcast_to(
            places.astype(np.uint16).reshape(-1, *(1,) * (len(shape) - 1)), shape
        )
        if mask.all():
            live = addresses.reshape(-1)
            program, bits = program.reshape(-1), bits.reshape(-1)
        else:
            mask = np.broadcast_to(mask, shape)
            live, program, bits = addresses[mask], program[mask], bits[mask]
        for storage, base, chosen in self._pieces(live, bits.dtype.itemsize):
            if storage.is_loaded:
                raise Refused("a tensor that is both loaded and stored")
            storage.is_stored = True
            if self.reads is not None:
                own = live[chosen] - np.uint64(base - storage.own)
                self.reads.record(own, program[chosen], reads=False)
            _, index = _indexed(storage, live[chosen] - np.uint64(base), bits.dtype)
            self.stores.append(Store(storage, index, program[chosen], bits[chosen]))


def _put_last(storage: Storage, elements: Any, store: Store, rank: Any) -> None:
    """Write a store; where another program stores, too, the program with the highest ``rank`` does."""
    index, bits = store.index, store.bits
    is_last = rank >= storage.owner[index]
    if not is_last.all():
        rank, index, bits = rank[is_last], index[is_last], bits[is_last]
    storage.owner[index] = rank
    if (storage.owner[index] != rank).any():  # several programs of this store
        order = np.argsort(rank, kind="stable")
        rank, index, bits = rank[order], index[order], bits[order]
        storage.owner[index] = rank
    elements[index] = bits


def _put_alike(storage: Storage, elements: Any, store: Store, rank: Any) -> None:
    """Write a store; raise Refused if another program stores other bits in one of its elements."""
    owner = storage.owner[store.index]
    other = (owner != 0) & (owner != rank)
    _check_equal(elements, store, other)
    storage.owner[store.index] = rank
    elements[store.index] = store.bits
    other |= storage.owner[store.index] != rank
    _check_equal(elements, store, other)
    storage.owner[store.index[other]] = _SEVERAL


def _check_equal(elements: Any, store: Store, other: Any) -> None:
    if other.any() and (elements[store.index[other]] != store.bits[other]).any():
        raise Refused("several programs store the same element")


def _filled(shape: tuple[int, ...], other: Any, dtype: Any) -> Any:
    data = np.zeros(shape, dtype=dtype)
    if other is not None:
        np.copyto(data, other, casting="unsafe")
    return data


def _programs(addresses: Any, mask: Any) -> Any:
    """Return the program in the batch of each live element; None if each is of all active programs."""
    if addresses.shape[0] == 1 and running().size > 1:
        return None
    numbers = np.arange(addresses.shape[0]).reshape(-1, *(1,) * (addresses.ndim - 1))
    every = np.broadcast_to(numbers, addresses.shape)
    return every if mask is None else every[mask]


def _indexed(storage: Storage, offsets: Any, dtype: Any) -> tuple[Any, Any]:
    """Return a storage as elements of a dtype, and the indices of offsets in bytes (uint64)."""
    size = dtype.itemsize
    if len(storage.bytes) % size:
        raise Refused("a tensor whose size is no multiple of that of an element")
    offsets = offsets.view(np.int64)
    if size > 1 and (offsets & (size - 1)).any():
        raise Refused("an address between two elements")
    return storage.bytes.view(dtype), offsets // size if size > 1 else offsets


def separated(pointers: Any, size: int) -> tuple[int, Any, int, int, int] | None:
    """Return a sum of addresses as rows and columns, or None if it is not one.

    Returns the axis of the columns; the addresses of the rows' first elements, with length 1 in this axis;
    how many elements of ``size`` bytes are neighbours, the distance of two such runs in elements, and their
    number.
    """
    parts, shape = pointers.parts, pointers.shape
    for axis in range(len(shape) - 1, 0, -1):
        columns = [part for part in parts if part.shape[axis] > 1]
        if shape[axis] > 1 and len(columns) == 1 and columns[0].size == shape[axis]:
            break
    else:
        return None
    first = columns[0].reshape(-1)[0]
    steps = (columns[0].reshape(-1) - first).view(np.int64)
    count, rest = len(steps), steps % size
    steps = steps // size
    breaks = np.flatnonzero(np.diff(steps) != 1)
    run = int(breaks[0]) + 1 if len(breaks) else count
    if count % run or rest.any():
        return None
    step = int(steps[run]) if run < count else run
    numbers = np.arange(count)
    if step < 0 or (steps != numbers // run * step + numbers % run).any():
        return None
    rows: Any = np.uint64(first)
    for part in parts:
        if part is not columns[0]:
            rows = part + rows
    rows = np.broadcast_to(rows, tuple(1 if at == axis else n for at, n in enumerate(shape)))
    return axis, rows, run, step, count // run


def _data_of(value: Any, pointers: Any) -> Any:
    """Return the array of a value with as many axes as the pointers of an access; None for None."""
    data = value if isinstance(value, np.ndarray) or value is None else value.data
    if data is not None and data.ndim != len(shape_of(pointers)):
        raise Refused("an access with different numbers of axes")
    return data


def _mask_of(mask: Any, pointers: Any) -> Any:
    """Return the array of a mask, bool, as :func:`_data_of`."""
    data = _data_of(mask, pointers)
    if data is not None and data.dtype != np.bool_:
        raise Refused("a mask that is not of type bool")  # NumPy would take it for indices
    return data


def patch_memory(interpreter: Any, scope: Any) -> None:
    """Let the builder load from and store to the tensors of a batch, through ``scope``."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def loaded(
        self: Any, pointers: Any, mask: Any, other: Any = None, *rest: Any, **named: Any
    ) -> Any:
        kind, dtype, is_short = element_of(interpreter, pointers)
        allowed, fill = _mask_of(mask, pointers), _data_of(other, pointers)
        if is_short and fill is not None:
            fill = encoded(fill)
        if fill is not None and fill.dtype != dtype:
            raise Refused("a load whose other value has another type")
        return handle(running().tensors.load(pointers, allowed, fill, dtype, is_short), kind)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        _, dtype, is_short = element_of(interpreter, pointers)
        allowed, given = _mask_of(mask, pointers), _data_of(value, pointers)
        bits = encoded(given) if is_short else given
        if bits.dtype.itemsize != dtype.itemsize:
            bits = bits.astype(dtype)
        if allowed is None:
            allowed = np.ones((1,) * bits.ndim, np.bool_)
        running().tensors.store(
            pointers, allowed, bits.view(f"u{dtype.itemsize}") if bits.dtype != np.bool_ else bits
        )

    scope.set_attr(builder, "create_masked_load", loaded)
    scope.set_attr(builder, "create_masked_store", stored)
