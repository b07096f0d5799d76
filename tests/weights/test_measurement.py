"""The weights of a large X-ray are computed on the device of its subject, and stay there."""

import dataclasses

import pytest
import torch
from helpers import faulty_attention
from helpers.other_device import DEVICE, OtherTensor, other_device

import attnlab
from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.weights import conclude, fit, setup
from attnlab.weights.codes import own_slots, shared_lanes, slot_owners
from attnlab.weights.conclude import xray_of
from attnlab.weights.fit import compare, explained
from attnlab.weights.measurement import MOST_RUNS, sketch_runs
from attnlab.weights.plan import right_plan
from attnlab.weights.rules import OtherSlots
from attnlab.weights.setup import make_setup

FIELDS = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "query_lens": (5, 9),
    "ctx_lens": (40, 67),
    "distribution": "normal",
    "platform": "sm_90",
}
CASES = {
    "lanes": Case(**FIELDS, empty_slots="nan"),
    "prefill": Case(**FIELDS, op="context_attention_fwd", alibi=True, num_blocks=300),
    "unified": Case(**FIELDS, op="unified_attention", sinks=True, softcap=3.0, sliding_window=10),
    "fp8": Case(**FIELDS, kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.37),
    "weak scores": Case(**{**FIELDS, "distribution": "uniform_1e-3"}),
    "mask": Case(**FIELDS, op="unified_attention", mask="bidirectional", fill="all_rows"),
}


def examined_on(case, where):
    lab = attnlab.Lab()
    subject = conclude._of_case(case, lab, lab.backend(case))
    return xray_of(dataclasses.replace(subject, device=where))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_another_device_gives_the_same_weights_and_keeps_them(case):
    expected = examined_on(case, "cpu")
    assert expected.status == "right"
    with other_device() as counted:
        found = examined_on(case, DEVICE)
        left = counted.left_bytes
        assert isinstance(found.examined.measurement.weights, OtherTensor)
        assert found.to_dict().keys() == expected.to_dict().keys()
        weights, right = found.weights, found.expected
    assert (found.status, found.sentences) == (expected.status, expected.sentences)
    assert left < weights.numel() * 4  # half of the weights
    torch.testing.assert_close(weights, expected.weights)
    torch.testing.assert_close(right, expected.expected)
    assert found.law.score == pytest.approx(expected.law.score)
    torch.testing.assert_close(found.magnitudes.key, expected.magnitudes.key)


@pytest.mark.parametrize(
    ("fault", "num_blocks"), [("context_one_too_many", None), ("next_sequence", 140)]
)
def test_a_wrong_kernel_is_described_on_the_cpu(fault, num_blocks):
    kernel = f"{faulty_attention.__file__}:{fault}"
    case = Case(**FIELDS, op="context_attention_fwd", backend=kernel, num_blocks=num_blocks)
    expected = examined_on(case, "cpu")
    with other_device():
        found = examined_on(case, DEVICE)
    assert (found.status, found.sentences) == (expected.status, expected.sentences)
    assert found.status == "described"


def test_the_other_device_refuses_tensors_of_the_cpu():
    with other_device():
        there, here = torch.zeros(3, device=DEVICE), torch.zeros(3)
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises(RuntimeError, match="indexed"):
            here[torch.nonzero(there == 0)]


@pytest.mark.parametrize(
    ("weights", "requested", "free", "expected"),
    [
        (setup.MANY, None, 1 << 40, "cuda"),
        (setup.MANY - 1, None, 1 << 40, "cpu"),
        (setup.MANY, "cpu", 1 << 40, "cpu"),
        (setup.MANY, None, 1 << 20, "cpu"),
    ],
)
def test_a_gpu_computes_many_weights_that_fit(monkeypatch, weights, requested, free, expected):
    values = {"is_available": True, "mem_get_info": (free, free)}
    values |= {"memory_reserved": 0, "memory_allocated": 0}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert setup.device_for(weights, requested).type == expected


# Few runs: slots that share a lane, and random signed codes for large caches.


OF_LANES = {
    "op": "context_attention_fwd",
    "num_heads": 2,
    "head_size": 32,
    "block_size": 16,
    "query_lens": (5, 9),
    "ctx_lens": (40, 67),
    "distribution": "normal",
    "platform": "sm_90",
}


def faulty(name: str, **changes: object) -> Case:
    return Case(**{**OF_LANES, **changes}, backend=f"{faulty_attention.__file__}:{name}")


