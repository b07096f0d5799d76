"""Platforms: GPU architectures and the CPU, with the facts that vLLM's dispatch depends on."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DRIVERS = ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg")  # without one, torch sees no GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A GPU architecture, or a CPU.

    - ``fp8_e4m3``: the format of kv_cache_dtype "fp8" on the platform. It is fnuz for names with gfx94
      (``RocmPlatform.is_fp8_fnuz`` in vllm/platforms/rocm.py).
    - ``triton_e4m3``: Triton can convert e4m3. It cannot on CUDA below compute capability 8.9.
    """

    name: str
    family: str  # "cdna", "rdna", "cuda" or "cpu"
    example: str
    fp8_e4m3: str = "fp8_e4m3fn"
    triton_e4m3: bool = True

    @property
    def is_rocm(self) -> bool:
        """Answer whether vLLM runs its ROCm code on the platform."""
        return self.family in ("cdna", "rdna")


_ALL = (
    Platform(name="gfx90a", family="cdna", example="AMD Instinct MI200"),
    Platform(name="gfx942", family="cdna", example="AMD Instinct MI300", fp8_e4m3="fp8_e4m3fnuz"),
    Platform(name="gfx950", family="cdna", example="AMD Instinct MI350"),
    Platform(name="gfx1100", family="rdna", example="AMD Radeon RX 7900"),
    Platform(name="gfx1201", family="rdna", example="AMD Radeon RX 9070"),
    Platform(name="sm_80", family="cuda", example="NVIDIA A100", triton_e4m3=False),
    Platform(name="sm_90", family="cuda", example="NVIDIA H100, H200"),
    Platform(name="cpu", family="cpu", example="any CPU, Triton's interpreter"),
)
PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in _ALL}


@functools.cache
def platform_of(device: "torch.device") -> str | None:
    """Return the platform of a device by its name in :data:`PLATFORMS`, or the GPU's own name."""
    import torch

    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    exact = f"sm_{properties.major}{properties.minor}"
    return exact if exact in PLATFORMS else "sm_80" if properties.major < 9 else "sm_90"


def machine_platform() -> str | None:
    """Return the platform of this machine's GPU; None if torch sees none, or one without rules here.

    On a machine without a GPU's driver, torch is not imported.
    """
    if not any(Path(file).exists() for file in _DRIVERS):
        return None
    import torch

    found = platform_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    return found if found in PLATFORMS else None
