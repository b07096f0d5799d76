"""Backend ``cuda``: the cache write of vLLM's csrc/cache_kernels.cu, compiled from its own source.

The op runs on the emulated device; no GPU is needed, and none is used.
"""

import ctypes
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.fields import refuse
from attnlab.case.ops import RELEASES, WRITE
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput, check_release
from attnlab.kernels.binding import arguments_of, finish
from attnlab.kernels.rocm import device as emulated
from attnlab.kernels.rocm.device import CHECKED_FLAGS, build, find_compiler
from attnlab.kernels.rocm.findings import place_of
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.tensors.call import KernelCall

# Take the cache writes out of csrc/cache_kernels.cu, and adapt them for a C++ compiler for the CPU.
#
# Only the listed functions and macros are compiled: the rest of the file uses other parts of CUDA. Includes
# and launches are replaced; every line keeps its number. A source that lacks an expected part is rejected.

OPS = ("concat_and_cache_mla", "reshape_and_cache_flash", "reshape_and_cache")
# By release, in this order of searching: the file that has the ops, and what it includes of vLLM's own text.
FOLDERS = ("csrc", "csrc/libtorch_stable")
MAIN = "cache_kernels.cu"
VECTORS = ("quantization/vectorization.cuh", "quantization/vectorization_utils.cuh")
CONVERSIONS = (
    "quantization/w8a8/fp8/nvidia/quant_utils.cuh",
    "quantization/fp8/nvidia/quant_utils.cuh",
)
DTYPES = ("core/vec_dtypes/dtype_fp8.cuh", "attention/dtype_fp8.cuh")
_KERNELS = (
    "reshape_and_cache_kernel",
    "reshape_and_cache_flash_kernel",
    "concat_and_cache_mla_kernel",
    "concat_and_cache_ds_mla_kernel",
)
_DEVICE = re.compile(
    r"(?m)^template\s*<[^;{}()]*>\s*(?:struct CopyWithScaleOp|__global__ void "
    rf"(?:{'|'.join(_KERNELS)})\()"
)
_HOST = re.compile(rf"(?m)^void (?:{'|'.join(OPS)})\(")
_MACRO = re.compile(
    r"(?m)^#define (?:CALL|LAUNCH)_(?:RESHAPE_AND_CACHE|RESHAPE_AND_CACHE_FLASH|CONCAT_AND_CACHE_MLA"
    r"|CONCAT_AND_CACHE_DS_MLA)\((?:.*\\\n)*.*$"
)
_DIVISOR = re.compile(
    r"(?m)^#if defined\(__gfx942__\)\n(?:constexpr float kFp8ScaleDivisor.*\n|#el.*\n)*#endif$"
)
_DTYPE_FUNCTION = re.compile(r"(?m)^inline Fp8KVCacheDataType get_fp8_kv_cache_data_type\(")
_LAUNCH = re.compile(r"vllm::(\w+)<([^<>;]*)>([\s\\]*)<<<(\w+), (\w+), 0, stream>>>\(")


def has_source(root: Path) -> bool:
    """Return whether the vLLM at ``root`` contains csrc/cache_kernels.cu with its headers."""
    return _file(root, (MAIN,)) is not None and _file(root, CONVERSIONS) is not None


def source_files(root: Path) -> list[Path]:
    """Return the files of the vLLM at ``root`` that are compiled."""
    groups = (*((name,) for name in VECTORS), CONVERSIONS, DTYPES, (MAIN,))
    return [file for names in groups if (file := _file(root, names)) is not None]


def adapted(root: Path) -> str:
    """Return the adapted text of the cache writes of the vLLM at ``root``, its headers first."""
    parts = [_whole(root, (name,)) for name in VECTORS]
    parts += [_dtypes(root), _whole(root, CONVERSIONS), _main(root)]
    return "\n".join(parts)


