"""Keys under which a Lab shares what cases have in common: which knobs reach which product.

A key is a Case: the knobs that reach the product as they are, every other one at its default, so that
two Cases that differ only there have the same key.
"""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS

_LENGTH_KNOBS = (
    "query_lens",
    "ctx_lens",
    "seed",
    "num_seqs",
    "draw_max_query_len",
    "draw_max_ctx_len",
    "force_decode",
)
_BATCH_KNOBS = (
    *_LENGTH_KNOBS,
    "num_heads",
    "num_queries_per_kv",
    "head_size",
    "dtype",
    "distribution",
    "alibi",
    "sinks",
)
_STORED_KNOBS = (*_BATCH_KNOBS, "kv_cache_dtype", "k_scale", "v_scale", "cache_write")
_TABLE_KNOBS = (
    "block_size",
    "num_blocks",
    "max_blocks_per_seq",
    "block_table",
    "x",
    "interleave_v",
    "freed",
    "first_block",
)


def _reset(case: Case, keep: tuple[str, ...], **changes: Any) -> Case:
    """Return the Case with every knob at its default that is not in ``keep`` or ``changes``."""
    kept = {name: getattr(case, name) for name in keep}
    x = {"x": 1} if "x" not in keep else {}  # fits every head size
    if "op" in keep and case.backend == "vllm-cpu":  # whose op goes with no other backend
        changes = {"backend": case.backend, "platform": case.platform, **changes}
    return Case.from_dict({**{n: f.default for n, f in FIELDS.items()}, **x, **kept, **changes})


def batch_key(case: Case) -> Case:
    """Return the key of the Case's batch."""
    return _reset(case, _BATCH_KNOBS)


def _stored_format(case: Case) -> dict[str, Any]:
    """Return the platform's FP8 format as a knob, and a platform that stands for all of its kind."""
    if not case.is_fp8 or case.kv_cache_dtype == "fp8_e5m2":
        return {"cache_format": case.cache_format}
    return {"cache_format": case.cache_format or case.machine.fp8_e4m3}


def cache_key(case: Case) -> Case:
    """Return the key of the Case's cache, provenance included."""
    keep: tuple[str, ...] = (*_STORED_KNOBS, *_TABLE_KNOBS, "empty_slots")
    if case.freed != "kept":  # by the window, of an op that has one
        keep += ("op", "sliding_window")
    return _reset(case, keep, fill=case.staging.fill, **_stored_format(case))


def reference_key(case: Case) -> Case:
    """Return the key of the Case's reference."""
    keep = (*_STORED_KNOBS, "op", "sliding_window", "sm_scale", "softcap", "reference_dtype")
    return _reset(case, keep, **_stored_format(case))


def output_key(case: Case) -> Case:
    """Return the key of the output buffer's first contents."""
    if case.spec.writes_cache:
        keep = (*_STORED_KNOBS, *_TABLE_KNOBS, "output_init", "op")
        return _reset(case, keep, platform=case.platform if case.is_fp8 else "cpu")
    return _reset(case, (*_BATCH_KNOBS, "output_init"))


def prefill_key(case: Case) -> Case:
    """Return the key of the prefill kernel's rows: neither stage, fill nor buffers reach them."""
    keep = (*_STORED_KNOBS, *_TABLE_KNOBS, "op", "sliding_window", "sm_scale", "max_query_len")
    by_heads = case.sm_scale is None and case.release == "0.11.2"
    reads = case.platform if case.is_fp8 else "cpu"
    return _reset(
        case,
        keep,
        platform=reads,
        release=case.release if by_heads else "0.33.0",
        **_stored_format(case),
    )
