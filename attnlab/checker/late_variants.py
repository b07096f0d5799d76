"""The last variants of the hostile cases, for faults that the others miss."""

from typing import Any

from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import DECODE_FWD, PREFILL, UNIFIED, WRAPPER
from attnlab.checker.variants import FAR_BLOCKS, Variant

_LENGTHS: dict[str, Any] = {"query_lens": (1, 19, 3), "ctx_lens": (20, 0, 37)}
_FREED: dict[str, Any] = {
    "sliding_window": 20,
    "freed": "empty",
    "query_lens": (1, 34, 2),
    "ctx_lens": (79, 62, 126),
}
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
)
