"""Case: every knob of the lab in one frozen, validated, hashable value.

Notebook parameters, widget toggles, command-line flags, a saved JSON file and a vLLM pytest id all say
the same thing: a Case. Nothing else in the lab is configured in any other way.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    BackendName,
    FieldType,
    Flag,
    Int,
    Lens,
    Maybe,
    Number,
    OneOf,
    Span,
    Table,
    case_field,
    refuse,
)
from attnlab.case.lengths import Lengths, draw_lengths
from attnlab.case.platforms import PLATFORMS, Platform
from attnlab.case.rules import check_rules
from attnlab.case.shown import Shown
from attnlab.case.stages import FILLS, INDEX_DTYPES, QUERY_START_LOC_DTYPES, STAGES, Stage

OPS = (
    "chunked_prefill_paged_decode",
    "context_attention_fwd",
    "unified_attention",
    "decode_attention_fwd",
    "merge_attn_states",
    "reshape_and_cache_flash",
    "cpu_attention_with_kv_cache",
)
# Ops whose new tokens come from the cache, as all others do.
CACHE_ONLY_OPS = ("unified_attention", "decode_attention_fwd", "cpu_attention_with_kv_cache")
LIBRARY_OPS = tuple(
    op for op in OPS if op != "cpu_attention_with_kv_cache"
)  # what a vLLM's Triton has
CACHE_WRITE = "reshape_and_cache_flash"  # an op whose output is the cache
RELEASES = ("0.11.2", "0.33.0")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
FP8_FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
BACKENDS = ("model", "vllm", "vllm-cpu", "rocm")
OUTPUT_INITS = ("recycled", "nan", "zeros")
EMPTY_SLOTS = ("zeros", "nan", "garbage")
FREED = ("kept", "empty", "recycled")
DISTRIBUTIONS = ("uniform_1e-3", "normal")
KV_LAYOUTS = ("contiguous", "fused", "HND")

_TEST, _LENGTHS, _STAGE = "the test's parameters", "lengths", "the stage"
_PLATFORM, _CACHE, _DATA = "the platform", "the cache", "data and check"
_BACKEND = "where the kernels come from"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(Shown):
    """One configuration of one attention call; the defaults are those of vLLM's test_prefix_prefill.

    A wrong value raises InvalidCase at once, with a line that names the field.
    """

    op: str = case_field(OPS[0], _TEST, OneOf(OPS), "the op that is called")
    num_heads: int = case_field(64, _TEST, Int(1, 4096), "query heads")
    num_queries_per_kv: int = case_field(
        1, _TEST, Int(1, 4096), "query heads that share a KV head: the GQA ratio"
    )
    head_size: int = case_field(128, _TEST, Int(1, 1024), "elements of a head")
    block_size: int = case_field(32, _TEST, Int(1, 4096), "tokens of a cache block")
    dtype: str = case_field(
        "float16", _TEST, OneOf(tuple(DTYPE_BYTES)), "dtype of query, key and value"
    )
    kv_cache_dtype: str = case_field(
        "auto", _TEST, OneOf(KV_CACHE_DTYPES), "the op's kv_cache_dtype; auto is that of the model"
    )
    sliding_window: int = case_field(
        0, _TEST, Int(0), "keys a query may look back on, itself included; 0 is all"
    )
    alibi: bool = case_field(False, _TEST, Flag(), "add ALiBi slopes to the scores")
    sm_scale: float | None = case_field(
        None, _TEST, Maybe(Number(), "the op's own default"), "the scale of the scores, as passed"
    )
    sinks: bool = case_field(
        False, _TEST, Flag(), "pass an attention sink for each query head, as gpt-oss does"
    )
    softcap: float | None = case_field(
        None,
        _TEST,
        Maybe(Number(), "no cap"),
        "c of the soft cap c · tanh(score / c), as Gemma 2 has",
    )

    interleave_v: bool = case_field(
        False,
        _TEST,
        Flag(),
        "values of a block in packs of 16 bytes, as AITER writes them (0.33.0)",
    )
    num_splits: int | None = case_field(
        None,
        _TEST,
        Maybe(Int(0, 256), "as vLLM passes it"),
        "pieces of a sequence that unified_attention (0 is its 2d path) and decode_attention_fwd merge",
    )
    kv_layout: str = case_field(
        "contiguous",
        _TEST,
        OneOf(KV_LAYOUTS),
        "how tensors lie in memory: fused as in vLLM's engine, HND with heads before slots besides",
    )

    query_lens: tuple[int, ...] | None = case_field(
        None, _LENGTHS, Maybe(Lens(1), "drawn"), "new tokens of each sequence"
    )
    ctx_lens: tuple[int, ...] | None = case_field(
        None, _LENGTHS, Maybe(Lens(0), "drawn"), "tokens of each sequence that precede the new ones"
    )
    seed: int = case_field(0, _LENGTHS, Int(0), "seed of the lengths, the data and the block table")
    num_seqs: int = case_field(10, _LENGTHS, Int(1, 65536), "sequences to draw")
    draw_max_query_len: int = case_field(
        1024, _LENGTHS, Int(1), "longest query drawn (MAX_SEQ_LEN)"
    )
    draw_max_ctx_len: int = case_field(
        1024, _LENGTHS, Int(1), "longest context drawn (MAX_CTX_LEN)"
    )
    force_decode: bool = case_field(
        True, _LENGTHS, Flag(), "make the last drawn query one token long"
    )
    max_query_len: int | None = case_field(
        None, _LENGTHS, Maybe(Int(1), "as the test passes it"), "max_query_len, as passed"
    )
    max_seq_len: int | None = case_field(
        None, _LENGTHS, Maybe(Int(1), "as the test passes it"), "max_seq_len, as passed"
    )
    pad_batch: int = case_field(
        0, _LENGTHS, Int(0, 4096), "tokens and empty sequences behind, as a CUDA graph pads a batch"
    )

    stage: str = case_field(
        "sound", _STAGE, OneOf(tuple(STAGES)), "a state that the test went through"
    )
    fill: str | None = case_field(
        None,
        _STAGE,
        Maybe(OneOf(FILLS), "the stage's"),
        "which tokens the cache holds before the call",
    )
    block_table_dtype: str | None = case_field(
        None, _STAGE, Maybe(OneOf(INDEX_DTYPES), "the stage's"), "dtype of block_table"
    )
    seq_lens_dtype: str | None = case_field(
        None, _STAGE, Maybe(OneOf(INDEX_DTYPES), "the stage's"), "dtype of seq_lens"
    )
    query_start_loc_dtype: str | None = case_field(
        None,
        _STAGE,
        Maybe(OneOf(QUERY_START_LOC_DTYPES), "the stage's"),
        "how query_start_loc is made",
    )

    platform: str = case_field(
        "gfx942", _PLATFORM, OneOf(tuple(PLATFORMS)), "where the op would run"
    )
    release: str = case_field(
        "0.33.0", _PLATFORM, OneOf(RELEASES), "the vLLM release whose rules hold"
    )
    rocm_custom_paged_attn: bool = case_field(
        True, _PLATFORM, Flag(), "VLLM_ROCM_CUSTOM_PAGED_ATTN (0.11.2 asks for it)"
    )
    aiter_paged_attn: bool = case_field(
        False, _PLATFORM, Flag(), "AITER paged attention switched on (0.11.2 asks for it)"
    )

    backend: str = case_field(
        "model", _BACKEND, BackendName(BACKENDS), "where the kernels come from"
    )
    kv_head_range: tuple[int, int] | None = case_field(
        None,
        _BACKEND,
        Maybe(Span(), "all"),
        "KV heads that run, first and behind the last, where a whole call would take minutes",
    )
    seq_range: tuple[int, int] | None = case_field(
        None, _BACKEND, Maybe(Span(), "all"), "sequences that run, likewise"
    )
    trace_reads: bool = case_field(
        False,
        _BACKEND,
        Flag(),
        "watch what is read of the cache (backends rocm and vllm, on a CPU)",
    )

    num_blocks: int | None = case_field(
        None, _CACHE, Maybe(Int(1), "as many as the block table needs"), "blocks of the cache"
    )
    first_block: int = case_field(
        0,
        _CACHE,
        Int(0),
        "the lowest block that sequences use; those before it hold zeros and take no memory, so that "
        "offsets beyond 2^31 elements can be had",
    )
    max_blocks_per_seq: int | None = case_field(
        None, _CACHE, Maybe(Int(1), "what the longest sequence needs"), "columns of the block table"
    )
    block_table: tuple[tuple[int, ...], ...] | None = case_field(
        None, _CACHE, Maybe(Table(), "shuffled"), "a block table of your own"
    )
    x: int | None = case_field(
        None,
        _CACHE,
        Maybe(Int(1), "16 bytes of elements"),
        "innermost size of the key cache's layout",
    )
    cache_write: str = case_field(
        "scaled",
        _CACHE,
        OneOf(("scaled", "numeric")),
        "how FP8 is written: as vLLM's cache write, or by the test's conversion of numbers to uint8",
    )
    cache_format: str | None = case_field(
        None,
        _CACHE,
        Maybe(OneOf(FP8_FORMATS), "the format that the platform reads"),
        "FP8 format that the cache is written in",
    )
    k_scale: float = case_field(1.0, _CACHE, Number(), "scale of the FP8 keys")
    v_scale: float = case_field(1.0, _CACHE, Number(), "scale of the FP8 values")
    freed: str = case_field(
        "kept",
        _CACHE,
        OneOf(FREED),
        "blocks wholly before a sliding window, which vLLM frees and leaves in the block table: kept as "
        "they were, empty, or in use by the next sequence",
    )
    empty_slots: str = case_field(
        "zeros", _CACHE, OneOf(EMPTY_SLOTS), "what slots hold that nobody wrote"
    )

    distribution: str = case_field(
        "uniform_1e-3", _DATA, OneOf(DISTRIBUTIONS), "distribution of query, key and value"
    )
    output_init: str = case_field(
        "recycled", _DATA, OneOf(OUTPUT_INITS), "what the output buffer holds before the call"
    )
    atol: float | None = case_field(
        None, _DATA, Maybe(Number(zero=True), "the test's"), "absolute tolerance"
    )
    rtol: float = case_field(0.0, _DATA, Number(zero=True), "relative tolerance")
    reference_dtype: str = case_field(
        "float32", _DATA, OneOf(("float32", "float64")), "dtype of the reference"
    )

    def __post_init__(self) -> None:
        """Check every field by its kind, then the rules between fields; raise InvalidCase."""
        for field in dataclasses.fields(self):
            value = field.metadata["kind"].check(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        check_rules(self)

    # What the knobs amount to.

    @property
    def num_kv_heads(self) -> int:
        """Return num_heads / num_queries_per_kv."""
        return self.num_heads // self.num_queries_per_kv

    @property
    def query_heads(self) -> range | None:
        """Return the query heads that run, or None where all do."""
        if self.kv_head_range is None:
            return None
        return range(
            self.kv_head_range[0] * self.num_queries_per_kv,
            self.kv_head_range[1] * self.num_queries_per_kv,
        )

    @property
    def query_rows(self) -> range | None:
        """Return the output rows of the sequences that run, or None where all do."""
        if self.seq_range is None:
            return None
        starts = [0, *accumulate(self.lengths.query_lens)]
        return range(starts[self.seq_range[0]], starts[self.seq_range[1]])

    @property
    def is_fp8(self) -> bool:
        """Answer whether the cache holds FP8 bytes."""
        return self.kv_cache_dtype != "auto"

    @property
    def lengths(self) -> Lengths:
        """Return the lengths, given or drawn."""
        if self.query_lens is not None and self.ctx_lens is not None:
            return Lengths(query_lens=self.query_lens, ctx_lens=self.ctx_lens)
        return draw_lengths(
            self.seed,
            self.num_seqs,
            self.draw_max_query_len,
            self.draw_max_ctx_len,
            self.force_decode,
        )

    @property
    def passed_max_query_len(self) -> int:
        """Return max_query_len as the caller passes it: the test's constant, or the true maximum."""
        if self.max_query_len is not None:
            return self.max_query_len
        return max(self.query_lens) if self.query_lens else self.draw_max_query_len

    @property
    def passed_max_seq_len(self) -> int:
        """Return max_seq_len as the caller passes it; the test passes MAX_CTX_LEN (vLLM 0.11.2)."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        return max(self.lengths.seq_lens) if self.query_lens else self.draw_max_ctx_len

    @property
    def blocks_per_seq(self) -> int:
        """Return the columns of the block table; for the test's draw these are its 64."""
        if self.block_table is not None:
            return len(self.block_table[0])
        if self.max_blocks_per_seq is not None:
            return self.max_blocks_per_seq
        drawn = self.draw_max_query_len + self.draw_max_ctx_len
        longest = max(self.lengths.seq_lens) if self.query_lens else drawn
        return -(-longest // self.block_size)

    @property
    def total_blocks(self) -> int:
        """Return the blocks of the cache; for the test's draw these are its 640."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.block_table is not None:
            return 1 + max(max(row) for row in self.block_table)
        return self.first_block + len(self.lengths.query_lens) * self.blocks_per_seq

    @property
    def key_x(self) -> int:
        """Return the innermost size of the key cache: 16 bytes of elements unless given."""
        return self.x or 16 // (1 if self.is_fp8 else DTYPE_BYTES[self.dtype])

    @property
    def tolerance(self) -> float:
        """Return atol: given, or the test's (1e-3 for FP8, 1e-6 with ALiBi, else 1e-4; a cache write is
        exact)."""
        if self.atol is not None:
            return self.atol
        if self.op == CACHE_WRITE:
            return 0.0
        return 1e-3 if self.is_fp8 else 1e-6 if self.alibi else 1e-4

    @property
    def staging(self) -> Stage:
        """Return the stage with the knobs that override it; an op that writes the cache finds there the
        context alone."""
        own = {
            "fill": self.fill or ("context_only" if self.op == CACHE_WRITE else None),
            "block_table": self.block_table_dtype,
            "seq_lens": self.seq_lens_dtype,
            "query_start_loc": self.query_start_loc_dtype,
        }
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(STAGES[self.stage], **given)

    @property
    def machine(self) -> Platform:
        """Return the platform's facts."""
        return PLATFORMS[self.platform]

    # To and from other forms.

    def replace(self, **changes: Any) -> "Case":
        """Return a Case with ``changes``; raise InvalidCase as the constructor does."""
        return Case.from_dict({**dataclasses.asdict(self), **changes})

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def to_json(self) -> str:
        """Return every field as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def to_cli(self) -> str:
        """Return the command line that runs this Case."""
        words = ["attnlab", "run"]
        for name, value in self.changes().items():
            words += ["--" + name.replace("_", "-"), field_type(name).text(value)]
        return shlex.join(words)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Case":
        """Return the Case of a mapping; raise InvalidCase for a name that is no field."""
        for name in fields:
            if name not in FIELDS:
                shown = " ".join(str(name).split())
                raise InvalidCase(f"{shown} is not a field of a Case; it has {', '.join(FIELDS)}")
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the Case of a JSON object; fields that it leaves out keep their defaults."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidCase(f"case must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            refuse("case", "a JSON object", fields)
        return cls.from_dict(fields)

    @classmethod
    def from_test_id(cls, test_id: str, **changes: Any) -> "Case":
        """Return the Case of a vLLM pytest id; see :func:`attnlab.case.test_id.fields_of`."""
        from attnlab.case.test_id import fields_of

        return cls.from_dict({**fields_of(test_id), **changes})


FIELDS: dict[str, "dataclasses.Field[Any]"] = {
    field.name: field for field in dataclasses.fields(Case)
}


def field_type(name: str) -> FieldType:
    """Return what the field ``name`` may hold."""
    kind: FieldType = FIELDS[name].metadata["kind"]
    return kind
