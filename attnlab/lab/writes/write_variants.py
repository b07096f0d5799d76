"""Cache writes that are hostile to the ops of further formats, and random ones."""

import random
from collections.abc import Iterator
from typing import Any

from attnlab.lab.writes.write_case import CACHE_FORMATS, DIFFKV, LATENT, PER_TOKEN_HEAD, WriteCase

_REASONS: dict[str, dict[str, Any]] = {
    "pages with gaps, and tokens without a slot": {},
    "tokens of zeros: the smallest scale": {"spread": 0.0},
    "tokens beyond the range of FP8": {"spread": 600.0},
    "keys and values of different width": {"head_size": 24, "value_size": 48},
    "one slot per page": {"block_size": 1},
    "float32": {"dtype": "float32"},
    "tokens without an entry in slot_mapping": {"padding": 3},
}
_PLAIN = {"an FP8 cache with scales": {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.25}}


def write_variants() -> dict[str, WriteCase]:
    """Return the hostile writes by their format and the reason why they are hostile."""
    found = {}
    for cache_format in CACHE_FORMATS:
        heads = 1 if cache_format == LATENT else 3
        extra = {} if cache_format in PER_TOKEN_HEAD else _PLAIN
        for reason, fields in {**_REASONS, **extra}.items():
            case = WriteCase(cache_format=cache_format, num_kv_heads=heads, **fields)
            found[f"{cache_format}: {reason}"] = case
    return found


def draw_writes(cache_format: str, count: int, seed: int = 0) -> Iterator[WriteCase]:
    """Yield random writes in a format."""
    draw = random.Random(f"{cache_format} {seed}")
    for i in range(count):
        is_fp8 = cache_format in (DIFFKV, LATENT) and draw.random() < 0.5
        yield WriteCase(
            cache_format=cache_format,
            num_tokens=draw.randint(1, 24),
            num_kv_heads=1 if cache_format == LATENT else draw.randint(1, 4),
            head_size=draw.choice((16, 24, 64)),
            value_size=draw.choice((16, 48, 64)),
            block_size=draw.choice((1, 8, 16)),
            kv_cache_dtype="fp8" if is_fp8 else "auto",
            k_scale=draw.choice((0.25, 1.0, 3.0)) if is_fp8 else 1.0,
            v_scale=draw.choice((0.5, 2.0)) if is_fp8 else 1.0,
            gap=draw.choice((0, 16, 64)),
            spread=draw.choice((1e-3, 1.0, 30.0)),
            dtype=draw.choice(("float16", "float32")),
            seed=seed * count + i,
        )
