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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How a test makes its index tensors, and which tokens it writes to the cache.

    - ``block_table``, ``seq_lens``, ``query_start_loc``: dtype, "int32" or "int64". ``query_start_loc``
      may also be "int32_before_cumsum": the input of torch.cumsum is int32, its result int64.
    - ``fill``: the tokens in the cache before the call, see :meth:`attnlab.case.case.Lengths.cached_lens`.
    - ``wrapper_cast``: the op's Python wrapper converts the index tensors to int32. This was proposed,
      not merged.
    """

    story: str
    block_table: str = "int32"
    seq_lens: str = "int32"
    query_start_loc: str = "int32"
    fill: str = "context_only"
    wrapper_cast: bool = False


INDEX_DTYPES = ("int32", "int64")
QUERY_START_LOC_DTYPES = ("int32", "int64", "int32_before_cumsum")
FILLS = ("context_only", "decode_rows", "all_rows")

STAGES: dict[str, Stage] = {
    "int64": Stage(
        story="the first form: every index tensor is torch.long",
        block_table="int64",
        seq_lens="int64",
        query_start_loc="int64",
    ),
    "int32_before_cumsum": Stage(
        story="the first dtype fix: torch.int inside torch.cumsum, which returns int64 again",
        query_start_loc="int32_before_cumsum",
    ),
    "fill_all": Stage(
        story="the first cache fix, in addition: every sequence written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="all_rows",
    ),
    "fill_decode": Stage(
        story="the second cache fix: only decode sequences written up to seq_len",
        query_start_loc="int32_before_cumsum",
        fill="decode_rows",
    ),
    "wrapper_cast": Stage(
        story="the proposed fix: int64 everywhere, converted to int32 in the op's wrapper",
        block_table="int64",
        seq_lens="int64",
        query_start_loc="int64",
        wrapper_cast=True,
    ),
    "cast_after_cumsum": Stage(story="the merged fix: the cast to int32 after torch.cumsum"),
    "sound": Stage(
        story="as in production: int32, and every new token written before attention",
        fill="all_rows",
    ),
}
