"""RunLog: launches, int32 overflows and out-of-bounds accesses of an interpreted call.

A product of two int32 values overflows silently, under the interpreter and on a GPU. A stride that the
kernel annotates as tl.int64 makes the product int64 on both. So a product that overflows here also
overflows on a GPU, in the lanes that are not masked.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.kernels.triton.limits import Budget
from attnlab.kernels.triton.trace import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch of a kernel: its name and grid."""

    kernel: str
    grid: tuple[int, int, int]

    def text(self) -> str:
        """Return the launch as text, without trailing grid dimensions of 1."""
        sizes = list(self.grid)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        return f"{self.kernel}[{', '.join(map(str, sizes))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """A source line of a kernel where a product of two int32 values overflowed."""

    file: str
    line: int
    left: int
    right: int

    def text(self) -> str:
        """Return the overflow as one sentence."""
        product = self.left * self.right
        return (
            f"int32 overflow at {Path(self.file).name}:{self.line}: "
            f"{self.left} × {self.right} = {product} exceeds 2^31"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A source line of a kernel that accessed memory outside all of its tensors.

    ``verb`` is "reads" or "writes"; ``place`` names the nearest tensor and the distance.
    """

    file: str
    line: int
    verb: str
    place: str

    def text(self) -> str:
        """Return the access as text."""
        return f"{Path(self.file).name}:{self.line} {self.verb} {self.place}"


@dataclass(slots=True)
class RunLog:
    """What was recorded while a call ran. It is mutated during the call.

    - ``launches``: in order; ``wraps``, ``outside``: the first of each source line.
    - ``lse``: [rows, num_heads] float32, the log-sum-exp that the op returned, or None.
    - ``padded``: the rows of the output after the last token if the call was padded, else None.
    - ``reads``: the cache slots that each program loaded, if the launch was traced
      (:mod:`attnlab.kernels.triton.trace`).
    - ``operations``: the number of operations of the interpreter; ``budget``: a limit of them, or None.
    """

    launches: list[Launch] = field(default_factory=list)
    wraps: dict[tuple[str, int], Wrap] = field(default_factory=dict)
    outside: dict[tuple[str, int], Outside] = field(default_factory=dict)
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    reads: dict[Key, set[int]] = field(default_factory=dict)
    operations: int = 0
    budget: Budget | None = None

    def operated(self) -> None:
        """Count an operation of the interpreter."""
        self.operations += 1
        if self.budget is not None:
            self.budget.spend()

    def multiply(self, left: Any, right: Any) -> Any:
        """Return left × right as NumPy computes it; record an int32 overflow."""
        product = np.multiply(left, right)
        if product.dtype == np.int32:
            exact = np.multiply(left, right, dtype=np.int64)
            wrong = np.atleast_1d(exact != product)
            if wrong.any():
                first, second = (np.broadcast_to(n, wrong.shape)[wrong][0] for n in (left, right))
                file, line = _kernel_line()
                wrap = Wrap(file=file, line=line, left=int(first), right=int(second))
                self.wraps.setdefault((file, line), wrap)
        return product

    def stray(self, verb: str, place: str) -> None:
        """Record an out-of-bounds access by the kernel's current line."""
        file, line = _kernel_line()
        note = Outside(file=file, line=line, verb=verb, place=place)
        self.outside.setdefault((file, line), note)

    def take(self, other: "RunLog") -> None:
        """Merge the log of another process of the same launch into this one."""
        self.wraps = {**other.wraps, **self.wraps}
        self.outside = {**other.outside, **self.outside}
        self.operations = max(self.operations, other.operations)
        for key, slots in other.reads.items():
            self.reads[key] = self.reads.get(key, set()) | slots


def _kernel_line() -> tuple[str, int]:
    """Return the file and line of the running kernel: the nearest frame outside Triton and this folder."""
    frame = sys._getframe(1)
    skipped = {Path(__file__).parent, *_triton_folder()}
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if skipped.isdisjoint(path.parents):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _triton_folder() -> tuple[Path, ...]:
    """Return the folder of the installed triton package, or none."""
    spec = importlib.util.find_spec("triton")
    return () if spec is None or spec.origin is None else (Path(spec.origin).parent,)
