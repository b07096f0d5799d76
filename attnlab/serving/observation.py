"""Observation: something wrong that a process of vLLM saw, as a line of its record."""

from dataclasses import asdict, dataclass, field
from typing import Any

# Kinds, and what each of them says. The order is that of a report.
KINDS = {
    "value": "an output differs from the reference by more than rounding allows",
    "not_finite": "an output has NaN or Inf",
    "never_written": "a slot was read that no token was written to",
    "recycled": "a slot was read that holds a token of a request that gave up the block",
    "other_sequence": "a slot was read that holds a token of another running request",
    "other_position": "a slot was read that holds another position, or other token ids",
    "misplaced": "a new token was written to another slot than the one it is read from",
    "outside": "a slot outside the cache was written or read",
    "arguments": "an argument of the op contradicts the batch that the scheduler made",
    "intent": "an argument of the op contradicts the layer",
}

SLOTS = "slots"
# A wrong slot may be seen as one of these in one step, and as another one in the next.
SLOT_KINDS = ("never_written", "recycled", "other_sequence", "other_position", "misplaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Something wrong at one place.

    - ``kind``: a name of :data:`KINDS`. ``text``: one sentence.
    - ``layer``: the name of the layer in vLLM. ``step``: the number of the step, from 0. ``rank``: of the
      process.
    - ``request``: vLLM's request id. ``seq``: its row in the batch. ``position``: of the first token.
      ``block``: the cache block, as the op numbers it. ``argument``: the argument of the op. Each may be
      None.
    - ``facts``: the values, by name.
    """

    kind: str
    text: str
    layer: str
    step: int
    rank: int = 0
    request: str | None = None
    seq: int | None = None
    position: int | None = None
    block: int | None = None
    argument: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what is equal for observations of the same fault in later steps."""
        kind = SLOTS if self.kind in SLOT_KINDS else self.kind
        request = None if self.kind == "intent" else self.request
        return (kind, self.layer, self.rank, request, self.block, self.argument)

    def to_dict(self) -> dict[str, Any]:
        """Return the observation as JSON-able values."""
        return asdict(self)
