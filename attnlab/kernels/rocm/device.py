"""Bindings (ctypes) of the emulated device and of the op's host code."""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import torch

from attnlab.kernels.rocm.build import DEVICE, OnStep, build

# The op's tensors, in the order of enum in cpp/call.h.
TENSORS = (
    "out",
    "exp_sums",
    "max_logits",
    "tmp_out",
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "query_start_loc",
    "alibi_slopes",
    "k_scale",
    "v_scale",
    "fp8_out_scale",
)
OK, REJECTED, FAILED, ABORTED = range(4)
_DIMS = 8
# torch/headeronly/core/ScalarType.h
_SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e4m3fnuz: 26,
}


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


_FIND = CFUNCTYPE(c_void_p, c_char_p)


class Context(Structure):
    """attnlab::Context of cpp/host.h."""

    _fields_ = (
        ("device", c_void_p),
        ("warp_size", c_int),
        ("platform", c_char_p),
        ("find", _FIND),
    )


def prepare(faults: Sequence[str] = (), on_step: OnStep = lambda text: None) -> Path:
    """Build the emulated device with the planted ``faults`` of cpp/instructions.h; return its path."""
    flags = ["-O2", *(f"-DATTNLAB_FAULT_{fault}" for fault in faults)]
    return build("device", (DEVICE / "device.cpp").read_text(), flags, on_step)


@functools.cache
def device(faults: Sequence[str] = ()) -> ctypes.CDLL:
    """Build and load the emulated device."""
    library = ctypes.CDLL(str(prepare(faults)))
    library.attnlab_device.restype = c_void_p
    library.attnlab_error.restype = c_char_p
    library.attnlab_finding.restype = c_char_p
    library.attnlab_reads.restype = c_void_p
    library.attnlab_region.argtypes = (
        c_char_p,
        c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        c_int,
        c_int,
    )
    library.attnlab_place.restype = c_void_p
    library.attnlab_place.argtypes = (c_int, ctypes.c_size_t)
    library.attnlab_fp8_to_float.restype = ctypes.c_float
    library.attnlab_fp8_to_float.argtypes = (c_int, ctypes.c_uint8)
    library.attnlab_float_to_fp8.restype = ctypes.c_uint8
    library.attnlab_float_to_fp8.argtypes = (c_int, ctypes.c_float)
    library.attnlab_float_to_bf16.restype = ctypes.c_uint16
    library.attnlab_float_to_bf16.argtypes = (ctypes.c_float,)
    library.attnlab_float_to_f16_rtz.restype = ctypes.c_uint16
    library.attnlab_float_to_f16_rtz.argtypes = (ctypes.c_float,)
    return library


class Host:
    """The op's host code, compiled from the source."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.attnlab_call.argtypes = (
            POINTER(Context),
            POINTER(Arguments),
            ctypes.c_char_p,
            ctypes.c_size_t,
        )

    def call(self, context: Context, arguments: Arguments) -> tuple[int, str]:
        """Call the op; return its outcome and, unless that is FAILED, its text."""
        text = ctypes.create_string_buffer(1 << 14)
        outcome = self._library.attnlab_call(byref(context), byref(arguments), text, len(text))
        return outcome, text.value.decode()


def entry_of(path: Path) -> int:
    """Return the address of the kernel in a library that contains one kernel."""
    library = ctypes.CDLL(str(path))
    library.attnlab_kernel.restype = c_void_p
    return int(library.attnlab_kernel())


def finder(kernels: Mapping[str, int]) -> Any:
    """Return the callback that gives the host code a kernel's address by name."""
    return _FIND(lambda name: kernels[name.decode()])


def no_finder() -> Any:
    """Return the null callback: the host code then records its launches and runs none."""
    return _FIND()
