"""The variants of the hostile cases, as data: changed fields of a Case, each with its reason."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """The fields of a Case that a variant changes, and why kernels get them wrong.

    ``ops``: the ops that it is for; empty for all that support it.
    """

    fields: dict[str, Any]
    reason: str
    ops: tuple[str, ...] = ()

    def is_for(self, op: str) -> bool:
        """Answer whether the variant is for an op."""
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
