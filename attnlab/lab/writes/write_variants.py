"""Cache writes that are hostile to the ops of further formats, and random ones."""

import random
from collections.abc import Iterator
from typing import Any

from attnlab.lab.writes.write_case import (
    CACHE_FORMATS,
    CUDA_FORMATS,
    DIFFKV,
    DS_LATENT,
    DS_SIZES,
    HND,
    LATENT,
    NHD,
    PER_TOKEN_HEAD,
    PLAIN,
    X_SPLIT,
    WriteCase,
    page_layout,
)

_REASONS: dict[str, dict[str, Any]] = {
    "pages with gaps, and tokens without a slot": {},
    "tokens of zeros: the smallest scale": {"spread": 0.0},
    "tokens beyond the range of FP8": {"spread": 600.0},
    "keys and values of different width": {"head_size": 24, "value_size": 48},
    "one slot per page": {"block_size": 1},
    "float32": {"dtype": "float32"},
    "tokens without an entry in slot_mapping": {"padding": 3},
}
_SCALED = {"k_scale": 0.5, "v_scale": 0.25}
_FP8 = {"an FP8 cache with scales": {"kv_cache_dtype": "fp8", **_SCALED}}
_CUDA: dict[str, dict[str, Any]] = {
    "keys and values as slices of larger tensors": {"token_gap": 32},
    "a block size that is no power of two": {"block_size": 12},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e5m2 with scales": {"kv_cache_dtype": "fp8_e5m2", **_SCALED},
    "rows that are not aligned to vectors": {"token_gap": 3},
    "slots with gaps": {"slot_gap": 16},
}
_OF_FORMAT: dict[str, dict[str, dict[str, Any]]] = {
    LATENT: {
        "the widths of DeepSeek": {"head_size": 512, "value_size": 64},
        "odd small widths": {"head_size": 7, "value_size": 3},
    },
    NHD: {"heads that are no multiple of a vector": {"head_size": 20, "value_size": 20}},
    HND: {"tokens of fewer than 32 elements": {"head_size": 8, "value_size": 8}},
    DS_LATENT: {"float16": {"dtype": "float16"}},
}
_LARGE = {"num_kv_heads": 8, "head_size": 128, "value_size": 128, "gap": 0}
# What a format does not have, by the reasons that need it.
_NOT = {
    DS_LATENT: {
        *("keys and values of different width", "float32", "an FP8 cache with scales"),
        *("fp8_e5m2 with scales", "rows that are not aligned to vectors"),
    },
    **{name: {"keys and values of different width"} for name in PLAIN},
}


def write_variants() -> dict[str, WriteCase]:
    """Return the hostile writes by their format and the reason why they are hostile."""
    return {
        f"{cache_format}: {reason}": _case(cache_format, **fields)
        for cache_format in CACHE_FORMATS
        for reason, fields in _reasons(cache_format).items()
    }


def _reasons(cache_format: str) -> dict[str, dict[str, Any]]:
    """Return the reasons of a format, each with the fields of its case."""
    found = _REASONS if cache_format in PER_TOKEN_HEAD else {**_REASONS, **_FP8}
    if cache_format in CUDA_FORMATS:
        found = {**found, **_CUDA, **_OF_FORMAT.get(cache_format, {}), **_far(cache_format)}
    absent = _NOT.get(cache_format, set())
    if cache_format not in (LATENT, DS_LATENT, NHD):
        absent = absent | {"slots with gaps"}
    return {reason: fields for reason, fields in found.items() if reason not in absent}


def _case(cache_format: str, **fields: Any) -> WriteCase:
    own: dict[str, Any] = {"num_kv_heads": 1 if cache_format in (LATENT, DS_LATENT) else 3}
    if cache_format == DS_LATENT:
        own |= {**DS_SIZES, "dtype": "bfloat16"}
    if cache_format == X_SPLIT:
        own["gap"] = 0
    return WriteCase(cache_format=cache_format, **{**own, **fields})


