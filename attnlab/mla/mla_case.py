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
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.lengths import Lengths
from attnlab.case.ops import RELEASES
from attnlab.case.platforms import PLATFORMS, Platform

PREFILL, DECODE, SHARDS = PATHS = ("prefill", "decode", "shards")
PACKED, ALIGNED = CHUNKINGS = ("packed", "aligned")
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "path": PATHS,
    "chunking": CHUNKINGS,
    "partials": ("exact", "op"),
    "dtype": ("float16", "bfloat16", "float32"),
    "lse_dtype": ("float32", "query"),
    "empty_lse": ("-inf", "inf"),
    "kv_cache_dtype": ("auto", "fp8"),
    "release": RELEASES,
    "platform": tuple(PLATFORMS),
}
_COUNTS = (
    *("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "block_size", "chunk_rows"),
    *("num_ranks", "interleave_size", "num_splits"),
)
_NOT_NEGATIVE = ("qk_rope_head_dim", "padding", "seed")
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

    path: str = PREFILL
    num_heads: int = 4
    kv_lora_rank: int = 32
    qk_rope_head_dim: int = 16
    qk_nope_head_dim: int = 16
    v_head_dim: int = 16
    block_size: int = 16
    query_lens: tuple[int, ...] = (5, 3, 4)
    ctx_lens: tuple[int, ...] = (70, 20, 0)
    chunk_rows: int = 32
    chunking: str = PACKED
    empty_lse: str = "-inf"
    partials: str = "exact"
    output_scale: float | None = None
    tokens_with_context: bool = False
    num_ranks: int = 2
    interleave_size: int = 1
    lse_dtype: str = "float32"
    padding: int = 0
    num_splits: int = 4
    dtype: str = "float16"
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    spread: float = 2.0
    seed: int = 0
    release: str = RELEASES[-1]
    platform: str = "sm_90"

    def __post_init__(self) -> None:
        """Check every field; raise InvalidCase before anything is allocated."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                refuse(name, f"one of {', '.join(allowed)}", getattr(self, name))
        for name in _COUNTS + _NOT_NEGATIVE:
            value, least = getattr(self, name), int(name in _COUNTS)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not least <= value < 1 << 31
            ):
                refuse(name, f"an integer of at least {least}", value)
        for name, least in (("query_lens", 1), ("ctx_lens", 0)):
            object.__setattr__(self, name, _lens(name, getattr(self, name), least))
        if len(self.ctx_lens) != len(self.query_lens):
            refuse("ctx_lens", f"as many as query_lens ({len(self.query_lens)})", self.ctx_lens)
        for name in ("k_scale", "spread", "output_scale"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not _is_positive(value)):
                refuse(name, "a positive finite number", value)
        self._check_path()
        self._check_size()

    def _check_path(self) -> None:
        """Refuse combinations that vLLM does not have."""
        for name in sorted({one for names in _OF_PATH.values() for one in names}):
            if name not in _OF_PATH[self.path] and getattr(self, name) != _DEFAULTS[name]:
                refuse(name, f"{_DEFAULTS[name]!r} on path {self.path}", getattr(self, name))
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
        if name not in _DEFAULTS:
            raise InvalidCase(f"{name} is not a field of an MlaCase", field=name)


def _lens(name: str, value: Any, least: int) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or any(type(one) is not int or not least <= one < 1 << 31 for one in value):
        refuse(name, f"a list of integers of at least {least}", value)
    return tuple(value)


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


_DEFAULTS = {one.name: one.default for one in dataclasses.fields(MlaCase)}
