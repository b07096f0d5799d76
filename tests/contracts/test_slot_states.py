"""The state of each slot to its reader: by contract, for a traced reader, and for a whole cache."""

import dataclasses

import pytest
import torch
from helpers.cases import call_of, hostile

from attnlab.case.ops import RELEASES
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import (
    EMPTY,
    FOREIGN,
    NOT_READ,
    STATES,
    SlotState,
    contract_reads,
    readable_states,
    slot_map,
    slot_states,
)
from attnlab.contracts.violations import find_violations
from attnlab.lab.lab import Lab
from attnlab.tensors.cache import NOBODY, Provenance

WINDOWED = {"op": "unified_attention", "sliding_window": 20, "fill": "all_rows", "atol": 2e-3}


def reads_of(case, call=None, provenance=None):
    """Return what the Case's kernels read by contract, of another call if given."""
    made, cache = call_of(case)
    contracts = decide(case).contracts(Target.of(case), case.op)
    return contract_reads(contracts, call or made, provenance or cache.provenance)


def totals(reads):
    """Return how many positions of each state are read, states that do not occur left out."""
    states = torch.cat([read.states for read in reads])
    counts = {state: int((states == state.code).sum()) for state in STATES}
    return {state: count for state, count in counts.items() if count}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("freed", ["kept", "empty", "recycled"])
def test_the_map_agrees_with_the_violations_after_blocks_are_freed(freed, release):
    """A kernel does not need the slots before the window, so freed blocks are no fault."""
    result = Lab().run(hostile(**WINDOWED, freed=freed, release=release))
    assert result.status == "match"
    assert result.violations == []
    assert set(result.slot_map().counts()) == {SlotState.OWN}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fill": "context_only"},
        {"fill": "context_only", "platform": "sm_90"},
        {**WINDOWED, "fill": "context_only"},
        {**WINDOWED, "fill": "context_only", "freed": "empty"},
        {"op": "context_attention_fwd", "fill": "context_only"},
    ],
)
def test_the_map_counts_what_the_violations_count(changes):
    """Every slot of these cases has one reader, so the numbers are equal."""
    case = hostile(**changes)
    call, cache = call_of(case)
    decision, target = decide(case), Target.of(case)
    call = dataclasses.replace(call, sm_scale=0.125)
    found = find_violations(call, target, decision.kernels, cache.provenance)
    counts = slot_map(call, decision.contracts(target, case.op), cache.provenance).counts()
    for kind, states in (("unwritten_slot", EMPTY), ("foreign_slot", FOREIGN)):
        listed = sum(violation.count for violation in found if violation.kind == kind)
        assert sum(counts.get(state, 0) for state in states) == listed


def test_a_window_that_is_ignored_would_show():
    """The check above can fail: without the window, freed slots are read and listed."""
    case = hostile(**WINDOWED, freed="empty")
    call, _ = call_of(case)
    counts = totals(reads_of(case, dataclasses.replace(call, sliding_window=0)))
    assert counts[SlotState.UNWRITTEN] > 100


def test_states_by_contract():
    """Swap a block with another sequence's, with another of the same sequence, and with a spare one."""
    case = hostile(query_lens=(1, 1), ctx_lens=(63, 63))
    call, cache = call_of(case)
    table = call.block_table.clone()
    spare = sorted(set(range(case.total_blocks)) - set(table.flatten().tolist()))[0]
    table[0, 0], table[0, 1], table[0, 2] = table[1, 0], table[0, 3].clone(), spare
    reads = reads_of(case, dataclasses.replace(call, block_table=table), cache.provenance)
    assert totals(reads[:1]) == {
        SlotState.OWN: 16,
        SlotState.OTHER_SEQUENCE: 16,
        SlotState.OTHER_POSITION: 16,
        SlotState.NEVER_MAPPED: 16,
    }
    assert totals(reads[1:]) == {SlotState.OWN: 64}


