"""Another Case for a description: odd scales, other lengths and other numbers, on the same kernels."""

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.contracts.dispatch import decide


def other_case(case: Case) -> Case | None:
    """Return a small Case that runs the same kernels as ``case``; None if none is found.

    It has context lengths at and around multiples of blocks and tiles, and scales that are no powers of two.
    """
    lengths = case.lengths
    decodes, prefills = (any(test(n) for n in lengths.query_lens) for test in (_is_one, _is_more))
    size, window = case.block_size, case.sliding_window
    far = min(max(lengths.seq_lens), 600) + 3
    pairs: list[tuple[int, int]] = []
    if decodes:
        pairs += [(1, 2 * size - 1), (1, 37), (1, 64), (1, far)]
    if prefills or not decodes:
        wide = min(window + 5, 40) if window else 18
        pairs += [(3, size), (wide, 2 * size + 5), (5, 64), (4, 96), (2, 47 + window)]
        pairs += [(21, 0)] if 0 in lengths.ctx_lens else []
    changes = {
        "query_lens": tuple(query for query, _ in pairs),
        "ctx_lens": tuple(ctx for _, ctx in pairs),
        "seed": case.seed + 11,
        "distribution": "normal",
        "stage": "sound",
        **dict.fromkeys(("block_table", "num_blocks", "seq_range")),
        "max_blocks_per_seq": _columns(case, pairs),
        **dict.fromkeys(("max_query_len", "max_seq_len", "fill", *DATA_OF_LENGTHS)),
        "first_block": 0,
        "freed": "kept",
        "cache_write": "scaled",
        "cache_format": None,
    }
    if case.is_fp8:
        changes |= {"k_scale": case.k_scale * 1.3, "v_scale": case.v_scale * 0.7}
    try:
        other = case.replace(**changes)
    except InvalidCase:
        return None
    return other if decide(other).kernels == decide(case).kernels else None


def _columns(case: Case, pairs: list[tuple[int, int]]) -> int | None:
    """Return the number of columns of the block table: at least the Case's, if that gives one."""
    if case.max_blocks_per_seq is None:
        return None
    longest = max(query + ctx for query, ctx in pairs)
    return max(case.max_blocks_per_seq, -(-longest // case.block_size))


def _is_one(length: int) -> bool:
    return length == 1


def _is_more(length: int) -> bool:
    return length > 1