def _far(cache_format: str) -> dict[str, dict[str, Any]]:
    """Return a write to blocks that are more than 2³¹ elements after the first."""
    fields: dict[str, Any] = dict(_LARGE) if cache_format in PLAIN else {"gap": 0}
    if cache_format == LATENT:
        fields |= {"head_size": 512, "value_size": 64}
    if cache_format != DS_LATENT:
        fields["kv_cache_dtype"] = "fp8"
    page = _page(_case(cache_format, **fields))
    return {"block offsets beyond 2³¹ elements": {**fields, "first_block": (1 << 31) // page + 1}}


def _page(case: WriteCase) -> int:
    """Return the elements of a page."""
    size = sum(DS_SIZES.values()) if case.cache_format == LATENT else case.head_size
    return page_layout(case, "key_cache", (656 if case.cache_format == DS_LATENT else size,))[2]


def draw_writes(cache_format: str, count: int, seed: int = 0) -> Iterator[WriteCase]:
    """Yield random writes in a format."""
    draw = random.Random(f"{cache_format} {seed}")
    for i in range(count):
        is_cuda = cache_format in CUDA_FORMATS
        is_fp8 = (is_cuda or cache_format == DIFFKV) and draw.random() < 0.5
        fields: dict[str, Any] = {
            "num_tokens": draw.randint(1, 24),
            "num_kv_heads": 1 if cache_format == LATENT else draw.randint(1, 4),
            "head_size": draw.choice((16, 24, 64)),
            "value_size": draw.choice((16, 48, 64)),
            "block_size": draw.choice((1, 8, 16)),
            "kv_cache_dtype": "fp8" if is_fp8 else "auto",
            "k_scale": draw.choice((0.25, 1.0, 3.0)) if is_fp8 else 1.0,
            "v_scale": draw.choice((0.5, 2.0)) if is_fp8 else 1.0,
            "gap": draw.choice((0, 16, 64)),
            "spread": draw.choice((1e-3, 1.0, 30.0)),
            "dtype": draw.choice(("float16", "float32")),
            "seed": seed * count + i,
        }
        if is_cuda:
            fields |= _drawn_for_cuda(draw, cache_format, is_fp8)
        yield WriteCase(cache_format=cache_format, **fields)


def _drawn_for_cuda(draw: random.Random, cache_format: str, is_fp8: bool) -> dict[str, Any]:
    """Return fields of a random write by a CUDA op, which has further ones."""
    fields: dict[str, Any] = {
        "block_size": draw.choice((1, 8, 12, 16, 33)),
        "dtype": draw.choice(("float16", "bfloat16", "float32")),
        "kv_cache_dtype": draw.choice(("fp8", "fp8_e4m3", "fp8_e5m2")) if is_fp8 else "auto",
        "token_gap": draw.choice((0, 1, 16, 64)),
        "padding": draw.choice((0, 0, 2)),
    }
    if cache_format == LATENT:
        fields |= {"num_kv_heads": 1, "head_size": draw.choice((5, 64, 512))}
        fields["value_size"] = draw.choice((1, 16, 64))
    if cache_format == DS_LATENT:
        fields |= {"num_kv_heads": 1, "dtype": "bfloat16", "kv_cache_dtype": "auto", **DS_SIZES}
        fields["token_gap"] = draw.choice((0, 16, 64))
    if cache_format in PLAIN:
        sizes = (16, 48, 64) if cache_format == X_SPLIT else (20, 32, 64, 96)
        fields["head_size"] = fields["value_size"] = draw.choice(sizes)
        if cache_format == HND:  # fewer than 32 elements of a token never end
            fields["num_kv_heads"] = draw.randint(2, 4)
    if cache_format in (NHD, LATENT, DS_LATENT):
        fields["slot_gap"] = draw.choice((0, 16))
    if cache_format == X_SPLIT:
        fields["gap"] = 0
    return fields
