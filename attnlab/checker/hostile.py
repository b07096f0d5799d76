"""Hostile cases: small Cases that keep every contract and exercise what kernels often get wrong.

All cases have shuffled blocks, three spare blocks, ragged lengths at the edges of blocks, and NaN in every
slot that was never written. The first ones have few features each (:mod:`attnlab.checker.variants`); the rest
combine them (:mod:`attnlab.checker.design`).
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin
from attnlab.case.masks import CAUSAL
from attnlab.case.ops import MERGE, OPS, UNIFIED
from attnlab.checker.argument_variants import ARGUMENT_VARIANTS
from attnlab.checker.design import Design, Row, find_design
from attnlab.checker.design_rows import design_rows
from attnlab.checker.knobs import values_of
from attnlab.checker.lengths import edges, launches, lengths_knob
from attnlab.checker.variants import LENGTHS, VARIANTS
from attnlab.kernels.backend import Backend
from attnlab.kernels.vllm.backend import VllmBackend
from attnlab.kernels.vllm.native_limits import check_fp8_format

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
_LONGEST_SPLIT = 8  # MAX_3D_QUERY_LEN of unified_attention (0.33.0)
_SPARE_BLOCKS = 3
_LENS = ("query_lens", "ctx_lens")
_EVERYWHERE = {"mask", "distribution"}  # fields of variants that run on every backend
_MOST_ROWS = 3  # of a sequence, for merge_attn_states
_SPLITS = (None, 0, 4)  # of the variants in turn: as vLLM splits, not at all, in four parts


def hostile_cases(
    backend: Backend, op: str, platform: str, count: int | None, seed: int
) -> Iterator[Case]:
    """Yield ``count`` Cases of an op, the most informative first; None for all.

    First each variant with fixed lengths, then the Cases of ARGUMENT_VARIANTS, which are not counted, then
    the rows of the covering design. Variants that the op or the backend does not support are skipped. The
    Cases of a smaller ``count`` are the first of those of a larger one.
    """
    if not backend.has_op(op):
        return
    rng = random.Random(seed)
    first = [*islice(_variant_cases(backend, op, platform, rng), count)]
    yield from first
    if len(first) == count:
        return
    yield from _argument_cases(backend, op, platform, rng)
    left = None if count is None else count - len(first)
    yield from islice(covering_cases(backend, op, platform, seed), left)


def _variant_cases(backend: Backend, op: str, platform: str, rng: random.Random) -> Iterator[Case]:
    """Yield a Case of each variant that the op and the backend support."""
    for i, variant in enumerate(VARIANTS):
        if not variant.is_for(op):
            continue
        lengths, splits = LENGTHS[i % len(LENGTHS)], {"num_splits": _SPLITS[i % len(_SPLITS)]}
        fields = {**_fields(lengths), **(splits if OPS[op].num_splits else {}), **variant.fields}
        with contextlib.suppress(InvalidCase):
            yield _make_case(backend, op, platform, fields, rng.randrange(1 << 30))


def _argument_cases(backend: Backend, op: str, platform: str, rng: random.Random) -> Iterator[Case]:
    """Yield the Cases with a mask, unusual values, or a window and ALiBi; of vLLM also with an argument.

    The others exercise what Triton's interpreter runs alone.
    """
    names = _EVERYWHERE | ({"op_argument"} if backend.name == "vllm" else set())
    is_interpreted = backend.name == "vllm" and backend.device == "cpu"
    for variant in ARGUMENT_VARIANTS:
        fields = set(variant.fields)
        is_everywhere = names & fields or fields >= {"alibi", "sliding_window"}
        if not variant.is_for(op) or not (is_interpreted or is_everywhere):
            continue
        seed = rng.randrange(1 << 30)
        with contextlib.suppress(InvalidCase):
            yield _make_case(backend, op, platform, variant.fields, seed)


def covering_cases(backend: Backend, op: str, platform: str, seed: int) -> Iterator[Case]:
    """Yield the Cases of the covering design, those that cover most first."""
    design = hostile_design(backend, op, platform)
    for i, row in enumerate(covering_rows(backend, op, platform, seed)):
        yield _make_case(backend, op, platform, design.fields(row), seed * 65537 + i)


@lru_cache(maxsize=8)
def covering_rows(backend: Backend, op: str, platform: str, seed: int) -> tuple[Row, ...]:
    """Return the rows of the covering design of an op, those that cover most first."""
    return tuple(design_rows(hostile_design(backend, op, platform), seed))


@lru_cache(maxsize=8)
def hostile_design(backend: Backend, op: str, platform: str) -> Design:
    """Return the design of an op: its knobs, with lengths at the edges of its tiles, and what it refuses."""

    def make(fields: Mapping[str, Any]) -> Case:
        return _make_case(backend, op, platform, fields, 0)

    plain = [make(_fields(LENGTHS[0]))]
    if OPS[op].num_splits:
        plain.append(plain[0].replace(num_splits=_SPLITS[-1]))
    return find_design(values_of(op, lengths_knob(op, edges(backend, plain))), make)


def _fields(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    return {"query_lens": lengths[0], "ctx_lens": lengths[1]}


def _make_case(
    backend: Backend, op: str, platform: str, changes: Mapping[str, Any], seed: int
) -> Case:
    """Return the Case of some changed fields; raise InvalidCase if they do not fit."""
    _check_supported(backend, op, changes)
    fields: dict[str, Any] = {
        "op": op,
        "backend": backend.name,
        "release": backend.release,
        "platform": platform,
        "seed": seed,
        **DEFAULTS,
        **changes,
    }
    if not OPS[op].prefill:
        fields["query_lens"] = (1,) * len(fields["query_lens"])
    if not OPS[op].context:
        fields["query_lens"] = tuple(map(sum, zip(*(fields[n] for n in _LENS), strict=True)))
        fields["ctx_lens"] = (0,) * len(fields["query_lens"])
    if op == MERGE:  # each row is a program of its own, so that a few are enough
        fields["query_lens"] = tuple(min(n, _MOST_ROWS) for n in fields["query_lens"])
    if is_plugin(backend.name) and fields["stage"] == "int64":
        fields["stage"] = "sound"
    if OPS[op].writes_cache:
        fields["fill"] = None  # only the context is in the cache; the op writes the new tokens
    if not backend.has_splits(op):
        fields["num_splits"] = None
    elif fields.get("num_splits") is not None:
        fields["num_splits"] = max(fields["num_splits"], OPS[op].min_splits)
    if op == UNIFIED and fields.get("num_splits"):
        fields |= _short_rows(fields, longest_split(backend))
    case = Case(**fields)
    backend.check_features(case)
    if isinstance(backend, VllmBackend) and backend.device == "cuda":
        check_fp8_format(case)
    return case.replace(num_blocks=case.total_blocks + _SPARE_BLOCKS)


def _short_rows(fields: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return lengths with at most ``most`` new tokens per sequence, so that unified_attention splits them.

    The others become context, so that the sequences keep their lengths.
    """
    lens = [*zip(fields["query_lens"], fields["ctx_lens"], strict=True)]
    return {
        "query_lens": tuple(min(q, most) for q, _ in lens),
        "ctx_lens": tuple(c + max(0, q - most) for q, c in lens),
    }


