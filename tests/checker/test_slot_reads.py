"""Which slots a traced run read, and whether its output can depend on empty ones."""

import pytest
import torch

from attnlab.checker.case_run import CaseRun, never_reads_empty_slots
from attnlab.contracts.slot_states import EMPTY, STATES, SlotState
from attnlab.lab.result import MemoryReport, SlotsRead


def run_that_read(
    *entries: tuple[str, SlotState], traced: bool = True, outside: tuple[str, ...] = ()
) -> CaseRun:
    """Return a run that read one slot of each (tensor, state)."""
    slots = tuple(
        SlotsRead(tensor=tensor, seq=0, counts={**dict.fromkeys(STATES, 0), state: 1})
        for tensor, state in entries
    )
    memory = MemoryReport(slots=slots, unwritten=()) if traced else None
    return CaseRun(
        output=torch.zeros(1), lse=None, padded=None, memory=memory, wraps=(), outside=outside
    )


KEY, VALUE = ("key_cache", SlotState.OWN), ("value_cache", SlotState.OWN)


def test_reads_of_tokens_alone_do_not_follow_empty_slots() -> None:
    assert never_reads_empty_slots(run_that_read(KEY, VALUE))
    foreign = ("value_cache", SlotState.OTHER_SEQUENCE)
    assert never_reads_empty_slots(run_that_read(KEY, VALUE, foreign))


@pytest.mark.parametrize("state", [*EMPTY, SlotState.UNKNOWN])
def test_an_empty_slot_or_an_unknown_reader_decides(state: SlotState) -> None:
    assert not never_reads_empty_slots(run_that_read(KEY, VALUE, ("key_cache", state)))


def test_without_a_full_trace_nothing_is_known() -> None:
    assert not never_reads_empty_slots(run_that_read(KEY, VALUE, traced=False))
    assert not never_reads_empty_slots(run_that_read(KEY))
    assert not never_reads_empty_slots(run_that_read())
    assert not never_reads_empty_slots(run_that_read(KEY, VALUE, outside=("f.py:3 …",)))
