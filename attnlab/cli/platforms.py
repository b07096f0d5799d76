"""The command ``attnlab platforms``."""

from typing import Any

from attnlab.case.platforms import PLATFORMS
from attnlab.cli.catalogue import Catalogue


def _load() -> dict[str, dict[str, Any]]:
    """Return the facts of each platform."""
    return {
        name: {
            "example": platform.example,
            "family": platform.family,
            "format_of_fp8": platform.fp8_e4m3,
            "runs_rocm_code": platform.is_rocm,
            "triton_converts_e4m3": platform.triton_e4m3,
        }
        for name, platform in PLATFORMS.items()
    }


COMMAND = Catalogue(
    noun="platform",
    purpose="List the platforms whose dispatch and formats the lab models.",
    example="gfx942",
    columns=("example", "family", "format_of_fp8", "triton_converts_e4m3"),
    load=_load,
).command
