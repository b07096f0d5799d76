"""Distributions of values: each has the property that it is named for, and a reference that is finite."""

import pytest
import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DISTRIBUTIONS
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import CHANGES, make_batch

SCALE = 0.125


def case(distribution: str, **changes) -> Case:
    fields = {"query_lens": (3, 1), "ctx_lens": (30, 37), "num_heads": 4, "num_queries_per_kv": 2}
    fields |= {"head_size": 64, "block_size": 16, "op": "unified_attention", "fill": "all_rows"}
    return Case(**{**fields, "sm_scale": SCALE, "distribution": distribution, **changes})


def weights(one: Case) -> list[torch.Tensor]:
    """Return the softmax weights of the last row of each sequence, [num_heads, seq_len] float64."""
    batch, found = make_batch(one), []
    starts, rows = batch.kv_start_loc, batch.token_start_loc
    for seq in range(len(one.lengths.query_lens)):
        key = batch.key[starts[seq] : starts[seq + 1]].double().repeat_interleave(2, 1)
        query = batch.query[rows[seq + 1] - 1].double()
        found.append(torch.einsum("hd,nhd->hn", query, key) * SCALE)
    return found


def test_large_scores_are_beyond_10000():
    scores = torch.cat([one.flatten() for one in weights(case("large_scores"))])
    assert scores.abs().min() > 10000
    assert (scores > 0).any()
    assert (scores < 0).any()


def test_ties_have_equal_scores_and_tagged_values():
    batch = make_batch(case("ties"))
    for scores in weights(case("ties")):
        assert torch.equal(scores, scores[:, :1].expand_as(scores))
    tags = {(seq, head, block): None for seq in (0, 1) for head in (0, 1) for block in (0, 1)}
    for seq, head, block in tags:
        first = batch.kv_start_loc[seq] + 16 * block
        values = batch.value[first : first + 16, head]
        assert torch.equal(values, values[:1].expand_as(values))
        tags[seq, head, block] = tuple(values[0].tolist())
    assert len(set(tags.values())) == len(tags)


def test_a_dominant_key_has_the_weight_of_its_row():
    for scores in weights(case("dominant_key")):
        assert (scores.softmax(1).amax(1) > 1 - 1e-12).all()
        assert (scores.argmax(1)[:2] != scores.argmax(1)[2:]).all()  # it depends on the KV head


def test_sums_are_near_the_limit_of_float16():
    one = case("near_limit")
    expected = Lab().reference(one).abs()
    assert expected.min() > 0.69 * 65504
    assert expected.max() < 65504
    unscaled = make_batch(one).value[: one.lengths.seq_lens[0]].double().sum(0).abs()
    assert (unscaled > 65504).all()  # a sum before the division is not representable


@pytest.mark.parametrize("distribution", CHANGES)
def test_the_models_are_right(distribution):
    assert set(CHANGES) < set(DISTRIBUTIONS)
    lab = Lab()
    for changes in ({}, {"kv_cache_dtype": "fp8", "v_scale": 128.0}, {"dtype": "float32"}):
        assert lab.run(case(distribution, platform="sm_90", **changes)).status == "match"