def _main(root: Path) -> str:
    file = _expected(root, (MAIN,))
    text = _without_comments(file.read_text())
    kernels = [(m.start(), _end(text, m.end() - 1)) for m in _DEVICE.finditer(text)]
    host = [(m.start(), _end(text, m.end() - 1)) for m in _HOST.finditer(text)]
    macros = [m.span() for pattern in (_MACRO, _DIVISOR) for m in pattern.finditer(text)]
    if len(host) != len(OPS) or not kernels:
        raise Unavailable(
            f"{_name(root, file)} is not as expected: it has {len(host)} of the ops {', '.join(OPS)}"
        )
    # `namespace vllm {` and its end are put on the line of each kernel: the lines keep their numbers.
    changed = {begin: ("namespace vllm { ", " }") for begin, _ in kernels}
    return _line(root, file, _kept(text, [*kernels, *host, *macros], changed))


def _kept(text: str, spans: list[tuple[int, int]], around: dict[int, tuple[str, str]]) -> str:
    """Return the spans of a text, with the line breaks between them.

    Each launch becomes a call that the device runs; raises Unavailable for one in an unknown form.
    """
    done, at = [], 0
    for begin, end in sorted(spans):
        before, after = around.get(begin, ("", ""))
        done += ["\n" * text.count("\n", at, begin), before, text[begin:end], after]
        at = end
    text = _LAUNCH.sub(r'attnlab::launch("\1", vllm::\1<\2>)\3(\4, \5, ', "".join(done))
    if "<<<" in text:
        raise Unavailable(f"{MAIN} is not as expected: a launch has an unknown form")
    return text


def _dtypes(root: Path) -> str:
    """Return the function that reads kv_cache_dtype, which older releases do not have."""
    file = _file(root, DTYPES)
    text = "" if file is None else _without_comments(file.read_text())
    found = _DTYPE_FUNCTION.search(text)
    if file is None or found is None:
        return ""
    span = found.start(), _end(text, found.end() - 1)
    return _line(root, file, _kept(text, [span], {found.start(): ("namespace vllm { ", " }")}))


def _whole(root: Path, names: tuple[str, ...]) -> str:
    file = _expected(root, names)
    text = re.sub(r"(?m)^#(?:include|pragma once).*$", "", file.read_text())
    return _line(root, file, text)


def _line(root: Path, file: Path, text: str) -> str:
    return f'#line 1 "{_name(root, file)}"\n{text}'


