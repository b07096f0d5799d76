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

# Adapt the source of csrc/rocm's attention for a C++ compiler for the CPU.
#
# HIP's extensions of C++ are replaced by names that the headers in ``cpp/`` define. Code that computes is
# unchanged, except AMD's inline assembler, and every line keeps its number. A source that lacks an expected
# pattern is rejected: the release has changed and the adaptations must be reviewed.

FOLDER = "csrc/rocm"
SINGLE = "attention.cu"  # kernels and host code in one file (older releases)
KERNELS = "attention_kernels.cuh"
DISPATCH = "attention_dispatch.cu"
ENTRIES = re.compile(r"attention_paged_attn_\w+\.cu")
HOST_BEGINS = "#define LAUNCH_CUSTOM_ATTENTION_MFMA16"  # everything after it is host code


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """One change of the source text.

    - ``what``, ``why``: its subject and its reason, as text.
    - ``pattern``, ``replacement``: for re.sub.
    - ``least``: the least number of matches; a source with fewer is rejected.
    """

    what: str
    pattern: str
    replacement: str
    why: str
    least: int


_VECTOR_ZERO = r"(\b\w+(?:\[[^\]\n]*\]|\.\w+)+) = \{0\};"
_DPP = (
    r'asm\("v_nop\\n v_nop\\n (v_\w+_f32_dpp) %0, %1, %2 row_ror:(\d+)"(\s*): "=v"\(([^)]*)\)(\s*)'
    r': "v"\(\4\), "v"\(\4\)\);'
)
_ON = r"([^;<>]*)>([\s\\]*)<<<(\w+), (\w+), 0, stream>>>\("
_ATTENTION = r"(paged_attention_ll4mi_QKV_\w+_kernel)<([\s\\]*)T, KVT, KV_DTYPE, OUTT, " + _ON
_REDUCTION = r"(paged_attention_ll4mi_reduce_kernel)<T, OUTT, " + _ON
_SKIP = (
    r"if \(vglobal_fetch_start >= seq_len\) \{(\s*)continue;(\s*)\}(\s*)"
    r"if \((vglobal_fetch_start \+\s*CONTIGUOUS_KV_ELEMS_16B_LOAD >\s*seq_len)\) \{(\s*)(\S+) ="
)
ADAPTATIONS = (
    Adaptation(
        what="includes",
        pattern=r"(?m)^#include .*$",
        replacement="",
        why="the headers in cpp/ replace those of torch, HIP and vLLM",
        least=2,
    ),
    Adaptation(
        what="pragma once",
        pattern=r"(?m)^#pragma once$",
        replacement="",
        why="the text is compiled as a main file",
        least=0,
    ),
    Adaptation(
        what="assertions that always fail",
        pattern=r"static_assert\(false,",
        replacement="static_assert(!sizeof(T),",
        why="g++ 12 rejects static_assert(false) in a branch that is never instantiated",
        least=5,
    ),
    Adaptation(
        what="vectors set to {0}",
        pattern=_VECTOR_ZERO,
        replacement=r"attnlab::clear(\1);",
        why="g++ does not assign {0} to a vector",
        least=8,
    ),
    Adaptation(
        what="shared memory",
        pattern=r"__shared__ (\w+) (\w+)((?:\[[^\]\n]*\])*);",
        replacement=r"auto& \2 = attnlab::shared<\1\3>(__LINE__);",
        why="C++ has no keyword for memory shared by the threads of a block",
        least=6,
    ),
    Adaptation(
        what="assembler: v_…_dpp row_ror",
        pattern=_DPP,
        replacement=r"\4 = attnlab::\1_row_ror(\4, \2);\3\5",
        why="AMD assembler: maximum or sum with the value of another lane in the row",
        least=8,
    ),
    Adaptation(
        what="lanes that skip a matrix instruction",
        pattern=_SKIP,
        replacement=r"if (vglobal_fetch_start >= seq_len) {\1attnlab::clear(\6);\2}\3else if (\4) {\5\6 =",
        why="some lanes skip a matrix instruction that uses the registers of all 64 lanes, active or not; "
        "their contents depend on AMD's compiler; here they are zero, which the code intends",
        least=0,
    ),
    Adaptation(
        what="launches of the attention kernels",
        pattern=_ATTENTION,
        replacement=r'attnlab::launch("\1",\2 {attnlab::type<T>, attnlab::type<KVT>, KV_DTYPE, '
        r"attnlab::type<OUTT>, \3})\4(\5, \6, ",
        why="a launch calls the emulated device, which finds the kernel by name and template arguments",
        least=2,
    ),
    Adaptation(
        what="launches of the reduce kernel",
        pattern=_REDUCTION,
        replacement=r'attnlab::launch("\1", {attnlab::type<T>, attnlab::type<OUTT>, \2})\3(\4, \5, ',
        why="as for the attention kernels",
        least=1,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The adapted source of a release: for the kernels, and for the host code (which includes both)."""

    kernels: str
    host: str


def has_source(root: Path) -> bool:
    """Return whether the vLLM at ``root`` contains csrc/rocm's attention."""
    return any((root / FOLDER / name).is_file() for name in (SINGLE, KERNELS))


def adapted(root: Path) -> Texts:
    """Return the adapted source of the vLLM at ``root``.

    Raises Unavailable if it has no csrc/rocm attention or the adaptations do not match it.
    """
    folder = root / FOLDER
    if (folder / SINGLE).is_file():
        whole = adapt(SINGLE, (folder / SINGLE).read_text())
        return Texts(kernels=_kernels(SINGLE, whole), host=whole)
    if not (folder / KERNELS).is_file():
        raise Unavailable(
            f"{root} has no {FOLDER}/{SINGLE} and no {FOLDER}/{KERNELS}: use an sdist or a checkout of "
            "vLLM (a wheel does not contain them); attnlab fetch --sdist 0.33.0 downloads one"
        )
    whole = adapt(KERNELS, (folder / KERNELS).read_text())
    entries = sorted(p for p in folder.iterdir() if ENTRIES.fullmatch(p.name))
    if not entries or not (folder / DISPATCH).is_file():
        raise Unavailable(f"{FOLDER} is not as expected: {KERNELS} without {DISPATCH} and entries")
    rest = [_without_includes(path) for path in (*entries, folder / DISPATCH)]
    return Texts(kernels=_kernels(KERNELS, whole), host="\n".join([whole, *rest]))


def adapt(name: str, text: str) -> str:
    """Return a file's text with all adaptations applied; line numbers do not change.

    Raises Unavailable if an expected pattern is missing.
    """
    lines = text.count("\n")
    for change in ADAPTATIONS:
        text, times = re.subn(change.pattern, change.replacement, text)
        if times < change.least:
            raise Unavailable(
                f"{FOLDER}/{name} is not as expected: found {change.what} {times} times in the known form, "
                f"expected at least {change.least}"
            )
    if text.count("\n") != lines:
        raise AssertionError(f"an adaptation of {name} moved lines")
    left = re.search(r"<<<|\basm\b|__shared__", text)
    if left is not None:
        line = text.count("\n", 0, left.start()) + 1
        raise Unavailable(
            f"{FOLDER}/{name} is not as expected: line {line} contains {left[0]!r} in an unknown form"
        )
    return f'#line 1 "{FOLDER}/{name}"\n{text}'


def _kernels(name: str, text: str) -> str:
    """Return the part of an adapted source that is compiled for the device."""
    kernels, mark, _ = text.partition(HOST_BEGINS)
    if not mark:
        raise Unavailable(f"{FOLDER}/{name} is not as expected: it has no {HOST_BEGINS!r}")
    return kernels


def _without_includes(path: Path) -> str:
    text = re.sub(r"(?m)^#include .*$", "", path.read_text())
    return f'#line 1 "{FOLDER}/{path.name}"\n{text}'


def times_adapted(root: Path) -> list[tuple[Adaptation, int]]:
    """Return the adaptations that the vLLM at ``root`` needs, each with its number of matches."""
    folder = root / FOLDER
    file = next((folder / n for n in (SINGLE, KERNELS) if (folder / n).is_file()), None)
    if file is None:
        raise Unavailable(f"{root} has no {FOLDER} attention")
    text = file.read_text()
    counts = [(change, len(re.findall(change.pattern, text))) for change in ADAPTATIONS]
    return [(change, times) for change, times in counts if times]


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
