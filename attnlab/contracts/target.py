"""Target: the platform, release and settings that a call runs with; the names of vLLM's kernels."""

from dataclasses import dataclass

from attnlab.case.case import Case
from attnlab.case.platforms import PLATFORMS, Platform

TRITON_DECODE = "kernel_paged_attention_2d"
ROCM_DECODE = "paged_attention_rocm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything that decides how a call runs and that is not an argument of the op.

    - ``platform``, ``release``: the GPU architecture and the vLLM release.
    - ``wrapper_cast``: the op's Python wrapper converts int64 index tensors to int32.
    - ``rocm_custom_paged_attn``, ``aiter_paged_attn``: vLLM's settings VLLM_ROCM_CUSTOM_PAGED_ATTN and
      AITER paged attention.
    """

    platform: Platform = PLATFORMS["gfx942"]
    release: str = "0.33.0"
    wrapper_cast: bool = False
    rocm_custom_paged_attn: bool = True
    aiter_paged_attn: bool = False

    @classmethod
    def of(cls, case: Case) -> "Target":
        """Return the Case's target."""
        return cls(
            platform=case.machine,
            release=case.release,
            wrapper_cast=case.staging.wrapper_cast,
            rocm_custom_paged_attn=case.rocm_custom_paged_attn,
            aiter_paged_attn=case.aiter_paged_attn,
        )
