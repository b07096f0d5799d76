"""What the programs of recorded launches store: which elements of a tensor, and whether they agree."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.kernels.triton.probe import LaunchLog, ProgramLog


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorStores:
    """The stores to one tensor.

    - ``name``: of the argument of the kernel that stores. ``tensor``: what it is.
    - ``stored``: the addresses of its elements that any program stores to (uint64).
    - ``conflicts``: the source lines, "file:line", whose stores put another value into an element than an
      earlier program did, with the addresses of these elements (uint64). On a GPU, the order of the programs
      decides which value stays.
    """

    name: str
    tensor: torch.Tensor
    stored: Any
    conflicts: Mapping[str, Any]

    @property
    def unwritten(self) -> torch.Tensor:
        """Return which elements of the tensor no program stores to, bool, with its shape."""
        return ~self.holds(self.stored)

    def holds(self, addresses: Any) -> torch.Tensor:
        """Return which elements of the tensor are at ``addresses`` (uint64), bool, with its shape."""
        index = torch.zeros(self.tensor.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(
            zip(self.tensor.shape, self.tensor.stride(), strict=True)
        ):
            shape = [size if at == dim else 1 for at in range(self.tensor.dim())]
            index += stride * torch.arange(size).view(shape)
        own = self.tensor.data_ptr() + index.numpy() * self.tensor.element_size()
        return torch.from_numpy(np.isin(own.astype(np.uint64), addresses))


def stores_of(launches: Sequence[LaunchLog]) -> list[TensorStores]:
    """Return the stores to each tensor that a program of the launches stores to."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for launch in launches:
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor) and value.numel():
                tensors.setdefault(value.data_ptr(), (name, value))
    programs = [log for launch in launches for log in launch.programs if log.stores]
    found = []
    for name, tensor in tensors.values():
        begin, size = tensor.data_ptr(), tensor.element_size()
        last = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        span = (begin, begin + (last + 1) * size)
        stored, conflicts = _merged(programs, span)
        if stored:
            found.append(
                TensorStores(
                    name=name,
                    tensor=tensor,
                    stored=_array(stored),
                    conflicts={place: _array(conflicts[place]) for place in sorted(conflicts)},
                )
            )
    return found


def _array(addresses: set[int]) -> Any:
    return np.fromiter(addresses, dtype=np.uint64, count=len(addresses))


def _merged(
    programs: Sequence[ProgramLog], span: tuple[int, int]
) -> tuple[set[int], dict[str, set[int]]]:
    """Return the addresses in a range that are stored to, and those of conflicts by line."""
    before: dict[int, Any] = {}
    conflicts: dict[str, set[int]] = {}
    for log in programs:
        own: dict[int, Any] = {}
        for place, addresses, values in _stores(log, span):
            pairs = [*zip(addresses.tolist(), values.tolist(), strict=True)]
            others = {at for at, value in pairs if at in before and not _same(before[at], value)}
            if others:
                conflicts.setdefault(place, set()).update(others)
            own |= pairs
        before |= own
    return set(before), conflicts


def _stores(log: ProgramLog, span: tuple[int, int]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the stores of a program in a range: "file:line", addresses, values."""
    for (file, line), parts in log.stores.items():
        for addresses, values in zip(parts, log.values[file, line], strict=True):
            inside = (addresses >= span[0]) & (addresses < span[1])
            if inside.any():
                yield f"{Path(file).name}:{line}", addresses[inside], values[inside]


def _same(one: Any, other: Any) -> bool:
    """Answer whether two values are equal; NaN equals NaN."""
    return bool(one == other or (one != one and other != other))
