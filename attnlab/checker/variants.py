"""The variants of the hostile cases, as data: changed fields of a Case, each with its reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.masks import CAUSAL, MASKS
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import DECODE_FWD, ENCODER, OPS, PREFILL, UNIFIED, WRAPPER, Op


@dataclass(frozen=True, slots=True)
class Variant:
    """The fields of a Case that a variant changes, and why kernels get them wrong.

    ``ops``: the ops that it is for, by name or by what their records state; empty for all that support it.
    """

    fields: dict[str, Any]
    reason: str
    ops: tuple[str, ...] | Callable[[Op], bool] = ()

    def is_for(self, op: str) -> bool:
        """Answer whether the variant is for an op."""
        if callable(self.ops):
            return self.ops(OPS[op])
        return not self.ops or op in self.ops


# Query and context lengths around the edges of blocks, tiles and partitions.
LENGTHS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 5, 1), (16, 15, 31)),
    ((1, 17), (15, 0)),
    ((2, 1, 1), (33, 63, 1)),
    ((1, 9), (64, 40)),
    ((1, 1), (129, 1)),
    ((19, 1), (0, 48)),
)

# Blocks beyond 2^31 elements, in the fewest untouched blocks.
FAR_BLOCKS: dict[str, Any] = {
    "num_heads": 2,
    "num_queries_per_kv": 1,
    "head_size": 128,
    "block_size": 32,
    "first_block": 2**31 // (2 * 128 * 32) + 1,
    "query_lens": (1, 2),
    "ctx_lens": (33, 17),
}

# The most informative variants first: a check with few cases runs only these.
VARIANTS = (
    Variant({}, "Shuffled blocks and ragged lengths, without any further feature."),
    Variant(
        {"num_heads": 6, "num_queries_per_kv": 3},
        "The GQA ratio is no power of two and differs from the number of KV heads.",
    ),
    Variant({"head_size": 80}, "The head size is no power of two, so tiles have masked columns."),
    Variant({"sliding_window": 16}, "A window of exactly one block."),
    Variant(
        {"alibi": True, "num_heads": 6, "num_queries_per_kv": 2},
        "ALiBi slopes belong to query heads; their number is no power of two.",
    ),
    Variant(
        {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0},
        "An FP8 cache with two different scales, neither of them 1.",
    ),
    Variant(
        {"sinks": True, "num_heads": 6, "num_queries_per_kv": 3},
        "Each query head has its own attention sink.",
    ),
    Variant({"sm_scale": None}, "The op chooses the scale of the scores."),
    Variant(
        {
            "sliding_window": 20,
            "freed": "empty",
            "query_lens": (1, 34, 2),
            "ctx_lens": (79, 62, 126),
        },
        "The window has freed blocks, which now hold NaN. Every sequence ends at a block's end, because "
        "a read of an unwritten tail would hide a read of a freed block.",
    ),
    Variant(
        {
            "sliding_window": 12,
            "freed": "recycled",
            "query_lens": (1, 34, 2),
            "ctx_lens": (63, 94, 126),
        },
        "The window has freed blocks, which another sequence uses now.",
    ),
    Variant(
        {
            "sliding_window": 3,
            "distribution": "large_scores",
            "num_queries_per_kv": 1,
            "query_lens": (20, 1),
            "ctx_lens": (21, 47),
        },
        "Rows that see no key of their first tile, and then only scores far below 0.",
    ),
    Variant({"kv_layout": "fused"}, "All tensors are slices of larger ones, as in vLLM's engine."),
    Variant(
        {"pad_batch": 5, "max_blocks_per_seq": 40},
        "The batch is padded with empty sequences, as for a CUDA graph.",
    ),
    Variant(
        {
            "num_heads": 40,
            "num_queries_per_kv": 20,
            "head_size": 32,
            "query_lens": (1, 2),
            "ctx_lens": (17, 3),
        },
        "More query heads per KV head than a tile of 16 holds.",
    ),
    Variant(
        {"block_size": 48, "query_lens": (1, 3), "ctx_lens": (50, 95)},
        "The block size is no power of two.",
    ),
    Variant(
        {"kv_layout": "HND", "num_heads": 6, "num_queries_per_kv": 3},
        "In memory the heads of a block precede its slots.",
    ),
    Variant(
        FAR_BLOCKS,
        "Block offsets just beyond 2^31 elements. The caches reserve 4 GiB of addresses; few are touched.",
    ),
    Variant(
        {"block_size": 32, "num_heads": 8, "num_queries_per_kv": 8},
        "Multi-query attention: all query heads share one KV head.",
    ),
    Variant({"dtype": "float32", "num_splits": 4}, "Float32, and sequences split into 4 parts."),
    Variant({"sliding_window": 1, "head_size": 96}, "A window that holds only the token itself."),
    Variant(
        {"sm_scale": 16.0, "query_lens": (1, 1), "ctx_lens": (257, 40)},
        "Decodes with scores far beyond 88, where exp overflows in float32 unless a maximum is subtracted.",
    ),
    Variant(
        {"stage": "int64", "num_splits": 0}, "The index tensors are int64, where that is allowed."
    ),
    Variant(
        {
            "kv_cache_dtype": "fp8",
            "k_scale": 0.5,
            "v_scale": 0.3,
            "sliding_window": 5,
            "block_size": 64,
        },
        "FP8 with a window much smaller than a block.",
    ),
    Variant({"block_size": 8, "head_size": 128}, "Blocks smaller than the kernel's tile."),
    Variant(
        {
            "num_heads": 5,
            "num_queries_per_kv": 5,
            "sliding_window": 270,
            "query_lens": (1, 2),
            "ctx_lens": (530, 40),
        },
        "A window that begins in the second partition of 256 tokens.",
    ),
    Variant(
        {"sinks": True, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0, "num_splits": 4},
        "Sinks must count once, although 4 parts are merged, and must not be scaled.",
    ),
    Variant({"sinks": True, "sliding_window": 16}, "A sink stays visible outside the window."),
    Variant(
        {"softcap": 2.0, "num_heads": 6, "num_queries_per_kv": 3},
        "A soft cap that changes most scores.",
    ),
    Variant(
        {"softcap": 0.2, "sm_scale": 1.0},
        "A small soft cap with large scores, where exp in a naive tanh overflows.",
    ),
    Variant(
        {"sinks": True, "alibi": True, "num_heads": 6, "num_queries_per_kv": 2},
        "Sinks together with ALiBi: the sink must not get a slope.",
    ),
    Variant({"dtype": "bfloat16"}, "Bfloat16 has 8 bits of precision."),
)


# Of each op in benchmarks: all variants, so that the further ones run, too, and rows of the covering design.
DEFAULT_CASES = len(VARIANTS) + 5

# The last variants of the hostile cases, for faults that the others miss.

_LENGTHS: dict[str, Any] = {"query_lens": (1, 19, 3), "ctx_lens": (20, 0, 37)}
_FREED: dict[str, Any] = {
    "sliding_window": 20,
    "freed": "empty",
    "query_lens": (1, 34, 2),
    "ctx_lens": (79, 62, 126),
}
# unified_attention divides the sequences of decodes in all releases.
_SEGMENTS: dict[str, Any] = {"query_lens": (1, 1), "ctx_lens": (129, 79), "num_splits": 4}
_WINDOWED: dict[str, Any] = {"alibi": True, "sliding_window": 7}
LATE_VARIANTS = (
    Variant(
        {**_LENGTHS, **_WINDOWED},
        "A sliding window together with ALiBi: a kernel of its own for ALiBi may have no window.",
    ),
    Variant(
        {"query_lens": (1, 1), "ctx_lens": (20, 37), **_WINDOWED},
        "A sliding window together with ALiBi in decodes alone.",
    ),
    Variant(
        {**FAR_BLOCKS, "alibi": True},
        "Block offsets just beyond 2^31 elements in the kernel for ALiBi.",
    ),
    Variant(
        {"query_lens": (1, 1), "ctx_lens": (40, 9), "sinks": True, "alibi": True},
        "Sinks with ALiBi in decodes alone: only a sink shows distances that are off by a constant.",
        (UNIFIED, WRAPPER),
    ),
    Variant(
        {
            "query_lens": (1, 1),
            "ctx_lens": (20, 9),
            "head_size": 80,
            "num_queries_per_kv": 1,
            "num_splits": 1,
        },
        "A head size that is no power of two in the kernel for one query head per KV head.",
        (DECODE_FWD,),
    ),
    *(
        Variant({**_LENGTHS, "op_argument": name, "alibi": True}, reason)
        for name, reason in (
            ("block_pointers", "Addresses in the block table of the kernel for ALiBi."),
            ("int4_per_token_head", "An INT4 cache with ALiBi."),
            ("diffkv", "Values narrower than keys, with ALiBi."),
            ("tensor_descriptors", "Tensor descriptors with ALiBi."),
        )
    ),
    *(
        Variant({**_LENGTHS, "op_argument": name, "interleave_v": True}, reason)
        for name, reason in (
            ("cached_new_tokens", "New tokens from a cache with values in packs."),
            ("fp8_output", "An FP8 output, and values in packs."),
            ("block_pointers", "Addresses of blocks with values in packs."),
        )
    ),
    *(
        Variant({**_FREED, **fields}, reason, (UNIFIED, PREFILL))
        for fields, reason in (
            (
                {"mask": "bidirectional"},
                "Freed blocks before a window of rows that are not causal.",
            ),
            ({"mask": "chunks"}, "Freed blocks before the chunks that a row sees."),
            ({"op_argument": "int8_per_token_head"}, "Freed blocks, whose scales are NaN."),
            ({"op_argument": "cached_new_tokens"}, "Freed blocks, and new tokens from the cache."),
        )
    ),
    *(
        Variant({**_LENGTHS, "op_argument": name}, f"Other strides: {one.summary}.")
        for name, one in OP_ARGUMENTS.items()
        if one.strided is not None
    ),
    Variant(
        {"query_lens": (1, 1), "ctx_lens": (127, 15), "alibi": True, "num_heads": 6},
        "ALiBi in decodes alone. Every sequence ends at a block's end, because NaN of an unwritten tail "
        "would hide wrong biases.",
    ),
    *(
        Variant({**_SEGMENTS, **fields}, f"Segments with {what}.", (UNIFIED,))
        for fields, what in (
            (
                {"softcap": 2.0, "head_size": 80, "num_heads": 6, "sliding_window": 20},
                "a soft cap, masked columns and a window",
            ),
            (
                {"alibi": True, "kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0},
                "ALiBi and an FP8 cache",
            ),
            ({"sinks": True, "sliding_window": 1}, "sinks and a window of one token"),
        )
    ),
)


# The variants with values that random numbers do not have (:mod:`attnlab.tensors.cache`).

_VALUES: dict[str, Any] = {"query_lens": (3, 1), "ctx_lens": (30, 37), "num_splits": 0}
_SPLIT_VALUES: dict[str, Any] = {"query_lens": (1, 1), "ctx_lens": (37, 65), "num_splits": 4}


def _scoring(op: Op) -> bool:
    """Answer whether an op computes, or merges, attention of several new tokens."""
    return op.prefill and op.is_triton and not op.writes_cache


def _splitting(op: Op) -> bool:
    """Answer whether an op splits sequences."""
    return op.num_splits is not None


def _valued(name: str, reason: str, split_reason: str, **fields: Any) -> tuple[Variant, ...]:
    """Return the variants with a distribution of values; the second is for the ops that can split."""
    named = {"distribution": name, **fields}
    return (
        Variant({**_VALUES, **named}, reason, _scoring),
        Variant({**_SPLIT_VALUES, **named}, split_reason, _splitting),
    )


VALUE_VARIANTS = (
    *_valued(
        "large_scores",
        "Scores beyond ±10000, so that the score of a hidden key must not be a finite number near that.",
        "Scores beyond ±10000 in the parts of a split sequence.",
    ),
    *_valued(
        "ties",
        "All scores of a row are equal, and each block of a head has its own values.",
        "Equal scores in the parts of a split sequence.",
    ),
    *_valued(
        "dominant_key",
        "One key has nearly all the weight, and the weights of others underflow.",
        "One part of a split sequence has all the weight.",
    ),
    *_valued(
        "near_limit",
        "Sums of values near 65504, which a sum in float16 exceeds before the division.",
        "Sums near 65504 in the parts of a split sequence.",
    ),
    Variant(
        {**_VALUES, "distribution": "near_limit", "kv_cache_dtype": "fp8", "v_scale": 128.0},
        "Values near the limit of FP8, and their products with the scale near that of float16.",
        _scoring,
    ),
    Variant(
        {
            **{"query_lens": (3, 1), "ctx_lens": (130, 70), "distribution": "normal"},
            **{"alibi": True, "num_heads": 8, "sm_scale": 2.0},
        },
        "ALiBi hides the keys with the largest scores: a maximum without the bias makes weights underflow.",
    ),
    Variant(
        {
            **{
                "query_lens": (1, 2),
                "ctx_lens": (17, 40),
                "distribution": "normal",
                "head_size": 32,
            },
            **{"num_heads": 40, "num_queries_per_kv": 20},
            **{"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0},
        },
        "More query heads per KV head than a tile of 16 holds, in a kernel of its own for an FP8 cache.",
    ),
)


# The variants with a mask or an op argument, and those that reach what is left of vLLM's ops.
#
# They run after all of :data:`attnlab.checker.variants.VARIANTS`, each once. Those without a mask run on
# vLLM's Triton ops under the interpreter only.

_SHORT: dict[str, Any] = {"query_lens": (3, 1, 2), "ctx_lens": (17, 40, 0)}
_ROWS: dict[str, Any] = {"query_lens": (1, 1, 1), "ctx_lens": (17, 40, 0)}
_NO_ROWS: dict[str, Any] = {
    "query_lens": (130, 2),
    "ctx_lens": (0, 3),
    "num_heads": 1,
    "num_queries_per_kv": 1,
    "head_size": 16,
}


def _with(name: str, reason: str, **fields: Any) -> Variant:
    """Return the variant that passes an op argument."""
    return Variant({**_LENGTHS, "op_argument": name, **fields}, reason)


def _masked(mask: str, reason: str, **fields: Any) -> Variant:
    """Return the variant with a mask."""
    return Variant({**_LENGTHS, "mask": mask, **fields}, reason)


_STATED = (
    *VALUE_VARIANTS,
    _masked("bidirectional", "Each row sees the tokens after it."),
    _masked(
        "bidirectional",
        "A window of unified_attention has two sides, that of the prefill kernel one.",
        sliding_window=7,
    ),
    _masked("causal_by_sequence", "Causal and bidirectional sequences in one batch."),
    _masked(
        "causal_by_sequence",
        "Causal and bidirectional sequences, with a window.",
        sliding_window=7,
    ),
    _masked("ranges", "Two images; the first begins in the context."),
    _masked("ranges", "A range extends beyond the window.", sliding_window=5),
    _masked("ranges_in_window", "A range that the window cuts on the left.", sliding_window=5),
    _masked("prefix_and_window", "The prefix stays visible before the window.", sliding_window=6),
    _masked("chunks", "Chunks of 8 tokens, with one chunk of lookback.", sliding_window=16),
    _masked("tree", "A tree of draft tokens, with a bias.", num_splits=0),
    _masked(
        "tree",
        "A tree of draft tokens in the split path.",
        query_lens=(3, 8, 1),
        ctx_lens=(40, 9, 70),
        num_splits=4,
    ),
    _with("alibi_sqrt", "The root of the distance.", alibi=True, num_heads=6),
    _with(
        "fp8_query",
        "An FP8 query with its own scale; weights are rounded to FP8.",
        kv_cache_dtype="fp8",
        k_scale=0.25,
        v_scale=2.0,
    ),
    _with(
        "fp8_query",
        "The parts of a split sequence with an FP8 query.",
        kv_cache_dtype="fp8",
        k_scale=0.5,
        v_scale=0.3,
        num_splits=4,
        **_SHORT,
    ),
    _with(
        "fp8_query",
        "An FP8 query in ROCm's format.",
        kv_cache_dtype="fp8",
        platform="gfx942",
        **_SHORT,
    ),
    _with("fp8_output", "An FP8 output with a scale.", query_lens=(1, 19, 3), ctx_lens=(20, 37, 0)),
    _with("fp8_output", "The merged parts of a split sequence as FP8.", num_splits=4, **_SHORT),
    _with("int8_per_token_head", "A scale per token and head, in caches with gaps."),
    _with(
        "fp8_per_token_head",
        "An FP8 cache with a scale per token and head.",
        num_splits=4,
        **_SHORT,
    ),
    _with(
        "int4_per_token_head", "Rotated nibbles with a scale and a zero point per token and head."
    ),
    _with(
        "int4_per_token_head",
        "An INT4 cache in the split path, with sinks and a head that is no power of two.",
        head_size=96,
        num_splits=4,
        sinks=True,
        **_ROWS,
    ),
    _with("int4_per_token_head", "An INT4 cache and ranges of images.", mask="ranges"),
    _with(
        "int4_per_token_head",
        "An INT4 cache and a tree of draft tokens.",
        mask="tree",
        num_splits=4,
        **_SHORT,
    ),
    *(
        _with(
            "int4_per_token_head",
            f"An INT4 cache and the mask {mask}, which has arguments of its own.",
            mask=mask,
            sliding_window=5,
        )
        for mask in ("ranges_in_window", "prefix_and_window", "chunks")
    ),
    _with("diffkv", "Values narrower than keys, in one cache."),
    _with("diffkv", "Values narrower than keys in the split path.", num_splits=4, **_SHORT),
    _with(
        "diffkv",
        "Values narrower than keys in an FP8 cache, with a window.",
        kv_cache_dtype="fp8",
        k_scale=0.25,
        v_scale=2.0,
        sliding_window=7,
    ),
    _with("tensor_descriptors", "Loads and stores by tensor descriptors."),
    _with("tensor_descriptors", "Descriptors of keys and values alone.", head_size=48),
    _with("tensor_descriptors", "Tensor descriptors in the split path.", num_splits=4, **_SHORT),
    _with("cached_new_tokens", "The op reads new tokens from the cache."),
    _with(
        "cached_new_tokens",
        "The op reads new tokens from an FP8 cache.",
        kv_cache_dtype="fp8",
        k_scale=0.25,
        v_scale=2.0,
    ),
    _with("block_pointers", "The block table holds addresses."),
    _with(
        "block_pointers",
        "The block table holds addresses, for decode rows alone.",
        query_lens=(1, 1),
        ctx_lens=(20, 37),
    ),
    _with("sinks_of_key_0", "A sink changes the score of the first key.", sinks=True),
    _with(
        "sinks_of_key_0",
        "A window hides the first key, to which the sink is added.",
        sinks=True,
        sliding_window=7,
    ),
    _with(
        "skip_decode", "Rows of sequences with one new token stay as they are.", output_init="zeros"
    ),
    _with(
        "skip_decode",
        "Rows with one new token stay as they are in the kernel for ALiBi, too.",
        output_init="zeros",
        alibi=True,
    ),
    _with(
        "suffix_only_tokens",
        "The prefix of tokens without a context is not read.",
        query_lens=(2, 3, 4),
        ctx_lens=(9, 20, 0),
    ),
    _with(
        "no_lse",
        "The log-sum-exp is not asked for.",
        query_lens=(2, 3, 4),
        ctx_lens=(9, 20, 0),
    ),
    _with(
        "latent_cache",
        "MLA: the value is a part of the key, and all heads share one KV head.",
        head_size=144,
        num_queries_per_kv=4,
    ),
    _with(
        "latent_cache",
        "MLA of DeepSeek: 512 elements of the value, 64 more of the key.",
        head_size=576,
        num_queries_per_kv=4,
        query_lens=(1, 1),
        ctx_lens=(20, 5),
    ),
    _with(
        "latent_cache",
        "MLA with 256 elements of the value, and an FP8 cache.",
        head_size=288,
        num_queries_per_kv=4,
        kv_cache_dtype="fp8",
        k_scale=0.5,
        v_scale=0.5,
        query_lens=(1, 1),
        ctx_lens=(20, 5),
    ),
    _with("latent_cache", "MLA whose value is the whole key.", num_queries_per_kv=4),
    _with("default_scales", "The scales are not passed."),
    _with("flat_buffers", "The caches are lists of slots."),
    _with("gaps", "Every stride that a kernel uses has a gap."),
    _with(
        "short_scratch",
        "Scratch memory that is too short for the split path.",
        num_splits=4,
        **_SHORT,
    ),
    _with("no_max_seq_len", "The longest sequence is not passed."),
    _with("fp8_tokens", "Tokens that are FP8 already.", kv_cache_dtype="fp8", k_scale=0.5),
    _with("byte_cache", "An FP8 cache as bytes.", kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0),
    _with("named_cache_dtype", "Another name of the cache's dtype."),
    _with("head_major", "The cache has the layout of the paged decode kernel."),
    _with("head_major_packed", "Values in packs of 16 bytes."),
    Variant({**_LENGTHS, "stage": "int64"}, "Int64 index tensors, for the decode op, too."),
    Variant({**_LENGTHS, "interleave_v": True}, "Values in packs of 16 bytes."),
    Variant({**_LENGTHS, "interleave_v": True, "alibi": True}, "Values in packs, with ALiBi."),
    Variant({**_LENGTHS, "kv_cache_dtype": "fp8_e5m2", "v_scale": 2.0}, "The other FP8 format."),
    Variant(
        {**_LENGTHS, "alibi": True, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
        "ALiBi with an FP8 cache.",
    ),
    Variant(
        {**_LENGTHS, "alibi": True, "dtype": "float32"}, "ALiBi in float32, with smaller tiles."
    ),
    Variant(
        _NO_ROWS,
        "More rows than a tile, next to a short sequence: some programs have no rows.",
    ),
    Variant({**_NO_ROWS, "alibi": True}, "Programs without rows in the kernel for ALiBi."),
    Variant(
        {
            **_LENGTHS,
            "num_queries_per_kv": 1,
            "kv_cache_dtype": "fp8",
            "k_scale": 0.5,
            "v_scale": 2.0,
            "softcap": 2.0,
        },
        "One query head per KV head, an FP8 cache and a soft cap.",
    ),
    Variant({**_LENGTHS, "num_queries_per_kv": 1, "platform": "gfx942"}, "The tiles of ROCm."),
    Variant({**_LENGTHS, "platform": "gfx942", "head_size": 80}, "The tiles of ROCm, for groups."),
    Variant(
        {"query_lens": (1, 1), "ctx_lens": (20, 37), "platform": "gfx942", "head_size": 128},
        "The dispatch to ROCm's own decode kernel.",
    ),
    Variant({**_LENGTHS, "platform": "gfx1100"}, "The narrower tiles of RDNA.", (ENCODER,)),
    Variant(
        {"query_lens": (3, 2), "ctx_lens": (62, 3), "platform": "cpu"},
        "The tiles of devices that are no GPU.",
        (ENCODER,),
    ),
    Variant({**_LENGTHS, "platform": "sm_80"}, "An older GPU, with smaller tiles."),
    Variant(
        {"query_lens": (1,), "ctx_lens": (20,), "num_heads": 2, "head_size": 1024},
        "A head that fills the shared memory.",
    ),
    Variant(
        {
            "query_lens": (1, 3),
            "ctx_lens": (40, 5),
            "num_heads": 2,
            "head_size": 128,
            "sliding_window": 1024,
        },
        "The window and head size by which unified_attention recognises Gemma 3.",
    ),
    _with(
        "head_major",
        "The layout of the paged decode kernel in FP8: 16 elements in a pack, not 8.",
        kv_cache_dtype="fp8",
        k_scale=0.25,
        v_scale=2.0,
    ),
    _with("padded_heads", "Heads of the merged outputs are padded, their log-sum-exp is not."),
    *LATE_VARIANTS,
    Variant(
        {**_LENGTHS, "op_argument": "fp8_query"},
        "FP8 tokens, whose scale no argument passes.",
        (ENCODER,),
    ),
    Variant(
        {**_ROWS, "op_argument": "fp8_query", "kv_cache_dtype": "fp8"},
        "An FP8 query in decodes alone, whose scale no argument passes.",
        (WRAPPER,),
    ),
)


# All of them: an op argument or a mask without a variant of its own has the plain one.
ARGUMENT_VARIANTS = (
    *_STATED,
    *(
        Variant({**_LENGTHS, **one.needs, "op_argument": name}, one.summary)
        for name, one in OP_ARGUMENTS.items()
        if name not in {variant.fields.get("op_argument") for variant in _STATED}
    ),
    *(
        _masked(name, one.summary, **({"sliding_window": 5} if one.needs_window else {}))
        for name, one in MASKS.items()
        if name != CAUSAL and name not in {variant.fields.get("mask") for variant in _STATED}
    ),
)
