"""Count slot reads by state, and report those that the contracts do not allow."""

from collections.abc import Iterable

from attnlab.case.case import Case
from attnlab.checker.case_run import CaseRun
from attnlab.checker.finding import Finding
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import EMPTY, STATES, SlotState, readable_states
from attnlab.contracts.target import Target
from attnlab.lab.reads import MemoryReport

# The states that each kind of observation reports, the most serious kind first.
OBSERVED = {
    "reads_foreign_slots": (
        SlotState.OTHER_POSITION,
        SlotState.OTHER_SEQUENCE,
        SlotState.NEVER_MAPPED,
    ),
    "reads_future_slots": (SlotState.OWN_FUTURE,),
    "reads_empty_slots": (SlotState.UNWRITTEN, SlotState.UNWRITTEN_TAIL),
    "reads_outside_window": (SlotState.OUTSIDE_WINDOW,),
}


def never_reads_empty_slots(run: CaseRun) -> bool:
    """Return whether the trace of a run shows that its output cannot depend on empty slots.

    The trace must have seen reads of keys and of values; it does not see interleaved values, for example.
    An access outside every tensor may hit any slot.
    """
    if run.memory is None or run.outside:
        return False
    slots = run.memory.slots
    return len({entry.tensor for entry in slots}) > 1 and not any(
        entry.counts[state] for entry in slots for state in (*EMPTY, SlotState.UNKNOWN)
    )


def read_counts(memory: MemoryReport) -> dict[str, int]:
    """Return how many slots a run read, by state.

    A slot whose key and value are both read counts once per sequence.
    """
    counts = {state.replace(" ", "_"): 0 for state in STATES}
    for (_, state), slots in slots_by_state(memory).items():
        counts[state.replace(" ", "_")] += len(slots)
    return counts


def allowed_reads(case: Case) -> list[str]:
    """Return the states of slots that the contracts of a Case's kernels allow to read, sorted."""
    return sorted(readable_states(decide(case).contracts(Target.of(case), case.op)))


def slots_by_state(memory: MemoryReport) -> dict[tuple[int, SlotState], set[tuple[int, int]]]:
    """Return the slots whose key or value was read, by the sequence they were read for and by state."""
    found: dict[tuple[int, SlotState], set[tuple[int, int]]] = {}
    for entry in memory.slots:
        for state, slots in entry.slots.items():
            if slots:
                found.setdefault((entry.seq, state), set()).update(slots)
    return found


def observations(case: Case, memory: MemoryReport | None) -> Iterable[Finding]:
    """Yield a finding for each kind of OBSERVED that the kernels of a Case read.

    A freed block counts as outside the window: a kernel that ignores the window reads both.
    """
    if memory is None:
        return
    found: dict[tuple[int, SlotState], set[tuple[int, int]]] = {}
    for (seq, state), slots in slots_by_state(memory).items():
        state = SlotState.OUTSIDE_WINDOW if state is SlotState.FREED else state
        found.setdefault((seq, state), set()).update(slots)
    for kind, states in OBSERVED.items():
        at = sorted((seq, state) for seq, state in found if state in states)
        if not at:
            continue
        seq, first = at[0]
        block, slot = min(found[seq, first])
        count = sum(len(found[place]) for place in at)
        text = f"{count} slots; first for sequence {seq}: block {block}, slot {slot} ({first})"
        yield Finding(op=case.op, kind=kind, case=case, evidence=text, diagnosis=str(first))
