"""Bindings (ctypes) of the emulated device and of the op's host code."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_void_p,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.platforms import Platform
from attnlab.kernels.cache_folder import check_private, private_folder, writing
from attnlab.kernels.child_process import ending_with_parent
from attnlab.kernels.rocm.findings import Findings, place_of, short

# Build shared libraries from C++ source; cache them by source, compiler and processor.

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
    """Return the adapted source of the vLLM at ``root``."""
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
    """Return a file's text with all adaptations applied; line numbers do not change."""
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
    """Return the compiler named ``asked`` ($CXX), or the first of g++, clang++ and c++ that exists."""
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


@contextmanager
def guarded_tensors(
    library: Any, arguments: Mapping[str, Any], writes: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with each tensor copied to a region 64 GiB away from the others.

    After the block the tensors named in ``writes`` are copied back into ``arguments``, and the memory is
    released. Raises Unavailable if the address space has no room.
    """
    placed, places = dict(arguments), []
    try:
        for number, (name, value) in enumerate(arguments.items()):
            if isinstance(value, torch.Tensor):
                span = 1 + sum(
                    (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
                )
                bytes_ = max(1, span * value.element_size())
                place = library.attnlab_place(number, bytes_)
                if not place:
                    raise Unavailable(
                        "the checked device has no address space left for its tensors"
                    )
                places.append((place, bytes_))
                memory = (ctypes.c_uint8 * (span * value.element_size())).from_address(place)
                flat = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
                placed[name] = flat.as_strided(value.shape, value.stride()).copy_(value)
        yield placed
        for name in writes:
            arguments[name].copy_(placed[name])
    finally:
        for place, bytes_ in places:
            library.attnlab_leave(ctypes.c_void_p(place), ctypes.c_size_t(bytes_))


# The op's tensors, in the order of enum in cpp/call.h.
TENSORS = (
    *("out", "exp_sums", "max_logits", "tmp_out", "query", "key_cache", "value_cache"),
    *("block_tables", "seq_lens", "query_start_loc", "alibi_slopes"),
    *("k_scale", "v_scale", "fp8_out_scale"),
)
OK, REJECTED, FAILED, ABORTED = range(4)
_DIMS = 8
# torch/headeronly/core/ScalarType.h
_SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24, torch.float8_e4m3fnuz: 26,
}  # fmt: skip


class Tensor(Structure):
    """torch::Tensor of cpp/host.h: address, dtype, shape and strides."""

    _fields_ = (
        ("data", c_void_p),
        ("scalar_type", c_int64),
        ("dims", c_int64),
        ("sizes", c_int64 * _DIMS),
        ("strides", c_int64 * _DIMS),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> "Tensor":
        """Return the description of a CPU tensor; None becomes a tensor without dimensions."""
        if tensor is None:
            return cls()
        return cls(
            tensor.data_ptr(),
            _SCALAR_TYPES[tensor.dtype],
            tensor.dim(),
            (c_int64 * _DIMS)(*tensor.shape),
            (c_int64 * _DIMS)(*tensor.stride()),
        )


class Arguments(Structure):
    """Arguments of the op, as in cpp/call.h."""

    _fields_ = (
        ("tensors", Tensor * len(TENSORS)),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("max_seq_len", c_int64),
        ("scale", c_double),
        ("kv_cache_dtype", c_char_p),
        ("mfma_type", c_char_p),
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Arguments":
        """Return the description of the op's arguments, given by parameter name."""
        return cls(
            (Tensor * len(TENSORS))(*(Tensor.of(given.get(name)) for name in TENSORS)),
            given["num_kv_heads"],
            given["block_size"],
            given["max_seq_len"],
            given["scale"],
            given["kv_cache_dtype"].encode(),
            given.get("mfma_type", "f16").encode(),
        )


# The callback that gives the host code a kernel's address by name. Without a function it is null: the host
# code then records its launches and runs none.
Finder = CFUNCTYPE(c_void_p, c_char_p)


class Context(Structure):
    """attnlab::Context of cpp/host.h."""

    _fields_ = (
        ("device", c_void_p),
        ("warp_size", c_int),
        ("platform", c_char_p),
        ("find", Finder),
    )


# Functions of the device: the type of the result, and those of the arguments unless ctypes knows them.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("device", "reads"), (c_void_p,)),
    **dict.fromkeys(("error", "finding"), (c_char_p,)),
    "region": (c_int, c_char_p, c_void_p, c_size_t, c_size_t, c_int, c_int),
    "place": (c_void_p, c_int, c_size_t),
    "fp8_to_float": (c_float, c_int, c_uint8),
    "float_to_fp8": (c_uint8, c_int, c_float),
    "float_to_bf16": (c_uint16, c_float),
    "float_to_f16_rtz": (c_uint16, c_float),
}


def prepare(faults: Sequence[str] = (), on_step: OnStep = lambda text: None) -> Path:
    """Build the emulated device with the planted ``faults`` of cpp/instructions.h; return its path."""
    flags = ["-O2", *(f"-DATTNLAB_FAULT_{fault}" for fault in faults)]
    return build("device", (DEVICE / "device.cpp").read_text(), flags, on_step)


@functools.cache
def device(faults: Sequence[str] = ()) -> ctypes.CDLL:
    """Build and load the emulated device."""
    library = ctypes.CDLL(str(prepare(faults)))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, f"attnlab_{name}")
        function.restype, function.argtypes = result, arguments or None
    return library


def call_host(library: ctypes.CDLL, context: Context, *arguments: Any) -> tuple[int, str]:
    """Call an op's host code, compiled from the source.

    Return its outcome and, unless that is FAILED, its text.
    """
    text = ctypes.create_string_buffer(1 << 14)
    outcome = library.attnlab_call(byref(context), *arguments, text, c_size_t(len(text)))
    return outcome, text.value.decode()


