"""What the programs of recorded launches store: which elements of a tensor, and whether they agree."""

from collections.abc import Iterator, Sequence
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
      earlier program did. On a GPU, the order of the programs decides which value stays.
    """

    name: str
    tensor: torch.Tensor
    stored: Any
    conflicts: tuple[str, ...]

    @property
    def unwritten(self) -> torch.Tensor:
        """Return which elements of the tensor no program stores to, bool, with its shape."""
        index = torch.zeros(self.tensor.shape, dtype=torch.int64)
        for dim, (size, stride) in enumerate(
            zip(self.tensor.shape, self.tensor.stride(), strict=True)
        ):
            shape = [size if at == dim else 1 for at in range(self.tensor.dim())]
            index += stride * torch.arange(size).view(shape)
        addresses = self.tensor.data_ptr() + index.numpy() * self.tensor.element_size()
        return torch.from_numpy(~np.isin(addresses.astype(np.uint64), self.stored))


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
            addresses = np.fromiter(stored, dtype=np.uint64, count=len(stored))
            found.append(
                TensorStores(
                    name=name, tensor=tensor, stored=addresses, conflicts=tuple(sorted(conflicts))
                )
            )
    return found


def _merged(programs: Sequence[ProgramLog], span: tuple[int, int]) -> tuple[set[int], set[str]]:
    """Return the addresses in a range that are stored to, and the lines with conflicts."""
    before: dict[int, Any] = {}
    conflicts = set()
    for log in programs:
        own: dict[int, Any] = {}
        for place, addresses, values in _stores(log, span):
            pairs = [*zip(addresses.tolist(), values.tolist(), strict=True)]
            if any(at in before and not _same(before[at], value) for at, value in pairs):
                conflicts.add(place)
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
