"""Hostile cases: small, sound by every contract, and unkind to whatever a kernel takes for granted.

Shuffled and spare blocks; lengths around the edges of blocks, tiles and partitions; sequences of one
token, without a context, decodes alone; query heads in groups whose number is not that of the KV heads;
head sizes and block sizes that are no powers of two; windows, ALiBi, a sink of each head's own; soft
caps; FP8 with two scales that are not 1; large scores; the scale left to the op; int64 tables where they
are allowed; blocks that a sliding window has freed, empty or in use by another sequence; blocks whose
offset is beyond 2^31 elements; tensors that are slices of larger ones; a batch padded for a CUDA graph.
Poison stands only in slots that nobody wrote.
"""

import random
from collections.abc import Iterator
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS
from attnlab.checker.subject import Subject

_LENGTHS = ("query_lens", "ctx_lens")
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
    # No sequence ends within a block, where a read of its tail would hide that of a freed block.
    {
        "sliding_window": 20,
        "freed": "empty",
        "query_lens": (1, 34, 2),
        "ctx_lens": (79, 62, 126),
    },
    {
        "sliding_window": 12,
        "freed": "recycled",
        "query_lens": (1, 34, 2),
        "ctx_lens": (63, 94, 126),
    },
    # Rows that see nothing of their first tile, and then only scores far below 0.
    {
        "sliding_window": 3,
        "sm_scale": 60.0,
        "num_queries_per_kv": 1,
        "query_lens": (40, 9, 1),
        "ctx_lens": (21, 60, 47),
    },
    {"kv_layout": "fused"},
    {"pad_batch": 5, "max_blocks_per_seq": 40},
    {
        "num_heads": 40,
        "num_queries_per_kv": 20,
        "head_size": 32,
        "query_lens": (1, 3),
        "ctx_lens": (40, 5),
    },
    {"block_size": 48, "query_lens": (1, 3), "ctx_lens": (120, 95)},
    {"kv_layout": "HND", "num_heads": 6, "num_queries_per_kv": 3},
    _FAR,
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
    {"dtype": "bfloat16"},
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
    _check_known(subject, op, variant)
    query_lens, ctx_lens = (variant.get(n, one) for n, one in zip(_LENGTHS, lens, strict=True))
    if not OPS[op].prefill:
        query_lens = (1,) * len(query_lens)
    fields: dict[str, Any] = {
        "op": op,
        "backend": "model" if subject.backend == "plugin" else subject.backend,
        "release": subject.release,
        "platform": platform,
        "num_heads": 4,
        "num_queries_per_kv": 2,
        "head_size": 64,
        "block_size": 16,
        "sm_scale": 0.125,
        "stage": "sound",
        "fill": "all_rows",
        "kv_layout": "contiguous",
        "distribution": "normal",
        "empty_slots": "nan",
        "output_init": "nan",
        "reference_dtype": "float64",
        "seed": seed,
        **variant,
        "query_lens": query_lens,
        "ctx_lens": ctx_lens,
    }
    if subject.backend == "plugin" and fields["stage"] == "int64":
        fields["stage"] = "sound"
    if OPS[op].writes_cache:
        fields["fill"] = None  # the context alone; the new tokens are what it writes
    if subject.release not in OPS[op].split_releases:
        fields["num_splits"] = None
    plain = Case(**fields)
    return plain.replace(num_blocks=plain.total_blocks + 3)


def _check_known(subject: Subject, op: str, variant: dict[str, Any]) -> None:
    """Raise InvalidCase for a variant that the subject or the op does not know."""
    if variant.get("kv_cache_dtype", "auto") not in subject.kv_cache_dtypes:
        raise InvalidCase("the subject does not know the variant's kv_cache_dtype")
    if variant.get("dtype", "float16") not in subject.dtypes:
        raise InvalidCase("the subject's device does not compute the variant's dtype")
    if "first_block" in variant and not subject.large_caches:
        raise InvalidCase("the subject may copy the cache")
    if "freed" in variant and subject.backend == "model":
        raise InvalidCase("the models do not say what is read before a window")
    if subject.backend == "model" and variant.get("sinks") and variant.get("alibi"):
        raise InvalidCase("the models do what vLLM's op does there, which is wrong")
    if variant.get("sinks") and variant.get("alibi") and not OPS[op].sinks_with_alibi:
        raise InvalidCase("the op refuses attention sinks beside ALiBi")
    if OPS[op].cache_layout is None and variant.get("kv_layout", "contiguous") != "contiguous":
        raise InvalidCase("strides must be contiguous: the op gets two outputs")
