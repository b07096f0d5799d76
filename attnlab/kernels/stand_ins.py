"""Stand-ins for the modules of vLLM that its attention ops import."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attnlab.formats import FORMATS
from attnlab.platforms import Platform

_CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "cdna": (9, 4), "rdna": (11, 0)}


@dataclass(slots=True)
class Dispatch:
    """What the stand-ins of the running call answer with; set for the time of a call."""

    use_custom: bool = False
    rocm_decode: Callable[..., None] = lambda *args, **kwargs: None


def stand_ins(platform: Platform, triton: ModuleType, dispatch: Dispatch) -> dict[str, ModuleType]:
    """Return the stand-ins for modules of vLLM."""
    quiet = SimpleNamespace(
        **{
            name + once: lambda *args, **kwargs: None
            for name in ("debug", "info", "warning", "error")
            for once in ("", "_once")
        }
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": _Current(platform)},
        "vllm.platforms.rocm": {
            "use_rocm_custom_paged_attention": lambda *args, **kwargs: dispatch.use_custom
        },
        "vllm._custom_ops": {
            "paged_attention_rocm": lambda *args, **kwargs: dispatch.rocm_decode(*args, **kwargs)
        },
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.logger": {"init_logger": lambda name: quiet},
    }
    stubs = {}
    for name, content in contents.items():
        stubs[name] = ModuleType(name)
        vars(stubs[name]).update(content)
    return stubs


class _Current:
    """Stands for ``vllm.platforms.current_platform``; what it does not know it refuses."""

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

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int]:
        return self._capability

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        asked = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
        return self._capability >= asked

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        asked = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
        return self._capability == asked
