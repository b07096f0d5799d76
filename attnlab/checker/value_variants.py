"""The variants with values that random numbers do not have (:mod:`attnlab.tensors.data_values`)."""

from typing import Any

from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, PREFILL, UNIFIED, WRAPPER
from attnlab.checker.variants import Variant

SCORING = (WRAPPER, PREFILL, ENCODER, UNIFIED, MERGE)
_VALUES: dict[str, Any] = {"query_lens": (3, 1), "ctx_lens": (30, 37), "num_splits": 0}
_SPLIT_VALUES: dict[str, Any] = {"query_lens": (1, 1), "ctx_lens": (37, 65), "num_splits": 4}


def _valued(name: str, reason: str, split_reason: str, **fields: Any) -> tuple[Variant, ...]:
    """Return the variants with a distribution of values; the second is for the ops that can split."""
    named = {"distribution": name, **fields}
    return (
        Variant({**_VALUES, **named}, reason, SCORING),
        Variant({**_SPLIT_VALUES, **named}, split_reason, (UNIFIED, DECODE_FWD)),
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
        SCORING,
    ),
)
