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
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    FieldType,
    Flag,
    Int,
    Lens,
    Maybe,
    Number,
    OneOf,
    group,
    refuse,
)
from attnlab.case.lengths import Lengths
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS, Platform

PREFILL, DECODE, SHARDS = PATHS = ("prefill", "decode", "shards")
PACKED, ALIGNED = CHUNKINGS = ("packed", "aligned")
MLA_BACKENDS = ("model", "vllm")
_MOST_SCORES = 1 << 27  # elements of a float64 score matrix over all heads
_OF_PATH = {
    PREFILL: (
        "chunk_rows",
        "chunking",
        "empty_lse",
        "output_scale",
        "tokens_with_context",
        "partials",
    ),
    DECODE: ("num_splits", "padding"),
    SHARDS: ("num_ranks", "interleave_size", "lse_dtype", "num_splits", "partials"),
}


# Each declares a field of its group: default, type, help text.
_path, _sizes, _lengths = group("the path"), group("sizes"), group("lengths")
_prefill, _decode, _shards = (group(f"path {path}") for path in PATHS)
_data = group("data and vLLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCase:
    """One call of MLA attention.

    Sizes have the names of vLLM's MLADims. A head's score is (q_nope · k_nope + q_rope · k_rope) times
    (qk_nope_head_dim + qk_rope_head_dim)^-0.5.

    - ``query_lens``, ``ctx_lens``: new tokens and cached tokens of each sequence.
    - ``chunk_rows``: tokens of context that are attended at once. ``chunking``: "packed", several requests in
      one chunk (0.33.0), or "aligned", the same positions of all requests, so that a short context has empty
      chunks (0.11.2). ``empty_lse``: the LSE of a row without keys, -inf (FlashAttention 3) or inf
      (FlashAttention 2).
    - ``partials``: the partial attentions are exact up to their dtype, or those of decode_attention_fwd.
    - ``output_scale``: the last merge writes FP8, divided by it. ``tokens_with_context``: the last merge
      receives the number of tokens that have context (prefill_tokens_with_context); the others come last.
    - ``num_ranks``, ``interleave_size``: context parallelism. ``lse_dtype``: the LSE of a rank is float32, or
      has the query's dtype, as TRITON_MLA's has.
    - ``padding``: rows after the last sequence whose length is 0. ``num_splits``: splits of the decode op.
    - ``spread``: the query's standard deviation. Larger scores make the parts' LSE differ more.
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
        "packed: several requests in one chunk; aligned: the same positions of all",
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
        None,
        Maybe(Number(), "not FP8"),
        "the last merge writes FP8, divided by this",
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

    def __post_init__(self) -> None:
        """Check every field; raise InvalidCase before anything is allocated."""
        for name, one in MLA_FIELDS.items():
            kind: FieldType = one.metadata["kind"]
            object.__setattr__(self, name, kind.check(name, getattr(self, name)))
        if len(self.ctx_lens) != len(self.query_lens):
            refuse("ctx_lens", f"as many as query_lens ({len(self.query_lens)})", self.ctx_lens)
        self._check_path()
        self._check_size()

    def _check_path(self) -> None:
        """Refuse combinations that vLLM does not have."""
        for name in sorted({one for names in _OF_PATH.values() for one in names}):
            if name not in _OF_PATH[self.path] and getattr(self, name) != MLA_FIELDS[name].default:
                refuse(
                    name, f"{MLA_FIELDS[name].default!r} on path {self.path}", getattr(self, name)
                )
        for name, is_wrong, allowed in self._rules():
            if is_wrong:
                refuse(name, allowed, getattr(self, name))

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield fields, whether their value is wrong, and what is allowed."""
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

    def _check_size(self) -> None:
        pairs = zip(self.query_lens, self.ctx_lens, strict=True)
        scores = self.num_heads * sum(q * (q + c) for q, c in pairs)
        if scores > _MOST_SCORES:
            refuse(
                "ctx_lens", f"so short that there are at most {_MOST_SCORES} scores", self.ctx_lens
            )

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
        count = sum(self.query_lens)
        for query_len, ctx_len in zip(self.query_lens[::-1], self.ctx_lens[::-1], strict=True):
            if ctx_len:
                break
            count -= query_len
        return count

    def replace(self, **changes: Any) -> "MlaCase":
        """Return the case with other values of some fields."""
        check_names(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "MlaCase":
        """Return the case of :meth:`to_dict`; raise InvalidCase for an unknown field."""
        check_names(fields)
        return cls(**fields)


def check_names(fields: Mapping[str, Any]) -> None:
    """Raise InvalidCase for a name that is no field of an MlaCase."""
    for name in fields:
        if name not in MLA_FIELDS:
            raise InvalidCase(f"{name} is not a field of an MlaCase", field=name)


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


MLA_FIELDS: dict[str, "dataclasses.Field[Any]"] = {
    one.name: one for one in dataclasses.fields(MlaCase)
}
