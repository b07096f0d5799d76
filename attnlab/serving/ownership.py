"""Slot ownership: compare the slots that a layer reads with the tokens that it should find there."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnlab.serving.batch import ReadArguments, Step
from attnlab.serving.layer_call import KnownLayer
from attnlab.serving.observation import Observation
from attnlab.serving.requests import Integers, Request, Requests
from attnlab.serving.slot_shadow import NO_TOKEN, SlotShadow, SlotShadows

_MOST_BLOCKS = 4  # wrong blocks of one request that are reported from one call
_MOST_VERIFIED = 1 << 14
_TABLE_LIMIT = 1 << 22  # tokens; beyond twice the cache's slots and this, dead tokens are dropped


@dataclass(slots=True, kw_only=True, eq=False)
class _Verified:
    """Blocks of a request whose slots were compared, and the step in which they were."""

    blocks: Integers
    length: int
    first: int
    step: int


class Ownership:
    """The slots of all layers, and the comparison of reads with them."""

    def __init__(self, requests: Requests, rank: int = 0) -> None:
        self.requests, self.rank = requests, rank
        self.shadows = SlotShadows()
        self._verified: dict[tuple[int, int], _Verified] = {}
        self._sound: dict[int, tuple[tuple[int, int], ReadArguments]] = {}  # by array

    def tokens_of(
        self, step: int, requests: list[Request], first: Integers, counts: Integers
    ) -> Integers:
        """Add the new tokens of a step to the table; return their numbers, in the order of the batch."""
        table = self.shadows.table
        if len(table) > max(_TABLE_LIMIT, 2 * sum(len(s.numbers) for s in self.shadows.shadows)):
            self.requests.forget_except(self.shadows.compact().tolist())
        if len(self._verified) > _MOST_VERIFIED:
            running = {one.number for one in self.requests if one.is_running}
            self._verified = {k: v for k, v in self._verified.items() if k[1] in running}
        positions = [np.arange(a, a + n) for a, n in zip(first, counts, strict=True)]
        prefixes = [
            one.prefixes[a : a + n] for one, a, n in zip(requests, first, counts, strict=True)
        ]
        numbers = np.repeat([one.number for one in requests], counts)
        return table.add(
            numbers.astype(np.int64),
            np.concatenate(positions).astype(np.int64),
            step,
            np.concatenate(prefixes),
        )

    def wrote(self, layer: str, step: Step, slot_mapping: Integers) -> list[Observation]:
        """Take note of a layer's write; return an observation for slots outside the cache."""
        slots, numbers = slot_mapping[: len(step.tokens)], step.tokens[: len(slot_mapping)]
        num_slots = len(self.shadows.of(layer, step.number).numbers)
        outside = np.flatnonzero(slots >= num_slots)
        if (slots < 0).any() or len(outside):
            inside = (slots >= 0) & (slots < num_slots)
            slots, numbers = slots[inside], numbers[inside]
        self.shadows.write(layer, step.number, slots, numbers)
        if not len(outside):
            return []
        seq, request = step.request_of_row(int(outside[0]))
        slot = int(slot_mapping[outside[0]])
        text = f"slot_mapping names slot {slot} of a cache with {num_slots} slots"
        return [self._observe("outside", text, layer, step, seq=seq, request=request, slot=slot)]

    def read(self, known: KnownLayer, step: Step, reads: ReadArguments) -> list[Observation]:
        """Return an observation for each block that holds other tokens than those that a row should see."""
        layer, shadow = known.name, self.shadows.of(known.reads, step.number)
        state = (step.number, len(shadow.journal))
        last = self._sound.get(shadow.number)
        if last is not None and last[0] == state and last[1].is_same(reads):
            return []  # another layer read the same
        found = []
        for row in range(min(len(reads.seq_lens), len(step.requests) - reads.first)):
            if int(reads.seq_lens[row]) > 0:
                found += self._read_row(layer, shadow, step, reads, row)
        if not found:
            self._sound[shadow.number] = (state, reads)
        return found

    def _read_row(
        self, layer: str, shadow: SlotShadow, step: Step, reads: ReadArguments, row: int
    ) -> list[Observation]:
        request = step.requests[reads.first + row]
        seq_len, size = int(reads.seq_lens[row]), reads.block_size
        first = _first_visible(step, reads, row)
        blocks = reads.block_table[row, : -(-seq_len // size)]
        key = (shadow.number, request.number)
        columns = self._changed(self._verified.get(key), shadow, blocks, first, seq_len, size)
        positions = (columns[:, None] * size + np.arange(size)).ravel()
        positions = positions[(positions >= first) & (positions < seq_len)]
        slots = blocks[positions // size] * size + positions % size
        is_right = self._holds(shadow, request, positions, slots)
        if is_right.all():
            self._verified[key] = _Verified(
                blocks=blocks.copy(), length=seq_len, first=first, step=step.number
            )
            return []
        self._verified.pop(key, None)
        wrong = ~is_right
        return list(
            self._describe(
                layer, shadow, step, reads.first + row, positions[wrong], slots[wrong], size
            )
        )

    @staticmethod
    def _changed(
        verified: _Verified | None,
        shadow: SlotShadow,
        blocks: Integers,
        first: int,
        seq_len: int,
        size: int,
    ) -> Integers:
        """Return the columns of a table row to compare: those that changed since they were compared."""
        columns = np.arange(first // size, len(blocks))
        if verified is None or verified.first > first or shadow.block_size != size:
            return columns
        is_new = np.ones(len(blocks), bool)
        known = min(verified.length // size, len(blocks))
        same = blocks[:known] == verified.blocks[:known]
        inside = (blocks[:known] >= 0) & (blocks[:known] < len(shadow.block_step))
        at = np.where(inside, blocks[:known], 0)
        is_new[:known] = ~(same & inside & (shadow.block_step[at] < verified.step))
        changed: Integers = columns[is_new[columns]]
        return changed

    def _holds(
        self, shadow: SlotShadow, request: Request, positions: Integers, slots: Integers
    ) -> NDArray[np.bool_]:
        """Return for each slot whether it holds the request's token of that position."""
        table, inside = self.shadows.table, (slots >= 0) & (slots < len(shadow.numbers))
        numbers = shadow.numbers[np.where(inside, slots, 0)]
        right: NDArray[np.bool_] = (
            inside & (numbers != NO_TOKEN) & (table.positions[numbers] == positions)
        )
        if request.has_tokens and request.length > int(positions.max(initial=-1)):
            right &= table.prefixes[numbers] == request.prefixes[positions]
        return right

    def _describe(
        self,
        layer: str,
        shadow: SlotShadow,
        step: Step,
        seq: int,
        positions: Integers,
        slots: Integers,
        size: int,
    ) -> Iterator[Observation]:
        """Yield an observation for each wrong block of a request, at most four."""
        blocks = slots // size
        for block in dict.fromkeys(blocks.tolist()[: _MOST_BLOCKS * size]):
            here = np.flatnonzero(blocks == block)
            position, slot = int(positions[here[0]]), int(slots[here[0]])
            kind, holds, facts = self._judge(shadow, step, seq, position, slot)
            request = step.requests[seq]
            text = (
                f"request {request.name} reads position {position} from slot {slot} "
                f"(block {block}, offset {slot % size}), {holds}"
            )
            more = f"; {len(here)} slots of the block" if len(here) > 1 else ""
            yield self._observe(
                kind,
                text + more,
                layer,
                step,
                seq=seq,
                request=request,
                position=position,
                block=block,
                slot=slot,
                slots=len(here),
                **facts,
            )

    def _judge(
        self, shadow: SlotShadow, step: Step, seq: int, position: int, slot: int
    ) -> tuple[str, str, dict[str, object]]:
        """Return the kind of a wrong slot, what it holds in words, and the facts."""
        if not 0 <= slot < len(shadow.numbers):
            return "outside", f"outside the cache of {len(shadow.numbers)} slots", {}
        number, table = int(shadow.numbers[slot]), self.shadows.table
        holds, facts, kind = "to which no token was written", {}, "never_written"
        if number != NO_TOKEN:
            writer = self.requests.of_number(int(table.requests[number]))
            at, when = int(table.positions[number]), int(table.steps[number])
            facts = {"writer": writer.name, "writer_position": at, "writer_step": when}
            holds = f"which holds position {at} of request {writer.name}, written in step {when}"
            if writer.number == step.requests[seq].number:
                kind = "other_position"
            elif writer.is_running:
                kind = "other_sequence"
            else:
                kind = "recycled"
                holds += ", which gave up the block"
        elsewhere = _written_to(shadow, step, seq, position)
        if elsewhere is not None:
            facts["written_to"] = elsewhere
            return "misplaced", f"{holds}; the token was written to slot {elsewhere}", facts
        return kind, holds, facts

    def _observe(
        self,
        kind: str,
        text: str,
        layer: str,
        step: Step,
        *,
        seq: int,
        request: Request,
        position: int | None = None,
        block: int | None = None,
        **facts: object,
    ) -> Observation:
        return Observation(
            kind=kind,
            text=text,
            layer=layer,
            step=step.number,
            rank=self.rank,
            request=request.name,
            seq=seq,
            position=position,
            block=block,
            facts=facts,
        )


def _first_visible(step: Step, reads: ReadArguments, row: int) -> int:
    """Return the first position that some new token of a row sees."""
    if not reads.sliding_window:
        return 0
    lens = step.query_lens if reads.query_lens is None else reads.query_lens
    query_len = int(lens[row if reads.query_lens is not None else reads.first + row])
    return max(0, int(reads.seq_lens[row]) - query_len - reads.sliding_window + 1)


def _written_to(shadow: SlotShadow, step: Step, seq: int, position: int) -> int | None:
    """Return the slot to which this step's write put a new token, None if it is not new or not written."""
    starts = step.starts
    offset = position - (int(step.seq_lens[seq]) - int(step.query_lens[seq]))
    if not 0 <= offset < int(step.query_lens[seq]):
        return None
    number = step.tokens[int(starts[seq]) + offset]
    for write in shadow.journal:
        at = np.flatnonzero(write.numbers == number)
        if len(at):
            return int(write.slots[at[0]])
    return None
