"""How often an X-ray runs the kernel."""

from attnlab.case.case import Case
from attnlab.weights.measurement import MOST_RUNS
from attnlab.weights.other_case import other_case
from attnlab.weights.sketch import NUMBERS

_FURTHER = (
    5  # with random values, and where a row may be unwritten or a value come from another head
)


def most_runs(case: Case) -> int:
    """Return the number of runs that an X-ray of a wrong kernel makes, with a second Case.

    A right kernel needs those for shared lanes only.
    """
    other = other_case(case)
    slots = case.total_blocks * case.block_size
    resolving = _runs(case, slots)
    if resolving > MOST_RUNS:
        resolving = _runs(case, NUMBERS)
    of_other = 0 if other is None else _runs(other, _lanes(other))
    return _runs(case, _lanes(case)) + resolving + of_other + _FURTHER


def _runs(case: Case, numbers: int) -> int:
    return -(-numbers // case.head_size)


def _lanes(case: Case) -> int:
    """Return the number of lanes that sequences share: positions in the cache, and new tokens."""
    longest = max(case.lengths.seq_lens, default=0)
    cached = -(-longest // case.block_size) * case.block_size
    new = 0 if case.spec.new_tokens_from == "cache" else max(case.lengths.query_lens, default=0)
    return cached + new
