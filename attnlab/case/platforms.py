"""The platforms that the lab knows: what each is, and how it reads FP8 bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A GPU architecture (or a CPU) as vLLM tells them apart.

    ``fp8_e4m3`` names the format that vLLM means by kv_cache_dtype "fp8" there:
    ``RocmPlatform.is_fp8_fnuz`` of vllm/platforms/rocm.py says fnuz where the name holds gfx94.
    ``triton_e4m3`` is false where Triton has no e4m3 conversion (CUDA below compute capability 8.9).
    """

    name: str
    family: str  # "cdna", "rdna", "cuda" or "cpu"
    example: str
    fp8_e4m3: str = "fp8_e4m3fn"
    triton_e4m3: bool = True

    @property
    def is_rocm(self) -> bool:
        """Answer whether vLLM runs its ROCm paths there."""
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
