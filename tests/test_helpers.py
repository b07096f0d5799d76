"""The helpers of the other tests see what they are meant to see."""

import pytest
import torch
from helpers.cases import decode_rows, hostile, same_bits

from attnlab.tensors.batch import make_batch
from attnlab.tensors.cache import NOBODY, make_cache


def test_same_bits_tells_nan_from_nan_and_zero_from_minus_zero():
    """Bits are compared, not numbers: NaN equals itself, -0.0 is not 0.0, a dtype is not another."""
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_hostile_is_hostile():
    """The fixture has what it promises: every edge of a block and a partition, spare blocks, NaN."""
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
    """Changes reach the Case, and its spare blocks follow."""
    case = hostile(**changes)
    assert all(getattr(case, name) == value for name, value in changes.items())
    assert case.total_blocks == 12 * case.blocks_per_seq + 5
