"""Memory: the tensors that a launch may access. Accesses outside them are masked off and reported.

On a GPU such an access reads whatever is there, or ends the process. Under the interpreter it would crash
Python.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch


class Accesses(Protocol):
    """Records loads and stores: addresses (uint64) and a mask (bool) of the same shape."""

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load."""

    def stored(self, addresses: Any, mask: Any) -> None:
        """Record a store."""


class Memory:
    """The tensors among a kernel's arguments, by address; ``trace``, if given, records accesses to them."""

    def __init__(self, arguments: Mapping[str, Any], trace: Accesses | None = None) -> None:
        self.trace = trace
        extents: dict[int, tuple[int, str]] = {}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.nbytes:
                storage = value.untyped_storage()
                extents.setdefault(storage.data_ptr(), (storage.nbytes(), name))
        self._bases = sorted(extents)
        self._sizes = [extents[base][0] for base in self._bases]
        self._names = [extents[base][1] for base in self._bases]

    def inside(self, addresses: Any, mask: Any) -> tuple[Any, str]:
        """Return the mask without addresses that are in no tensor, and a description of the first of these.

        The description is "" if all are in tensors. ``addresses``: uint64; ``mask``: bool, same shape.
        """
        live = addresses if mask.all() else addresses[mask]
        if not live.size:
            return mask, ""
        low, high = int(live.min()), int(live.max())
        i = bisect_right(self._bases, low) - 1
        if i >= 0 and high < self._bases[i] + self._sizes[i]:
            return mask, ""
        bases = np.array(self._bases, dtype=np.uint64)
        ends = bases + np.array(self._sizes, dtype=np.uint64)
        at = np.searchsorted(bases, addresses, side="right") - 1
        good = (at >= 0) & (addresses < ends[np.maximum(at, 0)])
        lost = np.atleast_1d(addresses)[np.atleast_1d(mask & ~good)]
        return mask & good, self._place(int(lost[0])) if lost.size else ""

    def _place(self, address: int) -> str:
        """Return the position of an address relative to the nearest tensor."""
        before = [base - address for base in self._bases]
        after = [address - base - size for base, size in zip(self._bases, self._sizes, strict=True)]
        away, i = min((max(b, a), i) for i, (b, a) in enumerate(zip(before, after, strict=True)))
        if before[i] > 0:
            return f"{away} bytes before {self._names[i]}"
        return f"{away} bytes after the end of {self._names[i]}"
