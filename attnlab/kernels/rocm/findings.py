"""Findings of a checked run of the emulated device, with lines of vLLM's source."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SOURCE = re.compile(r"csrc/(?:\w+/)*([\w.]+:\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """Reads of memory that was not written during the call: scratch, or a block's shared memory.

    - ``index``: of the first such read in its tensor; for shared memory in bytes.
    - ``block``, ``thread``: of the first read; ``line``: "file:line" of the source, "" if unknown.
    """

    tensor: str
    index: tuple[int, ...]
    count: int
    kernel: str
    block: tuple[int, int, int]
    thread: int
    line: str

    def __str__(self) -> str:
        """Return the finding as one line."""
        at = ", ".join(map(str, self.index))
        return (
            f"{self.tensor}[{at}] is read before it is written, {self.count} reads, {self.kernel}, "
            f"block {self.block}, thread {self.thread}, {self.line}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Findings:
    """The findings of a checked run.

    - ``unwritten``: reads of memory that was not written.
    - ``reads``: for each (kernel, tensor) and blockIdx.x, the elements that were read: bool, of the tensor's
      shape. blockIdx.x is the sequence in the attention kernels and the head in the reduce kernel.
    """

    unwritten: tuple[Unwritten, ...] = ()
    reads: dict[tuple[str, str], dict[int, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def collect(
        cls, library: Any, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]
    ) -> "Findings":
        """Collect the findings of the device's last run."""
        return cls(
            unwritten=tuple(
                _unwritten(library, i, files, shapes) for i in range(library.attnlab_findings())
            ),
            reads=_reads(library, list(files), shapes),
        )


def short(kernel: str) -> str:
    """Return a kernel's name without its template arguments."""
    return kernel.partition("<")[0]


def _unwritten(
    library: Any, i: int, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]
) -> Unwritten:
    numbers, code = (ctypes.c_uint64 * 7)(), ctypes.c_void_p()
    tensor = library.attnlab_finding(i, numbers, ctypes.byref(code)).decode()
    element, count, x, y, z, thread, launch = numbers
    shape = shapes.get(tensor)
    index = (int(element),) if shape is None else np.unravel_index(element, shape)
    kernel = list(files)[launch]
    return Unwritten(
        tensor=tensor,
        index=tuple(int(n) for n in index),
        count=int(count),
        kernel=short(kernel),
        block=(int(x), int(y), int(z)),
        thread=int(thread),
        line=line_of(code.value, files.values()),
    )


def _reads(
    library: Any, kernels: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[tuple[str, str], dict[int, torch.Tensor]]:
    found: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    numbers = (ctypes.c_uint * 2)()
    for name, shape in shapes.items():
        for i in range(library.attnlab_readers(name.encode())):
            bits = library.attnlab_reads(name.encode(), i, numbers)
            size = int(np.prod(shape))
            packed = np.ctypeslib.as_array(
                ctypes.cast(bits, ctypes.POINTER(ctypes.c_uint8)), ((size + 7) // 8,)
            )
            read = np.unpackbits(packed, count=size, bitorder="little").view(bool).reshape(shape)
            key = short(kernels[numbers[0]]), name
            found.setdefault(key, {})[int(numbers[1])] = torch.from_numpy(read)
    return found


def place_of(library: Any, files: Mapping[str, Path]) -> str:
    """Return the device's error text, with the line of the source if it is known."""
    code = ctypes.c_void_p()
    text: str = library.attnlab_error(ctypes.byref(code)).decode()
    for name in files:
        text = text.replace(name, short(name))
    line = line_of(code.value, files.values())
    return f"{text}, {line}" if line else text


def line_of(code: int | None, files: Any) -> str:
    """Return "file:line" of the source for an address of loaded code, or "" if unknown."""
    if not code or shutil.which("addr2line") is None:
        return ""
    for path in files:
        base = _loaded_at(path)
        if base is None or not base[0] <= code < base[1]:
            continue
        command = ["addr2line", "-i", "-e", str(path), hex(code - 1 - base[0])]
        done = subprocess.run(command, capture_output=True, text=True)
        found = _SOURCE.search(done.stdout)
        return found[1] if found else ""
    return ""


def _loaded_at(path: Path) -> tuple[int, int] | None:
    """Return the address range at which a library is mapped in this process, or None."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return None
    ends = [
        line.split()[0].split("-") for line in maps.read_text().splitlines() if str(path) in line
    ]
    if not ends:
        return None
    return min(int(a, 16) for a, _ in ends), max(int(b, 16) for _, b in ends)
