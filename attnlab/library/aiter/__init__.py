"""AITER's Triton attention, read from a clone or the wheel amd-aiter; run with e404860 of 2026-08-22."""

from typing import Any

from attnlab.library.op import Package

_COMPUTE_UNITS = 304  # of an MI300X; unified_attention splits long sequences over them
_TOP = "aiter/ops/triton"


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops ask of the machine that they run on."""
    return {"aiter.jit.utils.chip_info": {"get_cu_num": lambda: _COMPUTE_UNITS}}


PACKAGE = Package(
    name="aiter",
    title="AITER",
    distributions=("amd-aiter",),
    # Releases up to 0.1.7 have the ops and their kernels in the second and the fourth folder.
    folders=(
        f"{_TOP}/attention",
        _TOP,
        f"{_TOP}/_triton_kernels/attention",
        f"{_TOP}/_triton_kernels",
        f"{_TOP}/_triton_kernels/flash_attn_triton_amd",
        f"{_TOP}/_triton_kernels/quant",
        f"{_TOP}/utils",
        f"{_TOP}/utils/_triton",
    ),
    further=rf"{_TOP}/configs/[\w-]+-EXTEND_ATTENTION\.json",
    stubs=_stubs,
)
AMD = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")