def test_each_entry_has_its_position_block_and_slot():
    case = hostile(query_lens=(1,), ctx_lens=(40,), fill="context_only")
    (read,) = reads_of(case)
    _, cache = call_of(case)
    assert read.positions.tolist() == list(range(41))
    places = list(zip(read.blocks.tolist(), read.slots.tolist(), strict=True))
    assert places == [cache.provenance.slot(0, position) for position in range(41)]
    assert read.having(EMPTY).tolist() == [40]
    assert read.having(FOREIGN).tolist() == []


def test_without_provenance_every_state_is_unknown():
    case = hostile()
    call, _ = call_of(case)
    reads = contract_reads(decide(case).contracts(Target.of(case), case.op), call, None)
    assert set(totals(reads)) == {SlotState.UNKNOWN}


def test_a_cache_write_reads_no_slot():
    assert reads_of(hostile(op="reshape_and_cache_flash", fill="context_only")) == []


# Two sequences of 6 and 4 tokens in blocks of 4, the first with a window; block 5 is in no row.
TABLE = torch.tensor([[0, 1, 2], [3, 4, 4]])
SEQ = torch.full((6, 4), NOBODY, dtype=torch.int32)
POS = SEQ.clone()
SEQ[1], POS[1] = 0, torch.arange(4, 8)
SEQ[2, 0], POS[2, 0] = 0, 8
SEQ[3], POS[3] = 1, torch.arange(4)
CACHE = Provenance(seq=SEQ, pos=POS, block_table=TABLE)


def test_states_of_a_whole_cache():
    """Sequence 0 has 10 tokens; positions 5 to 7 are visible, 0 to 3 are freed, 9 is missing."""
    states = slot_states(CACHE, 0, 10, range(5, 8))
    named = [[STATES[code] for code in row] for row in states.tolist()]
    assert named == [
        [SlotState.FREED] * 4,
        [SlotState.OUTSIDE_WINDOW] + [SlotState.OWN] * 3,
        [SlotState.OWN_FUTURE, SlotState.UNWRITTEN] + [SlotState.UNWRITTEN_TAIL] * 2,
        [SlotState.OTHER_SEQUENCE] * 4,
        [SlotState.OTHER_SEQUENCE] * 4,
        [SlotState.NEVER_MAPPED] * 4,
    ]


def test_an_unknown_reader_knows_no_slot():
    assert set(slot_states(CACHE, NOBODY, 0).flatten().tolist()) == {SlotState.UNKNOWN.code}


def test_every_state_has_a_sentence_and_a_code():
    assert [state.code for state in STATES] == list(range(len(STATES)))
    assert len({state.sentence for state in STATES}) == len(STATES)


def test_the_map_keeps_the_least_permissive_reader():
    """Block of sequence 1 in the table of sequence 0: sequence 1 reads its own token there, 0 does not."""
    case = hostile(query_lens=(1, 1), ctx_lens=(20, 20))
    call, cache = call_of(case)
    table = call.block_table.clone()
    table[0, 0] = table[1, 0]
    changed = dataclasses.replace(call, block_table=table)
    contracts = decide(case).contracts(Target.of(case), case.op)
    found = slot_map(changed, contracts, cache.provenance)
    slot = found.at(int(table[1, 0]), 3)
    assert (slot.state, slot.reader) == (SlotState.OTHER_SEQUENCE, (0, 3))
    assert (slot.writer, slot.owner) == ((1, 3), (1, 3))
    assert found.counts() == {SlotState.OWN: 10, SlotState.OTHER_SEQUENCE: 16}
    abandoned = found.at(int(call.block_table[0, 0]), 0)
    assert (abandoned.state, abandoned.reader) == (None, None)
    assert int(found.states[abandoned.block, 0]) == NOT_READ


def test_the_tail_is_readable_where_the_contract_loads_it():
    old = hostile(release="0.11.2", platform="sm_90")
    new = old.replace(release="0.33.0")
    states = [readable_states(decide(c).contracts(Target.of(c), c.op)) for c in (old, new)]
    assert states == [{SlotState.OWN, SlotState.UNWRITTEN_TAIL}, {SlotState.OWN}]
