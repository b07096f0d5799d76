"""LMDeploy's Triton attention and cache writes, read from a wheel or a checkout; run with 0.18.0."""

import logging
from enum import IntEnum
from typing import Any

from attnlab.library.op import Package

# The arguments of a cache with one scale for all tokens, of one with a scale and a zero point for each token
# and head, and the cache that no call of attnlab can hold.
QUANTISED = {
    "quant_policy": "(17 if kv_cache_dtype == 'fp8_e5m2' else 16) if is_fp8 else 0",
    "k_scales_zeros": "one(k_scale) if is_fp8 else None",
    "v_scales_zeros": "one(v_scale) if is_fp8 else None",
}
LEFT_OUT = {
    "quant_policy 42 (TurboQuant)": "keys and values are rotated, and are numbers of a codebook",
}


def affine(bits: int, key: str, value: str) -> dict[str, str]:
    """Return the arguments of a cache of integers; ``key``, ``value``: the parameters of its halves."""
    halves = {
        half: f"affine(flash_{half}_cache, {bits}, {first})"
        for first, half in enumerate(("key", "value"))
    }
    return {
        **{"quant_policy": str(bits), key: f"{halves['key']}.numbers"},
        **{value: f"{halves['value']}.numbers", "k_scales_zeros": f"{halves['key']}.scales"},
        "v_scales_zeros": f"{halves['value']}.scales",
    }


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
