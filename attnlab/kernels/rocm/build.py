"""Build shared libraries from C++ source; cache them by source, compiler and processor."""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import Unavailable
from attnlab.kernels.cache_folder import check_private, private_folder, writing
from attnlab.kernels.child_process import ending_with_parent

DEVICE = Path(__file__).parent / "cpp"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = (
    "-std=c++20",
    "-march=native",
    "-ffp-contract=off",  # no fused multiply-add that the source does not have
    "-fno-strict-aliasing",  # the source accesses numbers through pointers to vectors
    "-fwrapv",  # signed integers wrap, as on a GPU
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
)
# Every memory access becomes a call to a function in cpp/kernel.h; no red zones, no runtime library.
CHECKED_FLAGS = (
    "-O1",
    "-g1",
    "-DATTNLAB_CHECKED",
    "-fsanitize=kernel-address",
    "--param=asan-instrumentation-with-call-threshold=0",
    "--param=asan-stack=0",
    "--param=asan-globals=0",
)
OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler: its command and the text of its --version."""

    command: str
    version: str

    @property
    def is_gcc(self) -> bool:
        """Return whether this is GCC; the checked build needs its flags."""
        return "Free Software Foundation" in self.version


@functools.cache
def find_compiler(asked: str | None) -> Compiler:
    """Return the compiler named ``asked`` ($CXX), or the first of g++, clang++ and c++ that exists.

    Raises Unavailable if there is none.
    """
    for name in (asked,) if asked else _COMPILERS:
        if shutil.which(name) is not None:
            done = subprocess.run([name, "--version"], capture_output=True, text=True)
            if done.returncode == 0:
                return Compiler(command=name, version=done.stdout)
    if asked:
        raise Unavailable(f"CXX must name a C++ compiler, got {asked!r}")
    raise Unavailable(
        "backend rocm compiles vLLM's own source, and no C++ compiler was found: install g++ "
        "(Debian, Ubuntu: apt-get install g++; conda: conda install gxx)"
    )


def build(
    name: str, text: str, flags: Sequence[str] = (), on_step: OnStep = lambda text: None
) -> Path:
    """Return the shared library compiled from ``text``; build it only if it is not in the cache.

    ``on_step`` is called before a compilation. Raises Unavailable with the compiler's first error.
    """
    compiler = find_compiler(os.environ.get("CXX"))
    key = hashlib.sha256(
        "\0".join([compiler.version, _processor(), headers(), *_FLAGS, *flags, text]).encode()
    ).hexdigest()[:24]
    folder = private_folder("hip")
    library = folder / f"{name}-{key}.so"
    if library.is_file():
        check_private(library)
        return library
    on_step(f"compiling {name}")
    with writing(), tempfile.TemporaryDirectory(dir=folder) as work:
        source, made = Path(work) / f"{name}.cpp", Path(work) / "made.so"
        source.write_text(text)
        command = [compiler.command, *_FLAGS, *flags, f"-I{DEVICE}", str(source), "-o", str(made)]
        done = subprocess.run(ending_with_parent(command), capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(
                f"{compiler.command} cannot compile {name}: {_first_error(done.stderr)}"
            )
        os.replace(made, library)
    return library


@functools.cache
def headers() -> str:
    """Return the text of the emulation's headers, which every build depends on."""
    return "".join(path.read_text() for path in sorted(DEVICE.glob("*.h")))


@functools.cache
def _processor() -> str:
    """Return a text that identifies this processor's instruction set, for which -march=native builds."""
    cpuinfo = Path("/proc/cpuinfo")
    found = (
        re.search(r"(?m)^(flags|Features)\s*:.*$", cpuinfo.read_text())
        if cpuinfo.is_file()
        else None
    )
    return platform.machine() + (found[0] if found else platform.processor())


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines()
    return lines[0] if lines else "no error text"
