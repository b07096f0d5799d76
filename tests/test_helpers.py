"""Tests of the helpers that other tests use."""

from collections.abc import Callable

import pytest
import torch
from helpers.cases import decode_rows, hostile, same_bits
from helpers.sources import of_release, release, sdist

from attnlab.kernels.vllm.source import fetch, fetch_sdist
from attnlab.tensors.cache import NOBODY, make_batch, make_cache


def test_same_bits_compares_bits_and_dtypes():
    """NaN equals itself, -0.0 differs from 0.0, and tensors of different dtypes differ."""
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_hostile_is_hostile():
    """The case has lengths at every edge of a block and a partition, spare blocks, and NaN."""
    case = hostile()
    seq_lens = case.lengths.seq_lens
    assert {n % case.block_size for n in seq_lens} >= {0, 1, case.block_size - 1}
    assert {256, 257} <= set(seq_lens)
    assert 0 in case.ctx_lens
    assert any(q > c > 0 for q, c in zip(case.query_lens, case.ctx_lens, strict=True))
    assert case.num_queries_per_kv != case.num_kv_heads
    cache = make_cache(case, make_batch(case))
    assert case.total_blocks > cache.provenance.block_table.numel()
    empty = cache.provenance.seq == NOBODY
    assert cache.key.permute(0, 3, 1, 2, 4)[empty].isnan().all()
    assert (cache.provenance.block_table.diff() != 1).any()
    assert decode_rows(case).sum() == 6


@pytest.mark.parametrize("changes", [{"block_size": 5}, {"head_size": 24, "x": 8}])
def test_hostile_takes_changes(changes):
    case = hostile(**changes)
    assert all(getattr(case, name) == value for name, value in changes.items())
    assert case.total_blocks == 12 * case.blocks_per_seq + 5


@pytest.mark.parametrize("ask", [release, of_release, sdist, fetch, fetch_sdist])
def test_without_its_marker_a_test_cannot_download(ask: Callable[[str], object]):
    """Releases that were downloaded before are hidden, too: the test would fail on another machine."""
    with pytest.raises(pytest.fail.Exception, match="releases"):
        ask("0.33.0")


@pytest.mark.releases
def test_with_its_marker_a_test_can_download():
    assert release("0.33.0") is not None
