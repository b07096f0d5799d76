"""Few runs: slots that share a lane, and random signed codes for large caches."""

import pytest
import torch
from helpers import faulty_attention

import attnlab
from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.weights.codes import own_slots, shared_lanes, slot_owners
from attnlab.weights.key_rules import OtherSlots
from attnlab.weights.measurement import MOST_RUNS, sketch_runs
from attnlab.weights.setup import make_setup

FIELDS = {
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
    return Case(**{**FIELDS, **changes}, backend=f"{faulty_attention.__file__}:{name}")


def test_slots_of_a_sequence_have_lanes_of_their_own() -> None:
    case = Case(**FIELDS, num_blocks=30)
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
