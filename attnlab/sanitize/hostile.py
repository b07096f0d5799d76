"""Hostile cases: small, sound by every contract, and unkind to whatever a kernel takes for granted.

Shuffled and spare blocks; lengths around the edges of blocks, tiles and partitions; sequences of one
token, without a context, decodes alone; query heads in groups whose number is not that of the KV heads;
head sizes and block sizes that are no powers of two; windows, ALiBi, a sink of each head's own; soft
caps; FP8 with two scales that are not 1; large scores; the scale left to the op; int64 tables where they
are allowed; blocks that a sliding window has freed, empty or in use by another sequence; blocks whose
offset is beyond 2^31 elements. Poison stands only in slots that nobody wrote.
"""

import random
from collections.abc import Iterator
from typing import Any

from attnlab.case import CACHE_ONLY_OPS, Case
from attnlab.errors import InvalidCase
from attnlab.sanitize.subject import Subject

_LENS = (
    ((1, 1, 1, 1), (0, 15, 16, 255)),
    ((1, 17, 3, 1), (16, 0, 31, 256)),
    ((2, 1, 33), (257, 511, 1)),
    ((1, 1, 9), (0, 300, 40)),
    ((1, 1), (530, 1)),
    ((40, 1, 16), (0, 47, 48)),
)
_FAR = {  # the first block's offset is just beyond 2^31 elements, in caches of 4 GiB that few touch
    "num_queries_per_kv": 1,
    "head_size": 256,
    "block_size": 32,
    "first_block": 2**31 // (4 * 256 * 32) + 1,
}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 6, "num_queries_per_kv": 3},
    {"head_size": 80},
    {"sliding_window": 16},
    {"alibi": True, "num_heads": 6, "num_queries_per_kv": 2},
    {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0},
    {"sinks": True, "num_heads": 6, "num_queries_per_kv": 3},
    {"sm_scale": None},
    _FAR,
    {"sliding_window": 9, "freed": "empty"},
    {"sliding_window": 12, "freed": "recycled"},
    {"block_size": 32, "num_heads": 8, "num_queries_per_kv": 8},
    {"dtype": "float32", "num_splits": 4},
    {"sliding_window": 1, "head_size": 96},
    {"sm_scale": 1.0},
    {"stage": "int64", "num_splits": 0},
    {
        "kv_cache_dtype": "fp8",
        "k_scale": 0.5,
        "v_scale": 0.3,
        "sliding_window": 5,
        "block_size": 64,
    },
    {"block_size": 8, "head_size": 128},
    {"num_heads": 5, "num_queries_per_kv": 5, "sliding_window": 270},
    {"sinks": True, "kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0, "num_splits": 4},
    {"sinks": True, "sliding_window": 16},
    {"softcap": 2.0, "num_heads": 6, "num_queries_per_kv": 3},
    {"softcap": 0.2, "sm_scale": 1.0},
    {"sinks": True, "alibi": True, "num_heads": 6, "num_queries_per_kv": 2},
)


def hostile_cases(
    subject: Subject, op: str, platform: str, count: int, seed: int
) -> Iterator[Case]:
    """Yield ``count`` Cases of an op, each other lengths and another variant; in the order of value."""
    rng = random.Random(seed)
    made = 0
    for i in range(20 * count):
        if made == count:
            return
        lens = _LENS[i % len(_LENS)] if i < len(_VARIANTS) else _random_lens(rng)
        variant = _VARIANTS[i % len(_VARIANTS)]
        try:
            yield _case(subject, op, platform, lens, variant, rng.randrange(1 << 30))
        except InvalidCase:
            continue  # the op does not know the variant
        made += 1


def _random_lens(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 127, 255, 256, 257, 300)
    count = rng.randint(1, 4)
    query_lens = tuple(rng.choice((1, 1, 2, 8, 9, 16, 33)) for _ in range(count))
    return query_lens, tuple(rng.choice(edges) for _ in range(count))


def _case(
    subject: Subject,
    op: str,
    platform: str,
    lens: tuple[tuple[int, ...], tuple[int, ...]],
    variant: dict[str, Any],
    seed: int,
) -> Case:
    """Return the Case of some lengths and a variant; raise InvalidCase where they do not go together."""
    if variant.get("kv_cache_dtype", "auto") not in subject.kv_cache_dtypes:
        raise InvalidCase("the subject does not know the variant's kv_cache_dtype")
    if "first_block" in variant and not subject.large_caches:
        raise InvalidCase("the subject may copy the cache")
    if "freed" in variant and subject.origin == "model":
        raise InvalidCase("the models do not say what is read before a window")
    query_lens, ctx_lens = lens
    if op == "decode_attention_fwd":
        query_lens = (1,) * len(query_lens)
    fields: dict[str, Any] = {
        "op": op,
        "origin": "model" if subject.origin == "plugin" else subject.origin,
        "release": subject.release,
        "platform": platform,
        "num_heads": 4,
        "num_queries_per_kv": 2,
        "head_size": 64,
        "block_size": 16,
        "sm_scale": 0.125,
        "query_lens": query_lens,
        "ctx_lens": ctx_lens,
        "stage": "sound",
        "data": "normal",
        "empty": "nan",
        "output": "nan",
        "oracle": "float64",
        "seed": seed,
        **variant,
    }
    if fields.get("sinks") and fields.get("alibi") and op != "unified_attention":
        raise InvalidCase("the op refuses attention sinks beside ALiBi")
    if subject.origin == "plugin" and fields["stage"] == "int64":
        fields["stage"] = "sound"
    fields["fill"] = None if op == "reshape_and_cache_flash" else "all_rows"
    splits = ("decode_attention_fwd",) if subject.release == "0.11.2" else CACHE_ONLY_OPS
    if op not in splits:
        fields["num_splits"] = None
    plain = Case(**fields)
    return plain.replace(num_blocks=plain.total_blocks + 3)
