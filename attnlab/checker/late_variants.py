"""The last variants of the hostile cases, for faults that the others miss."""

from attnlab.case.ops import DECODE_FWD, UNIFIED
from attnlab.checker.variants import FAR_BLOCKS, Variant

LATE_VARIANTS = (
    Variant(
        {**FAR_BLOCKS, "alibi": True},
        "Block offsets just beyond 2^31 elements in the kernel for ALiBi.",
    ),
    Variant(
        {"query_lens": (1, 1), "ctx_lens": (40, 9), "sinks": True, "alibi": True},
        "Sinks with ALiBi in decodes alone: only a sink shows distances that are off by a constant.",
        (UNIFIED,),
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
)
