"""What the interpreter saw while a call ran: launches, int32 products that wrapped, and accesses outside
the kernel's tensors.

A product of two int32 numbers wraps silently, under the interpreter as on a GPU; a stride that a kernel
annotates tl.int64 makes the product int64 on both. So a product that wraps here wraps there, too, in the
lanes that are not masked off.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlab.kernels.triton.trace import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel that was launched, and the programs of its grid."""

    kernel: str
    grid: tuple[int, int, int]

    def text(self) -> str:
        """Return the launch in words, without the trailing dimensions of 1."""
        sizes = list(self.grid)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        return f"{self.kernel}[{', '.join(map(str, sizes))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """A line of a kernel where int32 numbers were multiplied and the product did not fit."""

    file: str
    line: int
    left: int
    right: int

    def text(self) -> str:
        """Return what wrapped, in words."""
        product = self.left * self.right
        return (
            f"an int32 product wraps at {Path(self.file).name}:{self.line}: "
            f"{self.left} × {self.right} = {product} is beyond 2^31"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A line of a kernel that read or wrote where none of its tensors is."""

    file: str
    line: int
    verb: str
    place: str

    def text(self) -> str:
        """Return what was touched, in words."""
        return f"{Path(self.file).name}:{self.line} {self.verb} {self.place}"


@dataclass(slots=True)
class RunLog:
    """What was seen; changed while a call runs. Of wraps and strays each line's first is kept.

    - ``lse``: [rows, num_heads] float32, logarithms of sums that the op gives beside its output, or None.
    - ``padded``: the output's rows behind the last token, where the call was padded; else None.
    ``reads``: of traced launches alone, the slots that programs loaded (:mod:`attnlab.kernels.triton.trace`).
    """

    launches: list[Launch] = field(default_factory=list)
    wraps: dict[tuple[str, int], Wrap] = field(default_factory=dict)
    outside: dict[tuple[str, int], Outside] = field(default_factory=dict)
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    reads: dict[Key, set[int]] = field(default_factory=dict)

    def multiply(self, left: Any, right: Any) -> Any:
        """Return left × right as NumPy does, and note where int32 wraps."""
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
        """Note that the kernel's current line reads or writes at a place that is no tensor's."""
        file, line = _kernel_line()
        note = Outside(file=file, line=line, verb=verb, place=place)
        self.outside.setdefault((file, line), note)

    def take(self, other: "RunLog") -> None:
        """Take over what another process saw of the same launch."""
        self.wraps = {**other.wraps, **self.wraps}
        self.outside = {**other.outside, **self.outside}
        for key, slots in other.reads.items():
            self.reads[key] = self.reads.get(key, set()) | slots


def _kernel_line() -> tuple[str, int]:
    """Return the file and line of the kernel that is running: the nearest frame that is no library's."""
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
