"""MlaCases that are hostile to the ops of each path, and random ones."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.mla.mla_case import ALIGNED, CHUNKINGS, DECODE, PACKED, PREFILL, SHARDS, MlaCase

_ONE_TOKEN = {"query_lens": (1, 1, 1)}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "query_lens": (1, 1), "ctx_lens": (40, 5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaVariant:
    """A hostile case, and why it is one."""

    reason: str
    case: MlaCase


def _variant(reason: str, **fields: Any) -> MlaVariant:
    return MlaVariant(reason=reason, case=MlaCase(**fields))


MLA_VARIANTS = (
    _variant("a context of three chunks, one of two, and none", ctx_lens=(70, 40, 0)),
    _variant("two contexts share a chunk", ctx_lens=(10, 60, 30), chunk_rows=64),
    _variant("no context at all", ctx_lens=(0, 0, 0)),
    _variant("empty chunks, with the LSE -inf", chunking=ALIGNED, ctx_lens=(70, 20, 0)),
    _variant(
        "empty chunks, with the LSE inf", chunking=ALIGNED, ctx_lens=(70, 20, 0), empty_lse="inf"
    ),
    _variant("the last sequences have no context", tokens_with_context=True, ctx_lens=(50, 20, 0)),
    _variant("an FP8 output", output_scale=0.03125, ctx_lens=(50, 20, 33)),
    _variant(
        "an FP8 output, and sequences without context",
        output_scale=0.03125,
        tokens_with_context=True,
    ),
    _variant("an FP8 cache", kv_cache_dtype="fp8", k_scale=0.5),
    _variant("parts whose LSE are far apart", spread=30.0),
    _variant("parts that the decode op computes", partials="op", ctx_lens=(40, 20, 0)),
    _variant("bfloat16", dtype="bfloat16"),
    _variant("a chunk of one block", chunk_rows=16, ctx_lens=(33, 17, 16)),
    _variant("three new tokens per sequence", path=DECODE, query_lens=(3, 3, 3)),
    _variant("a length that ends a page", path=DECODE, query_lens=(2, 2, 2), ctx_lens=(14, 15, 30)),
    _variant("pages of 64", path=DECODE, block_size=64, **_ONE_TOKEN),
    _variant("pages of 1", path=DECODE, block_size=1, chunk_rows=32, **_ONE_TOKEN),
    _variant("rows of padding", path=DECODE, padding=3, **_ONE_TOKEN),
    _variant("an FP8 latent cache", path=DECODE, kv_cache_dtype="fp8", k_scale=0.5, **_ONE_TOKEN),
    _variant(
        "more splits than keys", path=DECODE, num_splits=8, query_lens=(1, 1), ctx_lens=(4, 70)
    ),
    _variant("one split", path=DECODE, num_splits=1, query_lens=(2, 2), ctx_lens=(4, 70)),
    _variant("17 heads, one more than a tile", path=DECODE, num_heads=17, **_ONE_TOKEN),
    _variant("the sizes of DeepSeek", path=DECODE, **_DEEPSEEK),
    _variant("the tiles of ROCm", path=DECODE, platform="gfx942", query_lens=(2, 2, 2)),
    _variant("two ranks", path=SHARDS, ctx_lens=(70, 20, 5), **_ONE_TOKEN),
    _variant("four ranks, three of them without a token", path=SHARDS, num_ranks=4, **_ONE_TOKEN),
    _variant("ranks by runs of 16 tokens", path=SHARDS, interleave_size=16, **_ONE_TOKEN),
    _variant("ranks whose LSE are far apart", path=SHARDS, spread=30.0, **_ONE_TOKEN),
    _variant("ranks that the decode op computes", path=SHARDS, partials="op", **_ONE_TOKEN),
    _variant(
        "ranks with an FP8 cache", path=SHARDS, kv_cache_dtype="fp8", k_scale=0.5, **_ONE_TOKEN
    ),
)
# What vLLM 0.33.0 itself does with context parallelism: TRITON_MLA allocates the LSE in the query's dtype.
LSE_AS_TRITON_MLA = _variant(
    "the LSE of ranks in the query's dtype, as TRITON_MLA of 0.33.0 returns it",
    path=SHARDS,
    lse_dtype="query",
    spread=12.0,
    num_ranks=2,
    query_lens=(1, 1, 1),
    ctx_lens=(70, 120, 90),
)


def variants_of(release: str) -> tuple[MlaVariant, ...]:
    """Return the hostile cases that a release has."""
    found = []
    for one in (*MLA_VARIANTS, LSE_AS_TRITON_MLA):
        try:
            found.append(MlaVariant(reason=one.reason, case=one.case.replace(release=release)))
        except InvalidCase:
            continue
    return tuple(found)


def draw_cases(path: str, count: int, seed: int = 0) -> Iterator[MlaCase]:
    """Yield random cases of a path."""
    draw = random.Random(f"{path} {seed}")
    for i in range(count):
        yield MlaCase(path=path, seed=seed * count + i, **_DRAWS[path](draw), **_sizes(draw, path))


def _sizes(draw: random.Random, path: str) -> dict[str, Any]:
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
