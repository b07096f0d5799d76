"""Weights that are computed by groups of heads are those of all heads at once."""

import pytest
import torch

import attnlab
from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.weights import evidence
from attnlab.weights.evidence import compare, explained
from attnlab.weights.plan import right_plan
from attnlab.weights.setup import make_setup

CASE = Case(
    op="context_attention_fwd",
    num_heads=6,
    num_queries_per_kv=2,
    head_size=16,
    query_lens=(5, 9),
    ctx_lens=(40, 67),
    alibi=True,
    distribution="normal",
    platform="sm_90",
)


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.setattr(evidence, "_NUMBERS", 5000)
    call = attnlab.Lab().call(CASE)
    rows, heads = torch.arange(14), torch.arange(6)
    return make_setup(call, Target.of(CASE), ("context_attention_fwd",), rows, heads)


def test_groups_give_the_same_weights_and_verdicts(setup):
    groups = list(evidence.head_groups((14, 6, setup.num_slots), setup.device))
    assert len(groups) > 2
    expected = right_plan(setup).weights()
    assert torch.equal(evidence.right_weights(setup), expected)
    wrong = expected.clone()
    wrong[3, 4] *= 1.5
    right = explained(setup, wrong, expected)
    assert torch.equal(right, compare(setup, wrong, expected).explained)
    assert (~right).nonzero().tolist() == [[3, 4]]


def test_some_rows_have_the_edges_of_every_sequence(setup):
    assert evidence.some_rows(setup).tolist() == list(range(14))
    assert {0, 4, 5, 13} <= set(evidence.some_rows(setup, 2000).tolist())


def test_a_large_machine_measures_more_weights(monkeypatch):
    from attnlab.weights import measurement

    monkeypatch.setattr(measurement, "available_bytes", lambda: 100 << 30)
    measurement.check_numbers(880, 64, 1312)
    monkeypatch.setattr(measurement, "available_bytes", lambda: 1 << 30)
    with pytest.raises(attnlab.AttnLabError, match="rows × heads × slots"):
        measurement.check_numbers(880, 64, 1312)
