"""Lengths: token counts of the sequences of a batch."""

import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts of each sequence.

    ``query_lens`` counts the new tokens, ``ctx_lens`` the tokens before them.
    """

    query_lens: tuple[int, ...]
    ctx_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Return ctx_len + query_len of each sequence."""
        return tuple(c + q for c, q in zip(self.ctx_lens, self.query_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens, which is the number of output rows."""
        return sum(self.query_lens)

    @property
    def token_start_loc(self) -> list[int]:
        """Return the first new token of each sequence among all, and their number; length num_seqs + 1."""
        return [0, *accumulate(self.query_lens)]

    @property
    def kv_start_loc(self) -> list[int]:
        """Return the first token of each sequence among all, and their number; length num_seqs + 1."""
        return [0, *accumulate(self.seq_lens)]

    def locate(self, row: int) -> tuple[int, int]:
        """Return (sequence, index of the new token in its query) of an output row."""
        starts = self.token_start_loc
        seq = bisect_right(starts, row) - 1
        return seq, row - starts[seq]

    def cached_lens(self, fill: str) -> tuple[int, ...]:
        """Return how many tokens of each sequence are in the cache under a fill policy.

        - "context_only": ctx_len.
        - "decode_rows": seq_len if query_len is 1, else ctx_len.
        - "all_rows": seq_len.

        The tokens that an op reads from the cache are counted by the same rule: see
        :attr:`attnlab.case.ops.Op.fill_read`.
        """
        return tuple(
            ctx_len + query_len
            if fill == "all_rows" or (fill == "decode_rows" and query_len == 1)
            else ctx_len
            for ctx_len, query_len in zip(self.ctx_lens, self.query_lens, strict=True)
        )


@lru_cache(maxsize=256)
def draw_lengths(
    seed: int, num_seqs: int, max_query_len: int, max_ctx_len: int, force_decode: bool
) -> Lengths:
    """Draw lengths as tests/kernels/attention/test_prefix_prefill.py does (vLLM 0.11.2).

    Python's random generator gives ``num_seqs`` query lengths from 16 to ``max_query_len``, then as many
    context lengths from 16 to ``max_ctx_len``. With ``force_decode`` (all tests but ALiBi's) the last
    query length is then set to 1; this changes no other length.
    """
    rng = random.Random(seed)
    query_lens = [rng.randint(min(16, max_query_len), max_query_len) for _ in range(num_seqs)]
    if force_decode:
        query_lens[-1] = 1
    ctx_lens = [rng.randint(min(16, max_ctx_len), max_ctx_len) for _ in range(num_seqs)]
    return Lengths(query_lens=tuple(query_lens), ctx_lens=tuple(ctx_lens))
