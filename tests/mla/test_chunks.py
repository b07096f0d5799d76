"""The chunks of a context: every token once, and within the limits of each plan."""

import pytest
from helpers.drawn_cases import draw_cases

from attnlab.mla.faults import chunks_of
from attnlab.mla.mla_case import CHUNKINGS, PREFILL, MlaCase

DRAWN = list(draw_cases(PREFILL, 30))
CASES = [case.replace(chunking=one, empty_lse="-inf") for one in CHUNKINGS for case in DRAWN]
PACKED = [[(0, 0, 32)], [(0, 32, 40)], [(2, 0, 5), (3, 0, 20)]]  # 5 + 20 fit into one chunk
ALIGNED = [
    [(0, 0, 32), (1, 0, 0), (2, 0, 5), (3, 0, 20)],
    [(0, 32, 40), (1, 0, 0), (2, 5, 5), (3, 20, 20)],
]


def spans_of(case: MlaCase) -> list[list[tuple[int, int, int]]]:
    return [[(one.seq, one.start, one.end) for one in spans] for spans in chunks_of(case)]


def test_every_token_of_a_context_is_in_one_chunk():
    for case in CASES:
        found = [(seq, at) for spans in spans_of(case) for seq, a, b in spans for at in range(a, b)]
        assert sorted(found) == [(s, at) for s, n in enumerate(case.ctx_lens) for at in range(n)]


def test_a_packed_chunk_has_neighbours_and_fits():
    for case in CASES[:30]:
        case = case.replace(chunking="packed")
        for spans in spans_of(case):
            assert sum(end - start for _, start, end in spans) <= case.chunk_rows
            seqs = [seq for seq, _, _ in spans]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
            assert all(end > start and start % case.block_size == 0 for _, start, end in spans)


@pytest.mark.parametrize(("chunking", "expected"), [("packed", PACKED), ("aligned", ALIGNED)])
def test_an_example(chunking, expected):
    case = MlaCase(query_lens=(1,) * 4, ctx_lens=(40, 0, 5, 20), chunking=chunking)
    assert spans_of(case) == expected
