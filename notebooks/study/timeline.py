"""Timeline: the calls that an engine made on its KV cache, in order, and what follows from the order.

The calls are recorded where vLLM's Python calls the compiled ops.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.case.errors import AttnLabError

WRITE, ATTENTION = "write", "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWrite:
    """One call of the cache write.

    - ``slot_mapping``: the slot of each written token, block × block_size + offset.
    - ``blocks_changed``: the blocks whose bytes the call changed.
    - ``dtypes``: of the index tensors, by name.
    """

    step: int
    layer: int
    slot_mapping: tuple[int, ...]
    blocks_changed: tuple[int, ...]
    dtypes: Mapping[str, str]

    kind = WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call of attention, its index tensors copied before the op ran.

    - ``query_start_loc`` [num_seqs + 1], ``seq_lens`` [num_seqs], ``block_table`` [num_seqs, columns].
    - ``blocks_changed``: the blocks whose bytes the call changed, normally none.
    - ``dtypes``: of the index tensors, by name.
    """

    step: int
    layer: int
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: tuple[tuple[int, ...], ...]
    max_query_len: int
    blocks_changed: tuple[int, ...]
    dtypes: Mapping[str, str]

    kind = ATTENTION

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Return the new tokens of each sequence."""
        return tuple(b - a for a, b in itertools.pairwise(self.query_start_loc))

    @property
    def ctx_lens(self) -> tuple[int, ...]:
        """Return the tokens of each sequence before its new ones: seq_lens - query_lens."""
        return tuple(s - q for s, q in zip(self.seq_lens, self.query_lens, strict=True))

    @property
    def is_mixed(self) -> bool:
        """Answer whether the batch holds sequences with one new token and with more."""
        return min(self.query_lens) == 1 < max(self.query_lens)

    def slots(self, seq: int, first: int, last: int, block_size: int) -> list[int]:
        """Return the slots of the positions ``first`` … ``last`` − 1 of a sequence, by its block table."""
        row = self.block_table[seq]
        return [row[p // block_size] * block_size + p % block_size for p in range(first, last)]


Event = CacheWrite | Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The recorded run of an engine.

    - ``events``: cache writes and attention calls in their order.
    - ``output_lens``: tokens that the engine generated for each prompt.
    - ``seconds``: by part: "import", "engine", "run".
    - ``connections``: addresses of other machines to which a connection was refused.
    """

    version: str
    dtype: str
    block_size: int
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    events: tuple[Event, ...]
    seconds: Mapping[str, float]
    peak_memory_gib: float
    connections: tuple[str, ...]

    @property
    def writes(self) -> list[CacheWrite]:
        """Return the cache writes."""
        return [event for event in self.events if isinstance(event, CacheWrite)]

    @property
    def attentions(self) -> list[Attention]:
        """Return the attention calls."""
        return [event for event in self.events if isinstance(event, Attention)]

    def orders(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return the kinds of the calls of each (step, layer), in their order."""
        found: dict[tuple[int, int], tuple[str, ...]] = {}
        for event in self.events:
            place = (event.step, event.layer)
            found[place] = (*found.get(place, ()), event.kind)
        return found

    def new_slots(self, attention: Attention) -> list[int]:
        """Return the slots of the new tokens of every sequence, in the order of the query's rows."""
        return [
            slot
            for seq, (first, last) in enumerate(
                zip(attention.ctx_lens, attention.seq_lens, strict=True)
            )
            for slot in attention.slots(seq, first, last, self.block_size)
        ]

    def unwritten_reads(self) -> list[int]:
        """Return for each attention call how many slots it reads that no earlier write filled."""
        written: dict[int, set[int]] = {}
        found = []
        for event in self.events:
            filled = written.setdefault(event.layer, set())
            if isinstance(event, CacheWrite):
                filled.update(event.slot_mapping)
                continue
            read = [
                slot
                for seq, seq_len in enumerate(event.seq_lens)
                for slot in event.slots(seq, 0, seq_len, self.block_size)
            ]
            found.append(sum(slot not in filled for slot in read))
        return found

    def with_attention_first(self) -> "Timeline":
        """Return the timeline with each attention call moved before the cache write of its layer."""
        key = {id(event): (event.step, event.layer, event.kind == WRITE) for event in self.events}
        swapped = sorted(self.events, key=lambda event: key[id(event)])
        return dataclasses.replace(self, events=tuple(swapped))

    def seq_ids(self, attention: Attention) -> list[int]:
        """Return the prompt of each row of the batch, identified by its first block.

        The engine takes the prompts in order, and no block changes its owner during a run.
        """
        owners: dict[int, int] = {}
        for event in self.attentions:
            for row in event.block_table:
                owners.setdefault(row[0], len(owners))
        return [owners[row[0]] for row in attention.block_table]

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON-able values; :meth:`from_dict` reads them back."""
        fields = dataclasses.asdict(self)
        for event, values in zip(self.events, fields["events"], strict=True):
            values["kind"] = event.kind
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Timeline":
        """Return the timeline of :meth:`to_dict`. Raises AttnLabError if a field is missing."""
        try:
            events = tuple(_event(values) for values in fields["events"])
            return cls(**{**_tuples(fields), "events": events})
        except (KeyError, TypeError) as error:
            raise AttnLabError(f"timeline must hold the fields of one, got {error}") from error


def _event(fields: Mapping[str, Any]) -> Event:
    kind = CacheWrite if fields["kind"] == WRITE else Attention
    return kind(**_tuples({name: value for name, value in fields.items() if name != "kind"}))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with lists, nested ones too, as tuples."""

    def fixed(value: Any) -> Any:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return tuple(fixed(item) for item in value) if is_list else value

    return {name: fixed(value) for name, value in fields.items()}
