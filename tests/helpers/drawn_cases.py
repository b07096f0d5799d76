"""Random MlaCases of each path, and random cache writes in each format."""

import random
from collections.abc import Iterator
from typing import Any

from attnlab.lab.writes import (
    CUDA_FORMATS,
    DIFFKV,
    DS_LATENT,
    DS_SIZES,
    HND,
    LATENT,
    NHD,
    PLAIN,
    X_SPLIT,
    WriteCase,
)
from attnlab.mla.mla_case import CHUNKINGS, DECODE, PACKED, PREFILL, SHARDS, MlaCase


def draw_cases(path: str, count: int, seed: int = 0) -> Iterator[MlaCase]:
    """Yield random cases of a path."""
    draw = random.Random(f"{path} {seed}")
    for i in range(count):
        yield MlaCase(
            path=path, seed=seed * count + i, **_DRAWS[path](draw), **_variants_sizes(draw, path)
        )


def _variants_sizes(draw: random.Random, path: str) -> dict[str, Any]:
    is_fp8 = draw.random() < 0.3
    return {
        "num_heads": draw.choice((2, 3, 4, 17)) if path == DECODE else draw.choice((1, 2, 3)),
        "kv_lora_rank": draw.choice((16, 32, 64)),
        "qk_rope_head_dim": draw.choice((16, 32)),
        "spread": draw.choice((0.1, 1.0, 2.0, 8.0)),
        "kv_cache_dtype": "fp8" if is_fp8 else "auto",
        "k_scale": draw.choice((0.25, 0.5, 2.0)) if is_fp8 else 1.0,
    }


def _draw_prefill(draw: random.Random) -> dict[str, Any]:
    count = draw.randint(1, 3)
    ctx_lens = [draw.choice((0, draw.randint(1, 80), 32, 33)) for _ in range(count)]
    has_last = draw.random() < 0.3
    if has_last:
        ctx_lens = sorted(ctx_lens, reverse=True)
    chunking = draw.choice(CHUNKINGS)
    return {
        "query_lens": tuple(draw.randint(1, 5) for _ in range(count)),
        "ctx_lens": tuple(ctx_lens),
        "chunk_rows": draw.choice((16, 32, 48)),
        "chunking": chunking,
        "empty_lse": "-inf" if chunking == PACKED else draw.choice(("-inf", "inf")),
        "output_scale": draw.choice((None, None, 0.03125)),
        "tokens_with_context": has_last,
        "v_head_dim": draw.choice((16, 24)),
    }


def _draw_decode(draw: random.Random) -> dict[str, Any]:
    count = draw.randint(1, 3)
    return {
        "query_lens": (draw.choice((1, 1, 2, 3)),) * count,
        "ctx_lens": tuple(draw.choice((0, 15, 16, draw.randint(1, 80))) for _ in range(count)),
        "block_size": draw.choice((16, 32)),
        "chunk_rows": 32,
        "num_splits": draw.choice((1, 4, 8)),
        "padding": draw.choice((0, 0, 2)),
    }


def _draw_shards(draw: random.Random) -> dict[str, Any]:
    count = draw.randint(1, 3)
    return {
        "query_lens": (1,) * count,
        "ctx_lens": tuple(draw.choice((0, 1, draw.randint(2, 80))) for _ in range(count)),
        "num_ranks": draw.choice((2, 4)),
        "interleave_size": draw.choice((1, 16)),
    }


_DRAWS = {PREFILL: _draw_prefill, DECODE: _draw_decode, SHARDS: _draw_shards}


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