@lru_cache(maxsize=64)
def longest_split(backend: Backend) -> int:
    """Return the most new tokens of a sequence that unified_attention of a backend splits.

    It is read from the launches of a release: 8 in 0.33.0, 1 in older ones.
    """
    if backend.name != "vllm" or backend.device != "cpu":
        return _LONGEST_SPLIT
    lens: dict[str, Any] = {"query_lens": (_LONGEST_SPLIT,), "ctx_lens": (40,)}
    case = Case(op=UNIFIED, backend="vllm", release=backend.release, **DEFAULTS, **lens)
    return _LONGEST_SPLIT if len(launches(backend, case)) > 1 else 1


def _check_supported(backend: Backend, op: str, changes: Mapping[str, Any]) -> None:
    """Raise InvalidCase for changes that the backend or the op does not support."""
    has_sinks_and_alibi = changes.get("sinks") and changes.get("alibi")
    if changes.get("mask", CAUSAL) not in backend.masks:
        raise InvalidCase("the backend does not support the mask")
    if changes.get("kv_cache_dtype", "auto") not in backend.kv_cache_dtypes:
        raise InvalidCase("the backend does not support the kv_cache_dtype")
    if changes.get("dtype", "float16") not in backend.dtypes:
        raise InvalidCase("the backend's device does not compute the dtype exactly")
    if "first_block" in changes and not backend.large_caches:
        raise InvalidCase("the backend may copy the cache, which is too large here")
    if changes.get("freed", "kept") != "kept" and backend.name == "model":
        raise InvalidCase("the models do not define reads before a window")
    if has_sinks_and_alibi and backend.name == "model":
        raise InvalidCase("the models repeat an error of vLLM's op here")
    # "Sinks arg is not supported with alibi" (context_attention_fwd); vLLM's ops say so themselves
    if has_sinks_and_alibi and not OPS[op].sinks_with_alibi and backend.name != "vllm":
        raise InvalidCase("the op rejects attention sinks together with ALiBi")
    if op == MERGE and changes.get("kv_layout", "contiguous") != "contiguous":
        raise InvalidCase("kv_layout must be contiguous: the op has two outputs")