def test_slots_of_a_sequence_have_lanes_of_their_own() -> None:
    case = Case(**OF_LANES, num_blocks=30)
    call = attnlab.Lab().call(case)
    lanes = shared_lanes(call, slot_owners(call))
    assert lanes.count < len(lanes.of) / 3
    rows, heads = torch.arange(14), torch.arange(2)
    setup = make_setup(call, Target.of(case), ("context_attention_fwd",), rows, heads)
    own = own_slots(setup, lanes)
    for row in (0, 13):
        held = (setup.entry_position[row] < setup.seq_len[row]) & (setup.entry_slot[row] >= 0)
        slots = setup.entry_slot[row][held & (~setup.is_new | (setup.entry_slot[row] >= 0))]
        assert len(lanes.of[slots].unique()) == len(slots.unique())
        assert set(own[row][lanes.of[slots]].tolist()) == set(slots.tolist())


@pytest.mark.parametrize("blocks", [30, 1000])
def test_the_runs_of_a_right_kernel_follow_from_its_longest_sequence(blocks: int) -> None:
    found = attnlab.xray(faulty("sound", num_blocks=blocks))
    assert (found.status, found.measurement.runs) == ("right", 4)  # 80 + 9 lanes, and random codes


def test_weights_of_the_rows_own_slots_need_no_further_runs() -> None:
    found = attnlab.xray(faulty("halved", num_blocks=200), confirm=False)
    assert (found.status, found.measurement.runs) == ("described", 4), found.sentences


def test_random_signed_codes_find_weights_in_a_large_cache() -> None:
    case = faulty("next_sequence", num_blocks=300)
    found, few = attnlab.xray(case), attnlab.xray(faulty("next_sequence"), confirm=False)
    slots = found.setup.num_slots
    assert slots / case.head_size > MOST_RUNS
    assert found.measurement.runs == 3 + 1 + sketch_runs(found.setup.call) + 1
    assert (found.status, found.confirmed) == ("described", True), found.sentences
    assert isinstance(found.description.rules[0], OtherSlots)
    assert "random signed codes" in found.sentences[-1]
    measured, right = found.weights.sum(-1), few.weights.sum(-1)
    assert 0 < found.measurement.error < 0.01
    assert torch.allclose(measured, right, atol=0.02)


def test_a_foreign_weight_is_not_taken_for_the_rows_own() -> None:
    """Another sequence's slots share lanes with the row's own: the weights are those that were given."""
    found = attnlab.xray(faulty("next_sequence"), confirm=False)
    seqs = found.owners.seq
    for row, seq in enumerate(found.setup.seq.tolist()):
        weights = found.weights[row].sum(0)
        cached = ~found.owners.is_new
        assert float(weights[cached & (seqs == seq)].abs().max()) < 1e-3
        assert float(weights[cached & (seqs == 1 - seq)].max()) > 0.01


# Weights that are computed by groups of heads are those of all heads at once.


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
def grouped(monkeypatch):
    monkeypatch.setattr(fit, "_NUMBERS", 5000)
    call = attnlab.Lab().call(CASE)
    rows, heads = torch.arange(14), torch.arange(6)
    return make_setup(call, Target.of(CASE), ("context_attention_fwd",), rows, heads)


def test_groups_give_the_same_weights_and_verdicts(grouped):
    assert len(list(fit.head_groups((14, 6, grouped.num_slots), grouped.device))) > 2
    expected = right_plan(grouped).weights()
    assert torch.equal(fit.right_weights(grouped), expected)
    wrong = expected.clone()
    wrong[3, 4] *= 1.5
    right = explained(grouped, wrong, expected)
    assert torch.equal(right, compare(grouped, wrong, expected).explained)
    assert (~right).nonzero().tolist() == [[3, 4]]


def test_some_rows_have_the_edges_of_every_sequence(grouped):
    assert fit.some_rows(grouped).tolist() == list(range(14))
    assert {0, 4, 5, 13} <= set(fit.some_rows(grouped, 2000).tolist())


def test_a_large_machine_measures_more_weights(monkeypatch):
    from attnlab.weights import measurement

    monkeypatch.setattr(measurement, "available_bytes", lambda: 100 << 30)
    measurement.check_numbers(880, 64, 1312)
    monkeypatch.setattr(measurement, "available_bytes", lambda: 1 << 30)
    with pytest.raises(attnlab.AttnLabError, match="rows × heads × slots"):
        measurement.check_numbers(880, 64, 1312)