def _name(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def _expected(root: Path, names: tuple[str, ...]) -> Path:
    file = _file(root, names)
    if file is None:
        raise Unavailable(
            f"{root} has no {FOLDERS[0]}/{names[0]}: use an sdist or a checkout of vLLM (a wheel does not "
            "contain it); attnlab fetch --sdist 0.33.0 downloads one"
        )
    return file


def _file(root: Path, names: tuple[str, ...]) -> Path | None:
    candidates = (root / folder / name for name in names for folder in FOLDERS)
    return next((one for one in candidates if one.is_file()), None)


def _without_comments(text: str) -> str:
    """Return a text without comments; the line breaks stay."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def _end(text: str, opening: int) -> int:
    """Return the end of a function or struct whose parameters, or name, are at ``opening``."""
    at = text.index("{", _closing(text, opening) if text[opening] == "(" else opening)
    at = _closing(text, at)
    return at + 1 if text.startswith(";", at) else at


def _closing(text: str, opening: int) -> int:
    """Return the index after the bracket that closes the one at ``opening``."""
    depth, pair = 0, {"(": "()", "{": "{}"}[text[opening]]
    for found in re.finditer(rf"[\{pair[0]}\{pair[1]}]", text[opening:]):
        depth += 1 if found[0] == pair[0] else -1
        if not depth:
            return opening + found.end()
    raise Unavailable(f"{MAIN} is not as expected: a bracket is not closed")


# The tensors of each op, in the order of its parameters; the cache comes before kv_cache_dtype.
PARAMETERS = {
    "concat_and_cache_mla": ("kv_c", "k_pe", "kv_cache", "slot_mapping", "scale"),
    **dict.fromkeys(
        ("reshape_and_cache_flash", "reshape_and_cache"),
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"),
    ),
}
_WRITTEN = ("kv_cache", "key_cache", "value_cache")
_HEADERS = Path(__file__).parent / "cpp"
# Unoptimised, so that a vector is read and written as a whole, as on a GPU.
_FLAGS = (*CHECKED_FLAGS, "-O0", "-fsanitize-coverage=trace-pc")
_ONE_AT_A_TIME = threading.Lock()


@dataclass(slots=True)
class CacheOps:
    """The cache writes of one source; they are built at the first call. ``root``: the folder with ``csrc/``.

    Every access to memory is checked: one outside of the tensors, a write to an input, a misaligned address,
    and a kernel that does not end, raise KernelFailed with the line of the source.
    """

    root: Path
    _library: ctypes.CDLL | None = None
    _path: Path = field(default_factory=Path)

    def __call__(self, op: str, tensors: Mapping[str, torch.Tensor], kv_cache_dtype: str) -> None:
        """Call an op with its tensors by name, on the CPU; mutate the caches."""
        with _ONE_AT_A_TIME:
            host, device = self._loaded(), emulated.device()
            device.attnlab_begin(1, True, 0)
            for name, tensor in tensors.items():
                memory = tensor.untyped_storage()
                size, written = tensor.element_size(), name in _WRITTEN
                device.attnlab_region(
                    name.encode(), memory.data_ptr(), memory.nbytes(), size, written, False
                )
            given = [emulated.Tensor.of(tensors[name]) for name in PARAMETERS[op]]
            context = emulated.Context(device.attnlab_device(), 32, b"cuda", emulated.Finder())
            own = (emulated.Tensor * len(given))(*given)
            outcome, text = emulated.call_host(
                host, context, op.encode(), own, kv_cache_dtype.encode()
            )
        if outcome == emulated.REJECTED:
            raise KernelRejected(text)
        if outcome == emulated.FAILED:
            raise KernelFailed(place_of(device, {op: self._path}))

    def _loaded(self) -> ctypes.CDLL:
        if self._library is None:
            if not find_compiler(os.environ.get("CXX")).is_gcc:
                raise Unavailable("the cache writes of CUDA need GCC: set CXX=g++")
            before, after = ((_HEADERS / name).read_text() for name in ("cuda.h", "call.h"))
            text = f'{before}\n{adapted(self.root)}\n#line 1 "attnlab"\n{after}'
            self._path = build("cache_kernels", text, _FLAGS)
            self._library = ctypes.CDLL(str(self._path))
        return self._library


@lru_cache(maxsize=8)
def cache_ops(root: Path) -> CacheOps:
    """Return the cache writes of a source; they keep what they build."""
    return CacheOps(root=root)


@dataclass(frozen=True, kw_only=True)
class CudaBackend(Backend):
    """reshape_and_cache_flash of CUDA; ``path``: an sdist or a checkout, None for the installed vLLM."""

    path: Path | str | None = None

    name = "cuda"
    ops = (WRITE,)
    is_deterministic = True
    blind_spots = ("the timing, registers and vector instructions of real hardware",)

    @cached_property
    def source(self) -> Source:
        """Return the vLLM whose csrc/cache_kernels.cu runs; raise Unavailable for one without it."""
        source = find_source(self.path)
        if not has_source(source.root):
            raise Unavailable(
                f"{source.text()} ({source.kind}) does not contain csrc/cache_kernels.cu: pass an sdist or "
                "a checkout as --source; attnlab fetch --sdist 0.33.0 downloads one"
            )
        return source

    @property
    def version(self) -> str:
        return self.source.text()

    @property
    def release(self) -> str:
        return self.source.rules or RELEASES[-1]

    def check(self, case: Case) -> None:
        super().check(case)
        check_release(self.source, case)
        if case.machine.family != "cuda":
            allowed = [one.name for one in PLATFORMS.values() if one.family == "cuda"]
            refuse("platform", f"one of {', '.join(allowed)} with backend cuda", case.platform)

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return f"{self.source.text()} csrc/cache_kernels.cu, emulated device"

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        options.on_step(f"kernels, {WRITE} of CUDA")
        given = arguments_of(call, target)
        kv_cache_dtype = given.pop("kv_cache_dtype")
        cache_ops(self.source.root)(WRITE, given, kv_cache_dtype)
        finish(call, target, given)
        return RunOutput()
