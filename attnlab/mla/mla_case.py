"""MlaCase: one call of MLA attention, as a path of partial attentions and merges.

MLA (multi-head latent attention, DeepSeek) stores one latent vector per token: kv_lora_rank elements from
which keys and values are computed, and qk_rope_head_dim elements that all keys share. vLLM has three paths to
the output (vllm/model_executor/layers/attention/mla_attention.py, 0.33.0):

- "prefill": the latents are projected to keys and values per head. The context is attended in chunks of
  ``chunk_rows`` tokens, and the parts are merged by their log-sum-exp (LSE).
- "decode": the query is projected instead, and decode_attention_fwd reads the latents as one KV head whose
  value is the first part of the key (TRITON_MLA). A request with several new tokens becomes as many rows.
- "shards": decode with context parallelism (DCP): each rank has every num_ranks-th run of ``interleave_size``
  tokens; the ranks' outputs are combined by their LSE.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Lengths
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Declared, Flag, Int, Lens, Maybe, Number, OneOf, group
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS, Platform

PREFILL, DECODE, SHARDS = PATHS = ("prefill", "decode", "shards")
PACKED, ALIGNED = CHUNKINGS = ("packed", "aligned")
MLA_BACKENDS = ("model", "vllm")
_MOST_SCORES = 1 << 27  # elements of a float64 score matrix over all heads
_OF_PATH = {
    PREFILL: (
        *("chunk_rows", "chunking", "empty_lse"),
        *("output_scale", "tokens_with_context", "partials"),
    ),
    DECODE: ("num_splits", "padding"),
    SHARDS: ("num_ranks", "interleave_size", "lse_dtype", "num_splits", "partials"),
}


# Each declares a field of its group: default, type, help text.
_path, _sizes, _lengths = group("the path"), group("sizes"), group("lengths")
_prefill, _decode, _shards = (group(f"path {path}") for path in PATHS)
_data = group("data and vLLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCase(Declared):
    """One call of MLA attention.

    Sizes have the names of vLLM's MLADims. A head's score is (q_nope · k_nope + q_rope · k_rope) times
    (qk_nope_head_dim + qk_rope_head_dim)^-0.5. The help of each field says what it is.
    """

    path: str = _path(
        PREFILL, OneOf(PATHS), "prefill, decode, or shards for decode with context parallelism"
    )
    num_heads: int = _sizes(4, Int(1), "number of query heads")
    kv_lora_rank: int = _sizes(
        32, Int(1), "elements of a latent from which keys and values are computed"
    )
    qk_rope_head_dim: int = _sizes(
        16, Int(0), "elements of a latent that the keys of all heads share"
    )
    qk_nope_head_dim: int = _sizes(16, Int(1), "elements of a head's key that come from the latent")
    v_head_dim: int = _sizes(16, Int(1), "elements of a head's value")
    block_size: int = _sizes(16, Int(1), "tokens per cache block")
    query_lens: tuple[int, ...] = _lengths((5, 3, 4), Lens(1), "new tokens of each sequence")
    ctx_lens: tuple[int, ...] = _lengths((70, 20, 0), Lens(0), "cached tokens of each sequence")
    chunk_rows: int = _prefill(32, Int(1), "tokens of context that are attended at once")
    chunking: str = _prefill(
        PACKED,
        OneOf(CHUNKINGS),
        "packed: several requests in one chunk (0.33.0); aligned: the same positions of all (0.11.2)",
    )
    empty_lse: str = _prefill(
        "-inf", OneOf(("-inf", "inf")), "log-sum-exp (LSE) of a row without keys"
    )
    partials: str = _path(
        "exact",
        OneOf(("exact", "op")),
        "partial attentions: exact up to their dtype, or those of decode_attention_fwd",
    )
    output_scale: float | None = _prefill(
        None, Maybe(Number(), "not FP8"), "the last merge writes FP8, divided by this"
    )
    tokens_with_context: bool = _prefill(
        False, Flag(), "the last merge receives the number of tokens with context"
    )
    num_ranks: int = _shards(2, Int(1), "ranks that share the context")
    interleave_size: int = _shards(1, Int(1), "tokens in a run of one rank")
    lse_dtype: str = _shards(
        "float32", OneOf(("float32", "query")), "dtype of a rank's LSE; query: that of the query"
    )
    padding: int = _decode(0, Int(0), "rows of length 0 after the last sequence")
    num_splits: int = _path(4, Int(1), "splits of decode_attention_fwd")
    dtype: str = _data("float16", OneOf(tuple(DTYPE_BYTES)), "dtype of the query")
    kv_cache_dtype: str = _data(
        "auto", OneOf(("auto", "fp8")), "dtype of the cache; auto is the dtype of the query"
    )
    k_scale: float = _data(1.0, Number(), "scale of an FP8 cache")
    spread: float = _data(
        2.0,
        Number(),
        "standard deviation of the query; larger scores make the LSE of the parts differ more",
    )
    seed: int = _data(0, Int(0), "seed of the data")
    release: str = _data(
        RELEASES[-1], OneOf(RELEASES), "the release of vLLM whose chain is followed"
    )
    platform: str = _data("sm_90", OneOf(tuple(PLATFORMS)), "the platform that is modelled")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield also combinations that vLLM does not have."""
        is_uneven = len(self.ctx_lens) != len(self.query_lens)
        yield "ctx_lens", is_uneven, f"as many as query_lens ({len(self.query_lens)})"
        for name in sorted({one for names in _OF_PATH.values() for one in names}):
            default = MLA_FIELDS[name].default
            is_changed = name not in _OF_PATH[self.path] and getattr(self, name) != default
            yield name, is_changed, f"{default!r} on path {self.path}"
        on_shards, lens, is_old = self.path == SHARDS, {*self.query_lens}, self.release == "0.11.2"
        yield "block_size", not _is_power_of_two(self.block_size), "a power of two"
        is_mixed = self.path == DECODE and len(lens) > 1
        yield "query_lens", is_mixed, "the same for all sequences on path decode"
        yield "query_lens", on_shards and lens != {1}, "1 for all sequences on path shards"
        for name in ("num_ranks", "kv_lora_rank"):
            is_wrong = on_shards and not _is_power_of_two(getattr(self, name))
            yield name, is_wrong, "a power of two on path shards"
        is_uneven = self.path == PREFILL and self.chunk_rows % self.block_size > 0
        yield "chunk_rows", is_uneven, f"a multiple of block_size ({self.block_size})"
        is_fp8 = self.kv_cache_dtype == "fp8"
        yield "k_scale", not is_fp8 and self.k_scale != 1.0, "1 without an FP8 cache"
        no_fp8 = (self.release == "0.11.2" and self.path != PREFILL) or not self.machine.triton_e4m3
        yield "kv_cache_dtype", is_fp8 and no_fp8, f"auto on {self.platform}, {self.release}"
        is_mixed = self.tokens_with_context and self.num_with_context != self._last_with_context
        yield "ctx_lens", is_mixed, "0 for the last sequences only, with tokens_with_context"
        yield "output_scale", is_old and self.output_scale is not None, "none in 0.11.2"
        yield "tokens_with_context", is_old and self.tokens_with_context, "false in 0.11.2"
        pairs = zip(self.query_lens, self.ctx_lens, strict=True)
        is_large = self.num_heads * sum(q * (q + c) for q, c in pairs) > _MOST_SCORES
        yield "ctx_lens", is_large, f"so short that there are at most {_MOST_SCORES} scores"

    @property
    def lengths(self) -> Lengths:
        """Return query_lens and ctx_lens."""
        return Lengths(query_lens=self.query_lens, ctx_lens=self.ctx_lens)

    @property
    def machine(self) -> Platform:
        """Return the platform's facts."""
        return PLATFORMS[self.platform]

    @property
    def latent_size(self) -> int:
        """Return the elements of a latent vector."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Return what the scores are multiplied by."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @property
    def value_size(self) -> int:
        """Return the elements of an output row of a head."""
        return self.v_head_dim if self.path == PREFILL else self.kv_lora_rank

    @property
    def num_with_context(self) -> int:
        """Return the tokens of the sequences that have a context."""
        pairs = zip(self.query_lens, self.ctx_lens, strict=True)
        return sum(query_len for query_len, ctx_len in pairs if ctx_len)

    @property
    def _last_with_context(self) -> int:
        ends = (i for i, ctx_len in enumerate(self.ctx_lens, 1) if ctx_len)
        return sum(self.query_lens[: max(ends, default=0)])


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


MLA_FIELDS: dict[str, "dataclasses.Field[Any]"] = MlaCase.__dataclass_fields__
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
