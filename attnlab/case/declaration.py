"""CaseFields: the fields of a Case with their defaults, types and help texts.

The command line's flags, the panels' controls and the notebooks' parameters are generated from these
declarations.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnlab.case.fields import (
    ArgumentName,
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
    group,
)
from attnlab.case.masks import CAUSAL, DATA_FIELDS, MASKS
from attnlab.case.op_arguments import NONE, OP_ARGUMENTS
from attnlab.case.ops import DEFAULT_OP, KV_CACHE_DTYPES, OPS, RELEASES, VLLM_OPS
from attnlab.case.platforms import FILLS, INDEX_DTYPES, PLATFORMS, QUERY_START_LOC_DTYPES, STAGES
from attnlab.case.shown import Shown

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
FP8_FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
BACKENDS = ("model", "vllm", "vllm-cpu", "rocm", "cuda")
OUTPUT_INITS = ("recycled", "nan", "zeros")
EMPTY_SLOTS = ("zeros", "nan", "garbage")
FREED = ("kept", "empty", "recycled")
DISTRIBUTIONS = ("uniform_1e-3", "normal", "large_scores", "ties", "dominant_key", "near_limit")
KV_LAYOUTS = ("contiguous", "fused", "HND")
CACHE_WRITES = ("scaled", "numeric")
REFERENCE_DTYPES = ("float32", "float64")


class OpName(OneOf):
    """One of the names of vLLM's ops, or that of another library's record."""

    def check(self, name: str, value: Any) -> str:
        return value if isinstance(value, str) and value in OPS else super().check(name, value)


# Each declares a field of its group: default, type, help text.
_test, _lengths = group("attention"), group("lengths")
_stage = group(
    "only for vLLM's test_prefix_prefill: its stages, and lengths that are drawn as in it"
)
_platform = group("the platform")
_backend, _cache = group("the kernels"), group("the cache")
_data = group("data and comparison")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CaseFields(Shown):
    """The fields of a Case; :class:`attnlab.case.case.Case` checks them."""

    op: str = _test(
        DEFAULT_OP, OpName(VLLM_OPS), "operation of vLLM to call, or of another library"
    )
    num_heads: int = _test(64, Int(1, 4096), "number of query heads")
    num_queries_per_kv: int = _test(
        1, Int(1, 4096), "number of query heads per KV head (the GQA ratio)"
    )
    head_size: int = _test(128, Int(1, 1024), "number of elements of a head")
    block_size: int = _test(32, Int(1, 4096), "number of tokens per cache block")
    dtype: str = _test("float16", OneOf(tuple(DTYPE_BYTES)), "dtype of query, key and value")
    kv_cache_dtype: str = _test(
        "auto",
        OneOf(KV_CACHE_DTYPES),
        "dtype of the cache, as passed to the op; auto is the dtype of query, key and value",
    )
    sliding_window: int = _test(
        0, Int(0), "number of keys that a query attends to, its own included; 0 means all"
    )
    mask: str = _test(
        CAUSAL, OneOf(tuple(MASKS)), "which keys a row sees, together with sliding_window"
    )
    causal_seqs: tuple[int, ...] | None = _test(None, *DATA_FIELDS["causal_seqs"])
    mm_prefix_range: tuple[tuple[int, ...], ...] | None = _test(
        None, *DATA_FIELDS["mm_prefix_range"]
    )
    rswa_prefix_lens: tuple[int, ...] | None = _test(None, *DATA_FIELDS["rswa_prefix_lens"])
    chunk_lookback: int | None = _test(None, *DATA_FIELDS["chunk_lookback"])
    tree_parents: tuple[int, ...] | None = _test(None, *DATA_FIELDS["tree_parents"])
    alibi: bool = _test(
        False, Flag(), "add ALiBi's position-dependent bias to the attention scores"
    )
    sm_scale: float | None = _test(
        None,
        Maybe(Number(), "not passed; the op uses its default"),
        "factor of the scores before softmax (softmax scale)",
    )
    sinks: bool = _test(
        False, Flag(), "pass one attention sink logit per query head, as gpt-oss does"
    )
    softcap: float | None = _test(
        None,
        Maybe(Number(), "no cap"),
        "soft cap c of the scores, c * tanh(score / c), as Gemma 2 uses it",
    )
    interleave_v: bool = _test(
        False,
        Flag(),
        "store the values of a block in AITER's layout, packs of 16 bytes (release 0.33.0)",
    )
    num_splits: int | None = _test(
        None,
        Maybe(Int(0, 256), "the number that vLLM passes"),
        "number of parts of a sequence that unified_attention or decode_attention_fwd computes "
        "separately and merges; 0 selects the unsplit path of unified_attention",
    )
    kv_layout: str = _test(
        "contiguous",
        OneOf(KV_LAYOUTS),
        "strides of the tensors: contiguous; fused, with query, key and value as slices of one tensor "
        "and key and value cache in one allocation, as in vLLM's engine; HND, also with heads before "
        "slots in the cache",
    )
    op_argument: str = _test(
        NONE,
        ArgumentName(
            (NONE, *OP_ARGUMENTS), {name: one.summary for name, one in OP_ARGUMENTS.items()}
        ),
        "argument of the op that no other field sets, by a name (backend vllm); `attnlab check --coverage` "
        "lists the arguments of each op",
    )

    query_lens: tuple[int, ...] | None = _lengths(
        None, Maybe(Lens(1), "drawn from seed"), "number of new tokens per sequence"
    )
    ctx_lens: tuple[int, ...] | None = _lengths(
        None,
        Maybe(Lens(0), "drawn from seed"),
        "number of context tokens per sequence, those before the new tokens",
    )
    seed: int = _lengths(0, Int(0), "seed of drawn lengths, of the data and of the block table")
    num_seqs: int = _stage(10, Int(1, 65536), "number of sequences to draw")
    draw_max_query_len: int = _stage(
        1024, Int(1), "upper limit of drawn query lengths (the test's MAX_SEQ_LEN)"
    )
    draw_max_ctx_len: int = _stage(
        1024, Int(1), "upper limit of drawn context lengths (the test's MAX_CTX_LEN)"
    )
    force_decode: bool = _stage(True, Flag(), "set the last drawn query length to 1, a decode")
    max_query_len: int | None = _lengths(
        None, Maybe(Int(1), "as the test passes it"), "value of the op's argument max_query_len"
    )
    max_seq_len: int | None = _lengths(
        None, Maybe(Int(1), "as the test passes it"), "value of the op's argument max_seq_len"
    )
    pad_batch: int = _lengths(
        0,
        Int(0, 4096),
        "number of padding tokens and empty sequences after the batch, as a CUDA graph pads it",
    )

    stage: str = _stage(
        "sound",
        OneOf(tuple(STAGES)),
        "state of vLLM's test while it was repaired: sets the index dtypes and the cache fill",
    )
    fill: str | None = _stage(
        None,
        Maybe(OneOf(FILLS), "the stage's"),
        "tokens that are in the cache before the call: the context only; also the new tokens of decode "
        "sequences (query_len 1); or all tokens",
    )
    block_table_dtype: str | None = _stage(
        None,
        Maybe(OneOf(INDEX_DTYPES), "the stage's dtype"),
        "dtype of block_table; the op expects int32",
    )
    seq_lens_dtype: str | None = _stage(
        None,
        Maybe(OneOf(INDEX_DTYPES), "the stage's dtype"),
        "dtype of seq_lens; the op expects int32",
    )
    query_start_loc_dtype: str | None = _stage(
        None,
        Maybe(OneOf(QUERY_START_LOC_DTYPES), "the stage's dtype"),
        "dtype of query_start_loc; int32_before_cumsum converts before torch.cumsum, which returns int64",
    )

    platform: str = _platform(
        "gfx942", OneOf(tuple(PLATFORMS)), "GPU architecture whose dispatch rules apply"
    )
    release: str = _platform("0.33.0", OneOf(RELEASES), "vLLM release whose dispatch rules apply")
    rocm_custom_paged_attn: bool = _platform(
        True,
        Flag(),
        "value of the environment variable VLLM_ROCM_CUSTOM_PAGED_ATTN (read by release 0.11.2)",
    )
    aiter_paged_attn: bool = _platform(
        False, Flag(), "AITER's paged attention is enabled (read by release 0.11.2)"
    )

    backend: str = _backend(
        "model",
        BackendName(BACKENDS),
        "kernels to run: models in torch; vLLM's Triton source; vLLM's compiled CPU op; or vLLM's HIP "
        "source (rocm) or its cache write of CUDA (cuda) on an emulated device",
    )
    kv_head_range: tuple[int, int] | None = _backend(
        None,
        Maybe(Span(), "all"),
        "KV heads A to B - 1 to run, to shorten a run under Triton's interpreter",
    )
    seq_range: tuple[int, int] | None = _backend(
        None,
        Maybe(Span(), "all"),
        "sequences A to B - 1 to run, to shorten a run under Triton's interpreter",
    )
    trace_reads: bool = _backend(
        False,
        Flag(),
        "record which cache slots the kernels read (backends rocm, and vllm on a CPU)",
    )

    num_blocks: int | None = _cache(
        None, Maybe(Int(1), "as many as the block table needs"), "number of blocks of the cache"
    )
    first_block: int = _cache(
        0,
        Int(0),
        "lowest block that the sequences use; the blocks before it are zeros that take no memory, to "
        "test offsets above 2^31 elements",
    )
    max_blocks_per_seq: int | None = _cache(
        None,
        Maybe(Int(1), "what the longest sequence needs"),
        "number of columns of the block table",
    )
    block_table: tuple[tuple[int, ...], ...] | None = _cache(
        None, Maybe(Table(), "blocks in random order"), "block table to use"
    )
    x: int | None = _cache(
        None,
        Maybe(Int(1), "16 bytes"),
        "number of elements in the innermost dimension of the key cache",
    )
    cache_write: str = _cache(
        "scaled",
        OneOf(CACHE_WRITES),
        "conversion to FP8: scaled and rounded as by vLLM's cache write; or numeric, each number cast "
        "to uint8, as in vLLM's test",
    )
    cache_format: str | None = _cache(
        None,
        Maybe(OneOf(FP8_FORMATS), "the format that the platform reads"),
        "FP8 format in which the cache is written",
    )
    k_scale: float = _cache(
        1.0, Number(), "scale of FP8 keys; a stored number times the scale is the key"
    )
    v_scale: float = _cache(
        1.0, Number(), "scale of FP8 values; a stored number times the scale is the value"
    )
    freed: str = _cache(
        "kept",
        OneOf(FREED),
        "blocks entirely before the sliding window, which vLLM frees but leaves in the block table: "
        "kept unchanged, empty, or recycled for the next sequence",
    )
    empty_slots: str = _cache(
        "zeros",
        OneOf(EMPTY_SLOTS),
        "contents of cache slots that were never written: zeros, nan, or garbage (finite numbers)",
    )

    distribution: str = _data(
        "uniform_1e-3",
        OneOf(DISTRIBUTIONS),
        "distribution of query, key and value: uniform in ±1e-3, as in vLLM's test; normal with "
        "standard deviation 1; or normal with large scores, ties, a dominant key, or values near 65504",
    )
    output_init: str = _data(
        "recycled",
        OneOf(OUTPUT_INITS),
        "contents of the output buffer before the call: recycled (finite numbers, as memory from "
        "torch.empty may hold), nan or zeros",
    )
    atol: float | None = _data(
        None,
        Maybe(Number(zero=True), "what rounding explains, derived for each element"),
        "absolute tolerance of the comparison with the reference; a test id sets the test's",
    )
    rtol: float = _data(
        0.0, Number(zero=True), "relative tolerance of the comparison with the reference"
    )
    reference_dtype: str = _data(
        "float32", OneOf(REFERENCE_DTYPES), "dtype in which the reference is computed"
    )


FIELDS: dict[str, "dataclasses.Field[Any]"] = CaseFields.__dataclass_fields__


def field_type(name: str) -> FieldType:
    """Return what the field ``name`` may hold."""
    kind: FieldType = FIELDS[name].metadata["kind"]
    return kind
