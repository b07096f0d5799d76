"""Memory: the tensors that a launch may access. Accesses outside them are masked off and reported.

On a GPU such an access reads whatever is there, or ends the process. Under the interpreter it would crash
Python, or read another tensor, depending on where the process has put its tensors. So kernels get addresses
that depend on the order of the arguments alone, with 16 TiB between two tensors.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

_FIRST = 1 << 48  # above every address of a process
_APART = 1 << 44  # an int32 offset times a stride is far smaller
_OUTSIDE: ContextVar[int] = ContextVar("outside", default=0)


@contextmanager
def other_outside(number: int) -> Iterator[None]:
    """Let loads outside of all tensors return ``number`` inside the block, in place of 0.

    A result that changes depends on memory that belongs to no tensor of the launch.
    """
    token = _OUTSIDE.set(number)
    try:
        yield
    finally:
        _OUTSIDE.reset(token)


class Accesses(Protocol):
    """Records loads and stores: addresses (uint64), and a mask (bool) and stored values of the same shape."""

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load."""

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Record a store."""


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among arguments by name, also those in tuples and in Triton's tensor descriptors."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from tensors_of({f"{name}[{i}]": one for i, one in enumerate(value)})
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            yield name, base


class Memory:
    """The tensors among a kernel's arguments, by address; ``trace``, if given, records accesses to them.

    A tensor has the address that the kernel gets (:meth:`address`) and its own, which loads and stores need
    and which pointers stored in a tensor have.
    """

    def __init__(self, arguments: Mapping[str, Any], trace: Accesses | None = None) -> None:
        self.trace = trace
        extents: dict[int, tuple[int, str]] = {}
        for name, value in tensors_of(arguments):
            if value.nbytes:
                storage = value.untyped_storage()
                extents.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        self._given = {own: _FIRST + i * _APART for i, own in enumerate(extents)}
        found = [(own, own, *extent) for own, extent in extents.items()]
        found += [(self._given[own], own, *extent) for own, extent in extents.items()]
        self._bases = [base for base, *_ in sorted(found)]
        self._own = [own for _, own, *_ in sorted(found)]
        self._sizes = [size for *_, size, _ in sorted(found)]
        self._names = [name for *_, name in sorted(found)]

    def address(self, tensor: torch.Tensor) -> int:
        """Return the address that a kernel gets for a tensor."""
        own = tensor.untyped_storage().data_ptr()
        return self._given.get(own, own) + tensor.data_ptr() - own

    def inside(self, addresses: Any, mask: Any, size: int) -> tuple[Any, Any, str]:
        """Return the tensors' own addresses, the mask without elements that are not in a tensor, and a
        description of the first of these.

        The description is "" if all are in tensors. ``addresses``: uint64; ``mask``: bool, same shape;
        ``size``: bytes of an element, all of which must be in the same tensor.
        """
        live = addresses if mask.all() else addresses[mask]
        if not live.size:
            return addresses, mask, ""
        low, high = int(live.min()), int(live.max())
        i = bisect_right(self._bases, low) - 1
        if i >= 0 and high + size <= self._bases[i] + self._sizes[i]:
            return addresses - np.uint64(self._bases[i] - self._own[i]), mask, ""
        bases, own = (np.array(some, dtype=np.uint64) for some in (self._bases, self._own))
        ends = bases + np.array(self._sizes, dtype=np.uint64)
        at = np.searchsorted(bases, addresses, side="right") - 1
        left = ends[np.maximum(at, 0)] - addresses  # wraps for an address after the end
        good = (at >= 0) & (addresses < ends[np.maximum(at, 0)]) & (left >= np.uint64(size))
        lost = np.atleast_1d(addresses)[np.atleast_1d(mask & ~good)]
        moved = np.where(good, addresses - (bases - own)[np.maximum(at, 0)], np.uint64(0))
        return moved, mask & good, self._place(int(lost[0]), size) if lost.size else ""

    def _place(self, address: int, size: int) -> str:
        """Return the position of an element relative to the nearest tensor."""
        before = [base - address for base in self._bases]
        after = [address - base - size for base, size in zip(self._bases, self._sizes, strict=True)]
        if not before:
            return "memory, but no argument is a tensor"
        away, i = min((max(b, a), i) for i, (b, a) in enumerate(zip(before, after, strict=True)))
        if away < 0:
            return f"{size} bytes, {size + away} of them after the end of {self._names[i]}"
        if before[i] > 0:
            return f"{away} bytes before {self._names[i]}"
        return f"{away} bytes after the end of {self._names[i]}"


def values_outside(values: Any, asked: Any, inside: Any) -> Any:
    """Return loaded values with those outside of all tensors replaced, if :func:`other_outside` asks for it.

    ``asked``: the mask of the load; ``inside``: without addresses that are in no tensor.
    """
    number = _OUTSIDE.get()
    return values if not number else np.where(asked & ~inside, values.dtype.type(number), values)
