"""Count slot reads by state, and report those that the contracts do not allow."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import STATES, SlotState, readable_states
from attnlab.contracts.target import Target
from attnlab.lab.reads import MemoryReport
from attnlab.lab.result import Result

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


@dataclass(slots=True)
class ReadCounts:
    """How many slots the cases of an op read, by state.

    A slot whose key and value are both read counts once per sequence. ``watched``: cases whose reads were
    traced; ``allowed``: states that the contracts of the op's kernels allow.
    """

    watched: int = 0
    counts: dict[SlotState, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    allowed: set[SlotState] = field(default_factory=set)

    def add(self, case: Case, ran: Result) -> None:
        """Add the reads of a run of a Case, if they were traced; changes the counts."""
        if ran.memory is None:
            return
        self.watched += 1
        self.allowed |= readable_states(decide(case).contracts(Target.of(case), case.op))
        for (_, state), slots in slots_by_state(ran.memory).items():
            self.counts[state] += len(slots)

    def left_out(self, op: str) -> list[str]:
        """Return a line that says that reads were not traced, if so."""
        text = (
            f"{op}: slot reads, which are traced only of Triton kernels under the lab's interpreter"
        )
        return [] if self.watched else [text]

    def to_dict(self) -> dict[str, int]:
        """Return the counts as JSON-able values, by state."""
        return {state.replace(" ", "_"): count for state, count in self.counts.items()}


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
