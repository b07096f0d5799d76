"""Stubs for the modules that vLLM's attention ops import: vLLM's own, and torch without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attnlab.case.platforms import Platform
from attnlab.kernels.vllm.warmup_stubs import warmup_stubs
from attnlab.tensors.formats import FORMATS

_RCP_LN2 = 1.4426950216  # 1 / ln(2), as vllm/utils/math_utils.py rounds it (0.33.0)
_CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "cdna": (9, 4), "rdna": (11, 0)}


@dataclass(slots=True)
class Dispatch:
    """What the stubs return during one call. The backend sets it before the call and resets it after.

    - ``use_custom``: result of vLLM's ``use_rocm_custom_paged_attention``.
    - ``rocm_decode``: replaces ``vllm._custom_ops.paged_attention_rocm``.
    """

    use_custom: bool = False
    rocm_decode: Callable[..., None] = lambda *args, **kwargs: None


def make_stubs(
    platform: Platform, triton: ModuleType, dispatch: Dispatch, interpret: bool
) -> dict[str, ModuleType]:
    """Return the stub modules by dotted name."""
    current = _Current(platform)
    quiet = SimpleNamespace(
        **{
            name + once: lambda *args, **kwargs: None
            for name in ("debug", "info", "warning", "error")
            for once in ("", "_once")
        }
    )
    fp8 = FORMATS[platform.fp8_e4m3].dtype
    contents: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": current},
        "vllm.platforms.rocm": {
            "use_rocm_custom_paged_attention": lambda *args, **kwargs: dispatch.use_custom,
            "on_gfx1x": lambda: platform.family == "rdna",
        },
        "vllm._custom_ops": {
            "paged_attention_rocm": lambda *args, **kwargs: dispatch.rocm_decode(*args, **kwargs)
        },
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": fp8,
            "get_fp8_min_max": lambda: (torch.finfo(fp8).min, torch.finfo(fp8).max),
        },
        "vllm.utils.math_utils": {
            "RCP_LN2": _RCP_LN2,
            "cdiv": lambda number, size: -(-number // size),
            "largest_power_of_2_divisor": lambda number: number & -number,
            "next_power_of_2": lambda number: 1 << max(0, number - 1).bit_length(),
        },
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": _is_quantized},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": _KVQuantMode,
            "is_quantized_kv_cache": _is_quantized,
        },
        **warmup_stubs(),
    }
    stubs = {}
    for name, content in contents.items():
        stubs[name] = ModuleType(name)
        vars(stubs[name]).update(content)
    if interpret:
        stubs |= {"torch": _torch(current), "triton": triton}
    return stubs


class _KVQuantMode(IntEnum):
    """Modes of cache quantisation with vLLM's numbers (vllm/v1/kv_cache_interface.py, 0.20.2 to 0.33.0)."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def _is_quantized(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype.startswith("fp8")


def _torch(current: "_Current") -> ModuleType:
    """Return a torch module for interpreted ops on a machine without a GPU.

    ``torch.cuda`` describes the simulated platform. ``torch.empty`` returns NaN, so that a read of scratch
    memory before it is written shows in the output.
    """

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    cuda = ModuleType("torch.cuda")
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)  # type: ignore[method-assign]
    cuda.get_device_capability = current.get_device_capability  # type: ignore[attr-defined]
    module = ModuleType("torch")
    module.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    module.cuda, module.empty = cuda, empty  # type: ignore[attr-defined]
    return module


class _Current:
    """Replace ``vllm.platforms.current_platform``; an unknown attribute raises AttributeError."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        default = _CAPABILITY.get(platform.family, (0, 0))
        self._capability = _CAPABILITY.get(platform.name, default)

    def fp8_dtype(self) -> torch.dtype:
        return FORMATS[self._platform.fp8_e4m3].dtype

    def is_rocm(self) -> bool:
        return self._platform.is_rocm

    def is_cuda(self) -> bool:
        return self._platform.family == "cuda"

    def is_cuda_alike(self) -> bool:
        return self._platform.family != "cpu"

    def is_cpu(self) -> bool:
        return self._platform.family == "cpu"

    def is_xpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        return self._capability[0] == capability // 10

    def get_device_capability(self, device_id: Any = 0) -> tuple[int, int]:
        return self._capability

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        asked = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
        return self._capability >= asked

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        asked = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
        return self._capability == asked
