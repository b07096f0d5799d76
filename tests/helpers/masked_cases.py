"""Random small Cases of unified_attention with a mask, and the keys of each row without the library."""

import random

from attnlab.case.case import Case
from attnlab.case.masks import MASKS
from attnlab.case.ops import UNIFIED
from helpers.drawn_fields import EDGES, drawn_fields

# With a window and these, 0.33.0 masks V by the window of a block's first row: its blocks must have one row.
FAULTY_WITH_WINDOW = ("bidirectional", "causal_by_sequence")


def random_case(mask: str, number: int, **changes: object) -> Case:
    """Return the Case of a number, with random lengths, window and mask data."""
    rng = random.Random(f"{mask} {number}")
    count = rng.randint(1, 3)
    query_lens = tuple(rng.choice((1, 1, 2, 5, 9, 17)) for _ in range(count))
    ctx_lens = tuple(rng.choice(EDGES) for _ in range(count))
    window = rng.choice((0, 1, 2, 5, 8, 16, 20))
    if MASKS[mask].needs_window:
        window = window or 6
    if mask == "ranges":  # V is masked by the window even where a range extends beyond it
        window = 0
    group = 16 if window and mask in FAULTY_WITH_WINDOW else rng.choice((1, 2, 4))
    fields = {
        "op": UNIFIED,
        "mask": mask,
        "query_lens": query_lens,
        "ctx_lens": ctx_lens,
        "sliding_window": window,
        "num_heads": group,
        "num_queries_per_kv": group,
        "head_size": rng.choice((16, 32)),
        **drawn_fields(rng, number),
        **_data(mask, rng, query_lens, ctx_lens, window),
        **changes,
    }
    return Case(**fields)


def _data(mask, rng, query_lens, ctx_lens, window):
    """Return random data of a mask; of some Cases none, so that they follow from the lengths."""
    seq_lens = [q + c for q, c in zip(query_lens, ctx_lens, strict=True)]
    if rng.random() < 0.3:
        return {}
    if mask == "causal_by_sequence":
        return {"causal_seqs": tuple(rng.randint(0, 1) for _ in seq_lens)}
    if mask.startswith("ranges"):
        pairs = [[sorted(rng.choices(range(n), k=2)) for _ in range(2)] for n in seq_lens]
        return {"mm_prefix_range": tuple(tuple(a + b) for a, b in pairs)}
    if mask == "prefix_and_window":
        return {"rswa_prefix_lens": tuple(rng.randint(0, n) for n in seq_lens)}
    if mask == "chunks":
        return {"chunk_lookback": rng.randint(0, min(3, window - 1))}
    if mask == "tree":
        return {"tree_parents": tuple(rng.randint(0, i) for i in range(max(query_lens)))}
    return {}


def sees(case: Case, seq: int, row: int, key: int) -> bool:
    """Answer whether a row sees a key, both given by their positions: the rules of vLLM in plain Python."""
    window, mask = case.sliding_window, case.mask
    away = row - key
    causal = mask not in ("bidirectional", "causal_by_sequence")
    if mask == "causal_by_sequence":
        causal = bool((case.causal_seqs or [1, 0] * 4)[seq])
    seen = away >= 0 or not causal
    if mask == "chunks":
        lookback = 1 if case.chunk_lookback is None else case.chunk_lookback
        lookback = min(lookback, window - 1)
        size = window // (lookback + 1)
        return seen and row // size - key // size <= lookback
    if mask == "prefix_and_window":
        lens = case.rswa_prefix_lens or [c // 2 for c in case.ctx_lens]
        return seen and (away < window or key < lens[seq])
    if window:
        seen = seen and away < window and (causal or -away < window)
    if mask.startswith("ranges") and case.mm_prefix_range is not None:
        numbers = case.mm_prefix_range[seq]
        for first, last in zip(numbers[::2], numbers[1::2], strict=True):
            inside = first < last and first <= min(row, key) and max(row, key) <= last
            seen = seen or (inside and (mask == "ranges" or away < window))
    if mask == "tree" and case.tree_parents is not None and key >= case.ctx_lens[seq]:
        token, branch = row - case.ctx_lens[seq], []
        while token not in branch:
            branch.append(token)
            token = case.tree_parents[token]
        seen = seen and key - case.ctx_lens[seq] in branch
    return seen
