"""Lengths of the sequences of a batch, drawn as vLLM's test draws them."""

import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts of each sequence: new tokens, tokens already in the cache, and their sum."""

    query_lens: tuple[int, ...]
    ctx_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Return ctx_len + query_len of each sequence."""
        return tuple(c + q for c, q in zip(self.ctx_lens, self.query_lens, strict=True))

    def locate(self, row: int) -> tuple[int, int]:
        """Return (sequence, token of its query) of an output row: the way back from a flat index."""
        starts = [0, *accumulate(self.query_lens)]
        seq = bisect_right(starts, row) - 1
        return seq, row - starts[seq]

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens, which is the number of output rows."""
        return sum(self.query_lens)


@lru_cache(maxsize=256)
def draw_lengths(
    seed: int, num_seqs: int, max_query_len: int, max_ctx_len: int, force_decode: bool
) -> Lengths:
    """Draw lengths as tests/kernels/attention/test_prefix_prefill.py does (vLLM 0.11.2).

    Python's own generator gives ``num_seqs`` query lengths from 16 to ``max_query_len``, then as many
    context lengths from 16 to ``max_ctx_len``. With ``force_decode`` (the plain test, not the ALiBi
    one) the last query length is overwritten by 1 before the context lengths are drawn; the draw
    itself is consumed either way.
    """
    rng = random.Random(seed)
    query_lens = [rng.randint(min(16, max_query_len), max_query_len) for _ in range(num_seqs)]
    if force_decode:
        query_lens[-1] = 1
    ctx_lens = [rng.randint(min(16, max_ctx_len), max_ctx_len) for _ in range(num_seqs)]
    return Lengths(query_lens=tuple(query_lens), ctx_lens=tuple(ctx_lens))
