"""Drawn lengths equal those of vLLM's test."""

import random

import pytest

from attnlab.case.case import Case
from attnlab.case.lengths import Lengths, draw_lengths

QUERY_LENS = (880, 410, 792, 927, 446, 57, 281, 1004, 539, 1)
CTX_LENS = (430, 956, 818, 865, 326, 1007, 504, 382, 613, 929)


def test_seed_0_is_the_investigated_batch():
    """The failure was reported with 5337 tokens, the last one a decode."""
    lengths = Case().lengths
    assert lengths.query_lens == QUERY_LENS
    assert lengths.ctx_lens == CTX_LENS
    assert lengths.num_tokens == 5337
    assert lengths.num_tokens * 64 * 128 == 43_720_704
    assert lengths.seq_lens[0] == 1310
    assert lengths.seq_lens[-1] == 930


def test_the_alibi_test_forces_no_decode():
    """Without ``force_decode`` the tenth length stays, and the contexts are unchanged."""
    lengths = Case(force_decode=False).lengths
    assert lengths.query_lens[:9] == QUERY_LENS[:9]
    assert lengths.query_lens[9] > 1
    assert lengths.ctx_lens == CTX_LENS


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_draw_is_pythons_own(seed):
    """Ten query lengths, then ten context lengths, from one generator with vLLM's limits."""
    rng = random.Random(seed)
    expected = [rng.randint(16, 1024) for _ in range(20)]
    expected[9] = 1
    lengths = draw_lengths(seed, 10, 1024, 1024, True)
    assert [*lengths.query_lens, *lengths.ctx_lens] == expected


def test_the_draw_leaves_pythons_generator_alone():
    """The global random generator is not used, so other draws of a notebook do not change."""
    random.seed(5)
    before = random.getstate()
    draw_lengths(99, 3, 50, 60, True)
    assert random.getstate() == before


def test_short_bounds():
    """If a limit is below 16, it is both ends of the range."""
    lengths = draw_lengths(0, 4, 3, 2, False)
    assert lengths == Lengths(query_lens=(3, 3, 3, 3), ctx_lens=(2, 2, 2, 2))