EMULATED = ("gfx90a", "gfx942", "gfx950")  # those that are emulated
_WRITES = ("out", "exp_sums", "max_logits", "tmp_out")
_SCRATCH = ("exp_sums", "max_logits", "tmp_out")
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """How the device runs a call.

    - ``checked``: check every memory access, on one core; see :class:`Findings`.
    - ``order``: the order in which threads run: 0 ascending, 1 descending, other values seed a shuffle. If
      the output depends on it, the kernel has a race.
    - ``faults``: faults planted in the device, for tests.
    """

    checked: bool = False
    order: int = 0
    faults: tuple[str, ...] = ()


PLAIN = DeviceOptions()


@dataclass(slots=True)
class Op:
    """The op of one source on one platform; its libraries are built at the first call.

    ``root`` is the folder that contains ``csrc/``. Raises Unavailable for a platform that the device does
    not emulate.
    """

    root: Path
    platform: Platform
    _texts: Texts | None = None
    _host: ctypes.CDLL | None = None
    _kernels: dict[tuple[str, bool], tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise Unavailable for a platform that is not emulated."""
        if self.platform.name not in EMULATED:
            raise Unavailable(
                f"platform must be one of {', '.join(EMULATED)} with backend rocm, got "
                f"{self.platform.name}: its kernels need waves of 32 and other matrix instructions"
            )

    def __call__(
        self,
        arguments: Mapping[str, Any],
        options: DeviceOptions = PLAIN,
        on_step: OnStep = lambda text: None,
    ) -> Findings:
        """Call the op with ``arguments`` by name; mutate ``out`` and the scratch tensors.

        All tensors are on the CPU. ``on_step`` is called before each compilation. Returns the findings of a
        checked run, empty otherwise. Raises KernelRejected with the text of the op's host check, and
        KernelFailed if a kernel fails.
        """
        with _ONE_AT_A_TIME:
            names = self._launched(arguments, on_step)
            kernels = {name: self._kernel(name, options.checked, on_step) for name in names}
            prepare(options.faults, on_step)
            return self._run(arguments, options, kernels)

    def launched(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of the kernels that the host code launches; raise KernelRejected."""
        with _ONE_AT_A_TIME:
            return self._launched(arguments, lambda text: None)

    def _launched(self, arguments: Mapping[str, Any], on_step: OnStep) -> list[str]:
        if self._host is None:
            self._texts = adapted(self.root)
            text = f'#include "host.h"\n{self._texts.host}\n#include "call.h"\n'
            text += f"// {self.platform.family}: the source queries the device once and caches the answer\n"
            self._host = ctypes.CDLL(str(build("host", text, ("-O0",), on_step)))
        return self._call(arguments, Finder()).splitlines()

    def _run(
        self,
        arguments: Mapping[str, Any],
        options: DeviceOptions,
        kernels: dict[str, tuple[Path, int]],
    ) -> Findings:
        library = device(options.faults)
        library.attnlab_begin(torch.get_num_threads(), options.checked, options.order)
        files = {name: path for name, (path, _) in kernels.items()}
        find = Finder(lambda name: kernels[name.decode()][1])
        if not options.checked:
            self._call(arguments, find, library, files)
            return Findings()
        shapes = {}
        with guarded_tensors(library, arguments, ("out",)) as placed:
            for name in TENSORS:
                if (tensor := placed.get(name)) is not None:
                    shapes[name] = tuple(tensor.shape)
                    library.attnlab_region(
                        name.encode(),
                        tensor.data_ptr(),
                        tensor.untyped_storage().nbytes(),
                        tensor.element_size(),
                        name in _WRITES,
                        name in _SCRATCH,
                    )
            self._call(placed, find, library, files)
        return Findings.collect(library, files, shapes)

    def _call(
        self,
        arguments: Mapping[str, Any],
        find: Any,
        library: Any = None,
        files: Mapping[str, Path] | None = None,
    ) -> str:
        """Call the host code and return its text; raise KernelRejected or KernelFailed."""
        context = Context(
            None if library is None else library.attnlab_device(),
            64,
            self.platform.name.encode(),
            find,
        )
        assert self._host is not None
        outcome, text = call_host(self._host, context, byref(Arguments.of(arguments)))
        if outcome == REJECTED:
            raise KernelRejected(text)
        if outcome == ABORTED:
            raise KernelFailed(text)
        if outcome == FAILED:
            raise KernelFailed(place_of(library, files or {}))
        return text

    def _kernel(self, name: str, checked: bool, on_step: OnStep) -> tuple[Path, int]:
        """Return the library of one kernel and the kernel's address in it."""
        if (name, checked) not in self._kernels:
            if checked and not find_compiler(os.environ.get("CXX")).is_gcc:
                raise Unavailable("the checked device needs GCC: set CXX=g++")
            macros = f"-D__{self.platform.name}__", "-D__GFX9__"
            flags = (*macros, *(CHECKED_FLAGS if checked else ("-O2",)))
            function = f'extern "C" void* attnlab_kernel() {{ return (void*)&{name}; }}\n'
            assert self._texts is not None
            text = f'#include "kernel.h"\n{self._texts.kernels}\n#line 1 "attnlab"\n{function}'
            path = build(short(name).removeprefix("paged_attention_ll4mi_"), text, flags, on_step)
            library = ctypes.CDLL(str(path))
            library.attnlab_kernel.restype = c_void_p
            self._kernels[name, checked] = path, int(library.attnlab_kernel())
        return self._kernels[name, checked]
