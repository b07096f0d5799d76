"""Step: the batch of one step of the engine, as the scheduler made it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlab.serving.requests import Integers, Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The batch of a step.

    - ``number``: counted from 0. ``requests``: by row of the batch.
    - ``query_lens``: [num_reqs], the new tokens of each request, by the scheduler.
    - ``seq_lens``: [num_reqs], the position of each request's last new token, plus one.
    - ``tokens``: [num_tokens], the number of each new token in the TokenTable.
    """

    number: int
    requests: Sequence[Request]
    query_lens: Integers
    seq_lens: Integers
    tokens: Integers

    @property
    def starts(self) -> Integers:
        """Return the first new token of each request in the batch, [num_reqs + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.query_lens)])

    def request_of_row(self, row: int) -> tuple[int, Request]:
        """Return the row in the batch and the request of one new token."""
        seq = int(np.searchsorted(self.starts, row, side="right")) - 1
        return seq, self.requests[seq]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadArguments:
    """What an op, or the metadata of a layer, says about the cache reads of a batch.

    - ``block_table``: [n, max_blocks]; ``seq_lens``: [n]; ``query_lens``: [n] or None if unknown.
    - ``first``: the row of the step's batch that is row 0 here.
    - ``block_size``: tokens per block; ``sliding_window``: keys that a row sees, 0 for all.
    """

    block_table: Integers
    seq_lens: Integers
    query_lens: Integers | None
    block_size: int
    sliding_window: int = 0
    first: int = 0

    def is_same(self, other: "ReadArguments") -> bool:
        """Answer whether another op reads the same slots."""
        numbers = (self.block_size, self.sliding_window, self.first)
        return numbers == (other.block_size, other.sliding_window, other.first) and all(
            one is two or (one is not None and two is not None and np.array_equal(one, two))
            for one, two in (
                (self.block_table, other.block_table),
                (self.seq_lens, other.seq_lens),
                (self.query_lens, other.query_lens),
            )
        )
