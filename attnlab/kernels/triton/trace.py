"""Which slots of a paged cache each program of a launch loads, and for which rows.

A slot is right or wrong only for somebody: sequence 1's slot is sequence 0's program's mistake. So reads
are kept by program, and a program is known by the rows that it touches: the rows of the query that it
loads, and those of an output that it stores. Whose these are, and whose the slots, is for others to say
(:func:`attnlab.lab.reads.traced`); nothing here knows of sequences.

Tensors are known by their shapes, since neither vLLM's ops nor a kernel of somebody's own need pass the
call's own: caches are copied into another layout, queries into another dtype. A load that is masked off
is no read. Off, nothing of this is made or called.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnlab.tensors.call import KernelCall

Key = tuple[str, tuple[int, ...]]  # a tensor's name among the kernel's arguments, and rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The shapes of a call, by which its tensors are known among a kernel's arguments.

    - ``rows``: (num_tokens, elements of a row): a query or an output; ``new``: where the new keys and
      values begin, which may have the same shape and are neither.
    - ``caches``: shapes of key or value cache, each with its dimensions of blocks and of slots.
    """

    rows: tuple[int, int]
    new: tuple[int, int]
    caches: dict[tuple[int, ...], tuple[int, int]]

    @classmethod
    def of(cls, call: KernelCall) -> "Watched":
        """Return what to look for in a call: its caches in vLLM's two layouts.

        Values in packs (``interleave_v``) are not looked for; their keys are.
        """
        blocks, kv_heads, head_size, block_size = call.value_cache.shape
        caches = {
            tuple(call.key_cache.shape): (0, 3),
            (blocks, kv_heads, head_size, block_size): (0, 3),
            (blocks, block_size, kv_heads, head_size): (0, 1),
        }
        if call.interleave_v:
            del caches[tuple(call.value_cache.shape)]
        return cls(
            rows=(call.query.shape[0], call.query.shape[1:].numel()),
            new=(call.key.data_ptr(), call.value.data_ptr()),
            caches=caches,
        )

    def dims(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the dimensions that name a row, or a block and a slot; None for another tensor."""
        if tuple(tensor.shape) in self.caches:
            return self.caches[tuple(tensor.shape)]
        is_rows = tensor.dim() > 1 and (tensor.shape[0], tensor.shape[1:].numel()) == self.rows
        if not is_rows or not tensor.is_floating_point() or tensor.data_ptr() in self.new:
            return None
        return (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Region:
    """A tensor in memory: where it begins and ends, and how an address gives a row or a slot.

    ``places``: (stride in bytes, size, factor of the index) of each dimension, the largest stride first.
    """

    name: str
    is_cache: bool
    begin: int
    end: int
    places: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> "_Region":
        bytes_ = tensor.element_size()
        factors = dict.fromkeys(range(tensor.dim()), 0)
        factors[dims[-1]] = 1
        if len(dims) == 2:
            factors[dims[0]] = tensor.shape[dims[1]]
        strides = [stride * bytes_ for stride in tensor.stride()]
        places = sorted(
            zip(strides, tensor.shape, factors.values(), strict=True),
            key=lambda place: -place[0],
        )
        last = sum(stride * (size - 1) for stride, size, _ in places) + bytes_
        begin = tensor.data_ptr()
        return cls(
            name=name,
            is_cache=len(dims) == 2,
            begin=begin,
            end=begin + last,
            places=tuple(places),
        )

    def indices(self, addresses: Any) -> list[int]:
        """Return the rows or slots, block × block_size + offset, that uint64 addresses lie in."""
        inside = addresses[(addresses >= self.begin) & (addresses < self.end)]
        rest = (inside - np.uint64(self.begin)).astype(np.int64)
        index, good = np.zeros_like(rest), np.ones(rest.shape, dtype=np.bool_)
        for stride, size, factor in self.places:
            at, rest = np.divmod(rest, max(1, stride))
            good &= at < size  # an address between this tensor's elements is another's
            index += at * factor
        found: list[int] = np.unique(index[good]).tolist()
        return found


@dataclass(slots=True)
class Trace:
    """Notes what one program after the other touches; :meth:`end` hands it over.

    ``reads`` gets, under a tensor's name and a program's rows, the slots that were loaded.
    """

    reads: dict[Key, set[int]]
    _regions: list[_Region] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)
    _slots: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, watched: Watched, arguments: Mapping[str, Any], reads: dict[Key, set[int]]
    ) -> "Trace":
        """Return the trace of a launch with these arguments by name."""
        tensors = {n: value for n, value in arguments.items() if isinstance(value, torch.Tensor)}
        dims = {name: watched.dims(tensor) for name, tensor in tensors.items()}
        regions = [_Region.of(n, tensors[n], found) for n, found in dims.items() if found]
        return cls(reads=reads, _regions=regions)

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Note a load; ``addresses`` uint64, ``mask`` bool of the same shape."""
        self._note(addresses, mask, reads=True)

    def stored(self, addresses: Any, mask: Any) -> None:
        """Note the rows of a store."""
        self._note(addresses, mask, reads=False)

    def _note(self, addresses: Any, mask: Any, reads: bool) -> None:
        live = np.atleast_1d(addresses)[np.atleast_1d(mask)]
        if not live.size:
            return
        low, high = live.min(), live.max()
        for region in self._regions:
            if high < region.begin or low >= region.end or (region.is_cache and not reads):
                continue
            found = region.indices(live)
            if not region.is_cache:
                self._rows.update(found)
            elif found:
                self._slots.setdefault(region.name, set()).update(found)

    def end(self) -> None:
        """End a program: keep what it read under its rows."""
        rows = tuple(sorted(self._rows))
        for name, slots in self._slots.items():
            self.reads.setdefault((name, rows), set()).update(slots)
        self._rows, self._slots = set(), {}
