"""vLLM's CUDA cache writes, compiled from csrc/cache_kernels.cu for the emulated device."""

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.kernels.cuda.source_text import adapted
from attnlab.kernels.rocm import device as emulated
from attnlab.kernels.rocm.build import CHECKED_FLAGS, build, find_compiler
from attnlab.kernels.rocm.findings import place_of

# The tensors of each op, in the order of its parameters; the cache comes before kv_cache_dtype.
PARAMETERS = {
    "concat_and_cache_mla": ("kv_c", "k_pe", "kv_cache", "slot_mapping", "scale"),
    "reshape_and_cache_flash": (
        *("key", "value", "key_cache", "value_cache"),
        *("slot_mapping", "k_scale", "v_scale"),
    ),
    "reshape_and_cache": (
        *("key", "value", "key_cache", "value_cache"),
        *("slot_mapping", "k_scale", "v_scale"),
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
        """Call an op with its tensors by name, on the CPU; mutate the caches.

        Raises Unavailable without the source or a compiler, KernelRejected with the text of the op's own
        check, and KernelFailed if a kernel fails.
        """
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
            context = emulated.Context(device.attnlab_device(), 32, b"cuda", emulated.no_finder())
            text = ctypes.create_string_buffer(1 << 12)
            outcome = host.attnlab_call(
                ctypes.byref(context),
                op.encode(),
                (emulated.Tensor * len(given))(*given),
                kv_cache_dtype.encode(),
                text,
                len(text),
            )
        if outcome == emulated.REJECTED:
            raise KernelRejected(text.value.decode())
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
            self._library.attnlab_call.argtypes = (
                ctypes.POINTER(emulated.Context),
                ctypes.c_char_p,
                ctypes.POINTER(emulated.Tensor),
                ctypes.c_char_p,
                ctypes.c_char_p,
                ctypes.c_size_t,
            )
        return self._library


@lru_cache(maxsize=8)
def cache_ops(root: Path) -> CacheOps:
    """Return the cache writes of a source; they keep what they build."""
    return CacheOps(root=root)
