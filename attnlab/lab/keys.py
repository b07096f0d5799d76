"""Keys of a Lab's products: the values of the fields that a product depends on.

Two Cases with the same key have the same product. A key is a plain tuple; nothing of it is validated.
"""

from typing import Any

from attnlab.case.case import Case
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.case.op_arguments import NONE

Key = tuple[Any, ...]

_LENGTH_FIELDS = (
    "query_lens",
    "ctx_lens",
    "seed",
    "num_seqs",
    "draw_max_query_len",
    "draw_max_ctx_len",
    "force_decode",
)
_BATCH_FIELDS = (
    *_LENGTH_FIELDS,
    "num_heads",
    "num_queries_per_kv",
    "head_size",
    "dtype",
    "distribution",
    "alibi",
    "sinks",
)
_STORED_FIELDS = (*_BATCH_FIELDS, "kv_cache_dtype", "k_scale", "v_scale", "cache_write")
_TABLE_FIELDS = (
    "block_size",
    "num_blocks",
    "max_blocks_per_seq",
    "block_table",
    "x",
    "interleave_v",
    "freed",
    "first_block",
)


def _values(case: Case, names: tuple[str, ...]) -> Key:
    """Return the values of some fields, in the order of their names."""
    return tuple(getattr(case, name) for name in names)


def _written_format(case: Case) -> str | None:
    """Return the FP8 format that the cache is written in, as far as the key needs it."""
    if not case.is_fp8 or case.kv_cache_dtype == "fp8_e5m2":
        return case.cache_format
    return case.cache_format or case.machine.fp8_e4m3


def batch_key(case: Case) -> Key:
    """Return the key of the Case's batch."""
    return _values(case, _BATCH_FIELDS)


def cache_key(case: Case) -> Key:
    """Return the key of the Case's cache, provenance included."""
    window = (case.op, case.sliding_window) if case.freed != "kept" else ()  # it frees blocks
    names = (*_STORED_FIELDS, *_TABLE_FIELDS, "empty_slots")
    return (*_values(case, names), case.staging.fill, _written_format(case), *window)


def reference_key(case: Case) -> Key:
    """Return the key of the Case's reference.

    A window that no sequence exceeds hides nothing. Only an FP8 cache changes the tokens that are stored
    in it; which ones these are depends on the op.
    """
    window = case.sliding_window if case.sliding_window < max(case.lengths.seq_lens) else 0
    names = ("sm_scale", "softcap", "reference_dtype", "op_argument")
    values = _values(case, (*_BATCH_FIELDS, *names, "mask", *MASK_DATA))
    if case.mask != CAUSAL:  # a window to the right depends on the op
        values, window = (*values, case.op), case.sliding_window
    if case.op_argument != NONE:
        values = (*values, case.op, case.platform)
    if not case.is_fp8:
        return (*values, window)
    stored = _values(case, ("k_scale", "v_scale", "cache_write"))
    cached = case.lengths.cached_lens(case.spec.fill_read)
    return (*values, window, *stored, _written_format(case), cached)


def output_key(case: Case) -> Key:
    """Return the key of the output buffer's first contents."""
    if case.spec.writes_cache:
        names = (*_STORED_FIELDS, *_TABLE_FIELDS, "output_init", "op")
        return (*_values(case, names), case.platform if case.is_fp8 else None)
    return _values(case, (*_BATCH_FIELDS, "output_init"))


def prefill_key(case: Case) -> Key:
    """Return the key of the prefill kernel's rows: stage, fill and buffers do not reach them."""
    options = ("op", "sliding_window", "sm_scale", "max_query_len", "mask", *MASK_DATA)
    names = (*_STORED_FIELDS, *_TABLE_FIELDS, *options)
    by_heads = (
        case.sm_scale is None and case.release == "0.11.2"
    )  # the scale depends on the release
    return (
        *_values(case, names),
        case.platform if case.is_fp8 else None,
        case.release if by_heads else None,
        _written_format(case),
    )
