"""Record which slots of a paged cache each program of a launch loads, and for which rows.

Whether a read is right depends on the sequence that it is for. So reads are recorded by program, and a
program is identified by the rows that it accesses: rows of a query that it loads, or of an output that it
stores.
:func:`attnlab.lab.reads.traced` assigns rows and slots to sequences; this module has no notion of one.

Tensors are identified by their shapes, not by identity: ops may copy the cache into another layout, or the
query into another dtype. A load that is masked off is not a read. Without tracing, nothing here is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from attnlab.tensors.call import KernelCall

Key = tuple[str, tuple[int, ...]]  # name of the kernel's argument, rows of the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The shapes by which a call's tensors are found among a kernel's arguments.

    - ``rows``: (num_tokens, elements per row) of a query or an output.
    - ``new``: addresses of the new keys and values, which may have the same shape but are neither.
    - ``caches``: shapes of a key or value cache; for each, its block dimension and its slot dimension.
    """

    rows: tuple[int, int]
    new: tuple[int, int]
    caches: dict[tuple[int, ...], tuple[int, int]]

    @classmethod
    def of(cls, call: KernelCall) -> "Watched":
        """Return the shapes of a call, with its caches in both of vLLM's layouts.

        Interleaved values (``interleave_v``) are not traced; their keys are.
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
        """Return the dimension of rows, or those of blocks and slots; None for any other tensor."""
        if tuple(tensor.shape) in self.caches:
            return self.caches[tuple(tensor.shape)]
        is_rows = tensor.dim() > 1 and (tensor.shape[0], tensor.shape[1:].numel()) == self.rows
        if not is_rows or not tensor.is_floating_point() or tensor.data_ptr() in self.new:
            return None
        return (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """The memory of a tensor, and how to compute a row or a slot from an address.

    ``begin``, ``end``: addresses. ``places``: (stride in bytes, size, factor of the index) per dimension,
    the largest stride first.
    """

    name: str
    is_cache: bool
    begin: int
    end: int
    places: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> "Region":
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
        """Return the rows, or the slots as block × block_size + slot, of uint64 addresses."""
        inside = addresses[(addresses >= self.begin) & (addresses < self.end)]
        rest = (inside - np.uint64(self.begin)).astype(np.int64)
        index, good = np.zeros_like(rest), np.ones(rest.shape, dtype=np.bool_)
        for stride, size, factor in self.places:
            at, rest = np.divmod(rest, max(1, stride))
            good &= at < size  # an address between two elements belongs to another tensor
            index += at * factor
        found: list[int] = np.unique(index[good]).tolist()
        return found


@dataclass(slots=True)
class Trace:
    """Recorder of the accesses of a launch's programs, which run one after the other.

    :meth:`end` adds the slots that a program loaded to ``reads``, by argument name and the program's rows.
    """

    reads: dict[Key, set[int]]
    _regions: list[Region] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)
    _slots: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, watched: Watched, arguments: Mapping[str, Any], reads: dict[Key, set[int]]
    ) -> "Trace":
        """Return the trace of a launch; ``arguments`` by name. The trace changes ``reads``."""
        tensors = {n: value for n, value in arguments.items() if isinstance(value, torch.Tensor)}
        dims = {name: watched.dims(tensor) for name, tensor in tensors.items()}
        regions = [Region.of(n, tensors[n], found) for n, found in dims.items() if found]
        return cls(reads=reads, _regions=regions)

    def loaded(self, addresses: Any, mask: Any) -> None:
        """Record a load; ``addresses`` uint64, ``mask`` bool of the same shape."""
        self._record(addresses, mask, reads=True)

    def stored(self, addresses: Any, mask: Any, values: Any) -> None:
        """Record the rows of a store; as :meth:`loaded`. ``values`` are not recorded."""
        self._record(addresses, mask, reads=False)

    def _record(self, addresses: Any, mask: Any, reads: bool) -> None:
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
        """End a program: add its slots to ``reads`` under its rows."""
        rows = tuple(sorted(self._rows))
        for name, slots in self._slots.items():
            self.reads.setdefault((name, rows), set()).update(slots)
        self._rows, self._slots = set(), {}
