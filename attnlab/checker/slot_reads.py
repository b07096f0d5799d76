"""Slots that were read: counted by what they are to the sequence that they were read for, and told where
its contract does not ask for them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from attnlab.case.case import Case
from attnlab.checker.finding import Finding
from attnlab.contracts.contract import contract
from attnlab.contracts.dispatch import Target, decide
from attnlab.lab.reads import KINDS, MemoryReport
from attnlab.lab.result import Result
from attnlab.tensors.cache import NOBODY

# What is told of slots by their kinds, the worst first.
TOLD = {
    "reads_foreign_slots": ("other sequence", "never mapped"),
    "reads_future_slots": ("own future",),
    "reads_empty_slots": ("own unwritten", "unwritten tail"),
    "reads_outside_window": ("outside window",),
}


@dataclass(slots=True)
class ReadCounts:
    """How many slots the cases of an op read, by kind; a slot of key and value counts once for a
    sequence.

    ``watched``: cases in which somebody looked; ``allowed``: kinds that the contracts of the op's
    kernels let them read.
    """

    watched: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*KINDS, "by nobody"), 0))
    allowed: set[str] = field(default_factory=set)

    def add(self, case: Case, ran: Result) -> None:
        """Count what a run of a Case read, where that was seen."""
        if ran.memory is None:
            return
        self.watched += 1
        self.allowed |= allowed(case)
        for (seq, kind), slots in slots_by_kind(ran.memory).items():
            self.counts["by nobody" if seq == NOBODY else kind] += len(slots)

    def left_out(self, op: str) -> list[str]:
        """Return in words that nobody looked, where that is so."""
        text = f"{op}: which slots are read; that is seen of Triton kernels under the lab's interpreter"
        return [] if self.watched else [text]

    def to_dict(self) -> dict[str, int]:
        """Return the counts under names for machines."""
        return {kind.replace(" ", "_"): count for kind, count in self.counts.items()}


def allowed(case: Case) -> set[str]:
    """Return the kinds of slots that the contracts of a Case's kernels let them read."""
    target = Target.of(case)
    terms = [contract(name, target, case.op) for name in decide(case).kernels]
    tail = {"unwritten tail"} if any(one.reads_tail != "nothing" for one in terms) else set()
    return {"own", *tail}


def slots_by_kind(memory: MemoryReport) -> dict[tuple[int, str], set[tuple[int, int]]]:
    """Return the slots that were read of key or value, by the sequence they were read for and kind."""
    found: dict[tuple[int, str], set[tuple[int, int]]] = {}
    for one in memory.slots:
        for kind, slots in one.slots.items():
            if slots:
                found.setdefault((one.seq, kind), set()).update(slots)
    return found


def observations(case: Case, memory: MemoryReport | None) -> Iterable[Finding]:
    """Yield what is to be told of the slots that a Case's kernels read: those that are not their own."""
    if memory is None:
        return
    found = slots_by_kind(memory)
    for kind, kinds in TOLD.items():
        at = [(seq, one) for seq, one in sorted(found) if one in kinds and seq != NOBODY]
        if not at:
            continue
        seq, first = at[0]
        block, slot = min(found[seq, first])
        count = sum(len(found[one]) for one in at)
        text = f"{count} slots; first for sequence {seq}: block {block}, slot {slot} ({first})"
        yield Finding(op=case.op, kind=kind, case=case, evidence=text, diagnosis=first)
