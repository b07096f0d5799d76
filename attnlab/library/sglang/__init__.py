"""SGLang's Triton attention, read from a wheel or a checkout; run with 0.5.9 to 0.5.23."""

from types import SimpleNamespace
from typing import Any

from attnlab.library.op import Package

# The defaults of settings that the ops read (sglang/srt/environ.py, 0.5.23).
_ENVS = {
    "SGLANG_TRITON_COMPACT_EXTEND_ATTENTION": True,
    "SGLANG_TRITON_FP8_PREFILL_ATTN": True,
    "SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS": False,
    "SGLANG_MLA_DECODE_TUNE": False,
}


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what sglang.srt.utils answers on a platform: the ops ask it while they are imported."""
    is_hip = platform.is_rocm
    answers = {
        "is_hip": is_hip,
        "is_cuda": platform.family == "cuda",
        "is_cuda_alike": platform.family == "cuda" or is_hip,
        "is_npu": False,
        "is_xpu": False,
        "is_gfx95_supported": platform.name == "gfx950",
        "is_gfx1250_supported": False,
    }
    functions: dict[str, Any] = {
        name: lambda *args, found=found: found for name, found in answers.items()
    }
    settings = {
        name: SimpleNamespace(get=lambda found=found: found) for name, found in _ENVS.items()
    }
    return {
        "sglang.srt.utils": functions,
        "sglang.srt.environ": {"envs": SimpleNamespace(**settings)},
    }


PACKAGE = Package(
    name="sglang",
    title="SGLang",
    distributions=("sglang",),
    # 0.5.23 has the first two, 0.5.9 the third.
    folders=(
        "sglang/kernels/ops/attention",
        "sglang/kernels/ops/kvcache",
        "sglang/srt/layers/attention/triton_ops",
    ),
    stubs=_stubs,
)
