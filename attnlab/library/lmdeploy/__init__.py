"""LMDeploy's Triton attention and cache writes, read from a wheel or a checkout; run with 0.18.0."""

import logging
from enum import IntEnum
from typing import Any

from attnlab.library.op import Package


class QuantPolicy(IntEnum):
    """The formats of a cache, with LMDeploy's numbers (lmdeploy/messages.py)."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops take from other modules of LMDeploy."""
    return {
        "lmdeploy.messages": {"QuantPolicy": QuantPolicy},
        "lmdeploy.utils": {"get_logger": logging.getLogger},
    }


PACKAGE = Package(
    name="lmdeploy",
    title="LMDeploy",
    distributions=("lmdeploy",),
    folders=("lmdeploy/pytorch/kernels/cuda",),
    stubs=_stubs,
)
