"""Hostile cases: small Cases that keep every contract and exercise what kernels often get wrong.

All cases have shuffled blocks, three spare blocks, ragged lengths at the edges of blocks, and NaN in every
slot that was never written. :mod:`attnlab.checker.variants` lists what the single cases add.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin
from attnlab.case.masks import CAUSAL
from attnlab.case.ops import OPS
from attnlab.checker.argument_variants import ARGUMENT_VARIANTS
from attnlab.checker.variants import LENGTHS, VARIANTS
from attnlab.kernels.backend import Backend

DEFAULTS: dict[str, Any] = {
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
}
_SPARE_BLOCKS = 3
_EDGES = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 127, 255, 256, 257, 300)


def hostile_cases(
    backend: Backend, op: str, platform: str, count: int, seed: int
) -> Iterator[Case]:
    """Yield ``count`` Cases of an op, the most informative first.

    The first round pairs each variant with fixed lengths, later rounds with random ones. Variants that
    the op or the backend does not support are skipped. The Cases of ARGUMENT_VARIANTS come after the first
    round and are not counted.
    """
    rng = random.Random(seed)
    made = 0
    for i in range(20 * count):
        if made == count:
            return
        lengths = LENGTHS[i % len(LENGTHS)] if i < len(VARIANTS) else _random_lengths(rng)
        fields = VARIANTS[i % len(VARIANTS)].fields
        try:
            yield _make_case(backend, op, platform, lengths, fields, rng.randrange(1 << 30))
        except InvalidCase:
            continue
        made += 1
        if made == len(VARIANTS):
            yield from _argument_cases(backend, op, platform, rng)


def _argument_cases(backend: Backend, op: str, platform: str, rng: random.Random) -> Iterator[Case]:
    """Yield the Cases of an op with a mask; of vLLM's under the interpreter also those with op arguments."""
    is_vllm = backend.name == "vllm" and backend.device == "cpu"
    for variant in ARGUMENT_VARIANTS:
        if not is_vllm and "mask" not in variant.fields:
            continue
        lengths = variant.fields["query_lens"], variant.fields["ctx_lens"]
        seed = rng.randrange(1 << 30)
        with contextlib.suppress(InvalidCase):
            yield _make_case(backend, op, platform, lengths, variant.fields, seed)


def _random_lengths(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return query and context lengths of one to four sequences."""
    count = rng.randint(1, 4)
    query_lens = tuple(rng.choice((1, 1, 2, 8, 9, 16, 33)) for _ in range(count))
    return query_lens, tuple(rng.choice(_EDGES) for _ in range(count))


def _make_case(
    backend: Backend,
    op: str,
    platform: str,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    variant: dict[str, Any],
    seed: int,
) -> Case:
    """Return the Case of lengths and a variant's fields; raise InvalidCase if they do not fit."""
    _check_supported(backend, op, variant)
    query_lens, ctx_lens = lengths
    fields: dict[str, Any] = {
        "op": op,
        "backend": backend.name,
        "release": backend.release,
        "platform": platform,
        "seed": seed,
        "query_lens": query_lens,
        "ctx_lens": ctx_lens,
        **DEFAULTS,
        **variant,
    }
    if not OPS[op].prefill:
        fields["query_lens"] = (1,) * len(fields["query_lens"])
    if is_plugin(backend.name) and fields["stage"] == "int64":
        fields["stage"] = "sound"
    if OPS[op].writes_cache:
        fields["fill"] = None  # only the context is in the cache; the op writes the new tokens
    if backend.release not in OPS[op].split_releases:
        fields["num_splits"] = None
    case = Case(**fields)
    return case.replace(num_blocks=case.total_blocks + _SPARE_BLOCKS)


def _check_supported(backend: Backend, op: str, variant: dict[str, Any]) -> None:
    """Raise InvalidCase for a variant that the backend or the op does not support."""
    has_sinks_and_alibi = variant.get("sinks") and variant.get("alibi")
    if variant.get("mask", CAUSAL) not in backend.masks:
        raise InvalidCase("the backend does not support the variant's mask")
    if variant.get("kv_cache_dtype", "auto") not in backend.kv_cache_dtypes:
        raise InvalidCase("the backend does not support the variant's kv_cache_dtype")
    if variant.get("dtype", "float16") not in backend.dtypes:
        raise InvalidCase("the backend's device does not compute the variant's dtype exactly")
    if "first_block" in variant and not backend.large_caches:
        raise InvalidCase("the backend may copy the cache, which is too large here")
    if "freed" in variant and backend.name == "model":
        raise InvalidCase("the models do not define reads before a window")
    if has_sinks_and_alibi and backend.name == "model":
        raise InvalidCase("the models repeat an error of vLLM's op here")
    if has_sinks_and_alibi and not OPS[op].sinks_with_alibi:
        raise InvalidCase("the op rejects attention sinks together with ALiBi")
    if OPS[op].cache_layout is None and variant.get("kv_layout", "contiguous") != "contiguous":
        raise InvalidCase("kv_layout must be contiguous: the op has two outputs")
