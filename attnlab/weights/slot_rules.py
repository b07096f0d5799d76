"""Rules about where keys and values come from: blocks, positions and heads."""

from dataclasses import dataclass

import torch

from attnlab.weights.plan import Plan
from attnlab.weights.rule import Edge, Rule
from attnlab.weights.setup import AttentionSetup

_START = Edge("start")
_WHAT = {"both": "keys and values", "key": "keys", "value": "values"}


@dataclass(frozen=True, slots=True)
class OtherSlots(Rule):
    """Cached positions from ``begin`` on are read from other slots.

    Position p comes from slot block_table[row, p // divisor + column] × block_size + p % modulus +
    slot_shift, where divisor and modulus are the block size if they are 0. A column after the last one is
    in the next row.

    - ``of``: "key", "value" or "both".
    - ``row``: "own", "first", "last", "next" or "previous" row of the block table.
    """

    of: str = "both"
    row: str = "own"
    column: int = 0
    divisor: int = 0
    modulus: int = 0
    shift: int = 0
    slot_shift: int = 0
    begin: Edge = _START

    @property
    def complexity(self) -> int:  # type: ignore[override]
        parts = (
            self.row != "own",
            self.column,
            self.divisor,
            self.modulus,
            self.shift,
            self.slot_shift,
        )
        return sum(map(bool, parts)) + (self.of != "both") + (self.begin != _START)

    def apply(self, plan: Plan) -> Plan:
        setup, slots = plan.setup, self.slots(plan.setup)
        begin = self.begin.at(setup, "cache")[:, None]
        here = ~setup.is_new & (setup.entry_position >= begin)
        changes: dict[str, torch.Tensor] = {}
        if self.of != "value":
            changes["key_slot"] = torch.where(here, slots, plan.key_slot)
        if self.of != "key":
            changes["value_slot"] = torch.where(here, slots, plan.value_slot)
        return plan.change(**changes)

    def slots(self, setup: AttentionSetup) -> torch.Tensor:
        """Return the slot of each entry by this rule, [R, E]; -1 outside of the cache."""
        table, size = setup.call.block_table.long().cpu(), setup.call.block_size
        at, seqs = setup.entry_position, len(table)
        row = {
            "own": setup.seq,
            "first": torch.zeros_like(setup.seq),
            "last": torch.full_like(setup.seq, seqs - 1),
            "next": (setup.seq + 1) % seqs,
            "previous": (setup.seq - 1) % seqs,
        }[self.row]
        moved = at + self.shift
        column = moved // (self.divisor or size) + self.column
        index = row[:, None] * table.shape[1] + column
        inside = (index >= 0) & (index < table.numel())
        block = table.flatten()[index.clamp(0, table.numel() - 1)]
        slot = block * size + moved % (self.modulus or size) + self.slot_shift
        return setup.of_memory(torch.where(inside, slot, -1))

    @property
    def text(self) -> str:
        where = []
        if self.row != "own":
            sequence = {"first": "sequence 0", "last": "the last sequence"}
            name = sequence.get(self.row, f"the {self.row} sequence")
            where.append(f"from the blocks of {name}")
        if self.column:
            where.append(f"from the block {_shifted(self.column)} in the block table")
        if self.divisor:
            where.append(f"from block p // {self.divisor} for position p")
        if self.modulus:
            where.append(f"at offset p % {self.modulus}")
        if self.shift:
            where.append(f"from the position {_shifted(self.shift)}")
        if self.slot_shift:
            where.append(f"from the slot {_shifted(self.slot_shift)} in memory")
        begin = "" if self.begin == _START else f", from {self.begin.text} on"
        return f"cached {_WHAT[self.of]} are read {' '.join(where)}{begin}"


def _shifted(number: int) -> str:
    count = "one" if abs(number) == 1 else str(abs(number))
    return f"{count} {'later' if number > 0 else 'earlier'}"


HEAD_FORMS = {
    "the remainder by the number of KV heads": lambda head, group, heads: head % (heads // group),
    "the next KV head": lambda head, group, heads: (head // group + 1) % (heads // group),
    "the previous KV head": lambda head, group, heads: (head // group - 1) % (heads // group),
    "KV head 0": lambda head, group, heads: head * 0,
    "the last KV head": lambda head, group, heads: head * 0 + heads // group - 1,
    "the reversed order": lambda head, group, heads: heads // group - 1 - head // group,
    "head / (group + 1)": lambda head, group, heads: head // (group + 1),
}


@dataclass(frozen=True, slots=True)
class KeyHead(Rule):
    """Query heads use the keys of other KV heads."""

    form: str

    def apply(self, plan: Plan) -> Plan:
        setup = plan.setup
        return plan.change(kv_head=other_head(self.form, setup))

    @property
    def text(self) -> str:
        return f"query heads use the keys of other KV heads: {self.form}"


def other_head(form: str, setup: AttentionSetup) -> torch.Tensor:
    """Return the KV head of each query head by a form, [H]."""
    heads = setup.call.query.shape[1]
    found: torch.Tensor = HEAD_FORMS[form](setup.heads, setup.call.num_queries_per_kv, heads)
    return found


@dataclass(frozen=True, slots=True)
class SlopeOf(Rule):
    """ALiBi's slopes are those of other heads."""

    form: str

    def apply(self, plan: Plan) -> Plan:
        slopes = plan.setup.call.alibi_slopes
        if slopes is None:
            return plan
        every, heads = slopes.cpu().double(), plan.setup.heads
        index = {
            "the KV head's index": plan.setup.kv_head,
            "head 0": torch.zeros_like(heads),
            "the next head": (heads + 1) % len(every),
            "the head within its group": heads % plan.setup.call.num_queries_per_kv,
        }[self.form]
        return plan.change(slopes=every[index])

    @property
    def text(self) -> str:
        return f"ALiBi's slopes are those of {self.form}"


SLOPE_FORMS = ("the KV head's index", "head 0", "the next head", "the head within its group")
