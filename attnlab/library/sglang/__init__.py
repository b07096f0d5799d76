"""SGLang's Triton attention, read from a wheel or a checkout; run with 0.5.23."""

from typing import Any

from attnlab.library.op import Package


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
    return {"sglang.srt.utils": functions}


PACKAGE = Package(
    name="sglang",
    title="SGLang",
    distributions=("sglang",),
    # 0.5.23 has the first, 0.5.9 the second.
    folders=("sglang/kernels/ops/attention", "sglang/srt/layers/attention/triton_ops"),
    stubs=_stubs,
)
