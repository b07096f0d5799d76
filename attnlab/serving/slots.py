"""FollowedSlots: the cache slots of the layers, from its writes to its reads."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlab.serving.batch import (
    Hashes,
    Integers,
    KnownLayer,
    Layers,
    ReadArguments,
    Request,
    Requests,
    Step,
)
from attnlab.serving.capture_state import CaptureState, Observation

# SlotShadows: which token each cache slot of each layer holds, by the writes that were seen.
#
# Layers of one KV-cache group get the same slot_mapping, so they share one array. A layer that writes
# anything else, or does not write in a step, gets an array of its own from then on.

NO_TOKEN = 0
_NUMBERS = itertools.count()


class TokenTable:
    """The tokens that were written, by number: request, position, step, and the hash of the prefix.

    Number 0 stands for no token.
    """

    def __init__(self) -> None:
        self._size = 1
        self._integers = np.full((3, 1024), -1, np.int64)
        self._prefixes = np.zeros(1024, np.uint64)

    def __len__(self) -> int:
        return self._size

    @property
    def requests(self) -> Integers:
        """Return the number of the request of each token."""
        return self._integers[0, : self._size]

    @property
    def positions(self) -> Integers:
        """Return the position of each token in its request."""
        return self._integers[1, : self._size]

    @property
    def steps(self) -> Integers:
        """Return the step in which each token was computed."""
        return self._integers[2, : self._size]

    @property
    def prefixes(self) -> Hashes:
        """Return the hash of the prefix of each token."""
        return self._prefixes[: self._size]

    def add(self, requests: Integers, positions: Integers, step: int, prefixes: Hashes) -> Integers:
        """Add the tokens of a step; return their numbers."""
        first, end = self._size, self._size + len(requests)
        if end > len(self._prefixes):
            room = max(end, 2 * len(self._prefixes)) - len(self._prefixes)
            self._integers = np.pad(self._integers, ((0, 0), (0, room)), constant_values=-1)
            self._prefixes = np.pad(self._prefixes, (0, room))
        self._integers[0, first:end], self._integers[1, first:end] = requests, positions
        self._integers[2, first:end], self._prefixes[first:end] = step, prefixes
        self._size = end
        return np.arange(first, end)

    def keep(self, numbers: Integers) -> None:
        """Keep only the tokens with these numbers, rising and without 0; they are numbered anew from 1."""
        kept = np.concatenate([[NO_TOKEN], numbers])
        self._integers = np.ascontiguousarray(self._integers[:, kept])
        self._prefixes = self._prefixes[kept].copy()
        self._size = len(kept)


@dataclass(slots=True, kw_only=True, eq=False)
class Write:
    """A cache write: the tokens ``numbers`` [n] went to ``slots`` [n], which held ``old`` [n]."""

    slots: Integers
    numbers: Integers
    old: Integers

    def is_same(self, slots: Integers, numbers: Integers) -> bool:
        """Answer whether another write does the same."""
        return (self.slots is slots or np.array_equal(self.slots, slots)) and (
            self.numbers is numbers or np.array_equal(self.numbers, numbers)
        )


class SlotShadow:
    """The tokens in the slots of some layers.

    - ``number``: of this array, unique in the process.
    - ``numbers``: [num_slots], the token in each slot. ``layers``: the names of the layers.
    - ``block_step``: [num_blocks], the step of the last write to each block of ``block_size`` slots.
    - ``step``, ``journal``: the writes of the last step. ``counts``: how many of them each layer did.
    """

    def __init__(self, num_slots: int, block_size: int, layers: Iterable[str]) -> None:
        self.number = next(_NUMBERS)
        self.numbers: Integers = np.zeros(num_slots, np.int64)
        self.block_size = block_size
        self.block_step: Integers = np.full(-(-num_slots // block_size), -1, np.int64)
        self.layers = set(layers)
        self.step = -1
        self.journal: list[Write] = []
        self.counts: dict[str, int] = {}

    def apply(self, slots: Integers, numbers: Integers) -> None:
        """Write tokens to slots, and note it in the journal."""
        self.journal.append(Write(slots=slots, numbers=numbers, old=self.numbers[slots]))
        self.numbers[slots] = numbers
        self.block_step[slots // self.block_size] = self.step

    def split(self, layers: set[str], count: int) -> "SlotShadow":
        """Return an array of their own for layers that did only the first ``count`` writes of the step."""
        own = SlotShadow(0, self.block_size, layers)
        own.numbers, own.block_step = self.numbers.copy(), self.block_step.copy()
        own.step, own.journal = self.step, list(self.journal[:count])
        own.counts = dict.fromkeys(layers, count)
        for write in reversed(self.journal[count:]):
            own.numbers[write.slots] = write.old
        self.layers -= layers
        for layer in layers:
            self.counts.pop(layer, None)
        return own


class SlotShadows:
    """The slots of all layers of a process."""

    def __init__(self) -> None:
        self.table = TokenTable()
        self._of: dict[str, SlotShadow] = {}

    def __contains__(self, layer: str) -> bool:
        return layer in self._of

    @property
    def shadows(self) -> list[SlotShadow]:
        """Return every array once."""
        return list({id(one): one for one in self._of.values()}.values())

    def add_group(self, layers: Iterable[str], num_slots: int, block_size: int) -> None:
        """Add the layers of a KV-cache group, with empty slots."""
        shadow = SlotShadow(num_slots, block_size, layers)
        self._of |= dict.fromkeys(shadow.layers, shadow)

    def write(self, layer: str, step: int, slots: Integers, numbers: Integers) -> None:
        """Take note that a layer wrote tokens to slots, which must be in the cache."""
        shadow = self._in_step(layer, step)
        count = shadow.counts.get(layer, 0)
        if count < len(shadow.journal) and not shadow.journal[count].is_same(slots, numbers):
            shadow = self._split(shadow, {layer}, count)
        if count == len(shadow.journal):
            shadow.apply(slots, numbers)
        shadow.counts[layer] = count + 1

    def of(self, layer: str, step: int) -> SlotShadow:
        """Return the slots as a layer reads them now, with its own writes only."""
        shadow = self._in_step(layer, step)
        count = shadow.counts.get(layer, 0)
        if count < len(shadow.journal):
            shadow = self._split(shadow, {layer}, count)
        return shadow

    def compact(self) -> NDArray[np.int64]:
        """Drop the tokens that no slot holds; return the numbers of the requests that are left."""
        held = [shadow.numbers for shadow in self.shadows]
        journals = [
            part for one in self.shadows for w in one.journal for part in (w.numbers, w.old)
        ]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *held, *journals]))
        for one in self.shadows:
            one.numbers = np.searchsorted(live, one.numbers)
            for write in one.journal:
                write.numbers = np.searchsorted(live, write.numbers)
                write.old = np.searchsorted(live, write.old)
        self.table.keep(live[1:])
        found: NDArray[np.int64] = np.unique(self.table.requests[1:])
        return found

    def _in_step(self, layer: str, step: int) -> SlotShadow:
        """Return the array of a layer, after the end of earlier steps: who did not write then, splits off."""
        shadow = self._of[layer]
        if shadow.step != step:
            late: dict[int, set[str]] = {}
            for name in shadow.layers:
                count = shadow.counts.get(name, 0)
                if count < len(shadow.journal):
                    late.setdefault(count, set()).add(name)
            for count, names in late.items():
                own = self._split(shadow, names, count)
                own.step, own.journal, own.counts = step, [], {}
            shadow.step, shadow.journal, shadow.counts = step, [], {}
        return self._of[layer]

    def _split(self, shadow: SlotShadow, layers: set[str], count: int) -> SlotShadow:
        own = shadow.split(layers, count)
        self._of |= dict.fromkeys(layers, own)
        return own


# Slot ownership: compare the slots that a layer reads with the tokens that it should find there.

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
        seq, _ = step.request_of_row(int(outside[0]))
        slot = int(slot_mapping[outside[0]])
        text = f"slot_mapping names slot {slot} of a cache with {num_slots} slots"
        return [self._observe("outside", text, layer, step, seq=seq, slot=slot)]

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
            text = (
                f"request {step.requests[seq].name} reads position {position} from slot {slot} "
                f"(block {block}, offset {slot % size}), {holds}"
            )
            more = f"; {len(here)} slots of the block" if len(here) > 1 else ""
            yield self._observe(
                kind,
                text + more,
                layer,
                step,
                seq=seq,
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
            request=step.requests[seq].name,
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


class FollowedSlots:
    """Passes the writes and reads of the layers to its Ownership, where they can be followed."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._layers = Layers()
        self._ownership: Ownership | None = None
        self._host: dict[Any, Integers] = {}

    def begin(self, layers: Layers, unchecked: str) -> None:
        """Begin with an empty cache; ``unchecked``: why slots cannot be followed, or ""."""
        self._layers = layers
        if unchecked:
            self.stop(unchecked)
            return
        self._ownership = Ownership(self._state.requests, self._state.rank)
        for group in {id(one): one for one in layers.groups.values()}.values():
            self._ownership.shadows.add_group(group.layers, group.num_slots, group.block_size)

    def guarded(self) -> AbstractContextManager[None]:
        """Run a part of the following: after an error, slots are not followed any more."""
        return self._state.guarded("slots", lambda: self.stop("slots, after an error in attnlab"))

    def stop(self, why: str) -> None:
        """Follow no slots from now on."""
        self._ownership = None
        self._state.tally.unchecked[why] += 1

    def tokens_of(
        self, step: int, requests: list[Request], first: Integers, counts: Integers
    ) -> Integers:
        """Return the numbers of the new tokens of a step; zeros if slots are not followed."""
        self._host = {}
        if self._ownership is None:
            return np.zeros(int(counts.sum()), np.int64)
        return self._ownership.tokens_of(step, requests, first, counts)

    def follows(self, known: KnownLayer) -> bool:
        """Answer whether the slots that a layer reads are followed."""
        if self._ownership is None or not known.is_decoder:
            return False
        group = self._layers.groups.get(known.reads)
        if group is not None and group.unchecked:
            self._state.tally.unchecked[group.unchecked] += 1
        return group is not None and not group.unchecked

    def wrote(self, known: KnownLayer, step: Step, slot_mapping: torch.Tensor) -> None:
        """Follow a layer's cache write."""
        if self.follows(known):
            assert self._ownership is not None
            found = self._ownership.wrote(known.name, step, self.host(slot_mapping))
            self._state.tally.observe(found)

    def read(self, known: KnownLayer, step: Step, reads: ReadArguments) -> None:
        """Check the slots that a layer reads."""
        if self.follows(known):
            assert self._ownership is not None
            self._state.tally.observe(self._ownership.read(known, step, reads))

    def read_by_metadata(self, known: KnownLayer, step: Step) -> None:
        """Check the slots that a layer reads by the batch's metadata, if its op is unknown."""
        common, size = self._state.metadata[known.name]
        reads = ReadArguments(
            block_table=self.host(common.block_table_tensor),
            seq_lens=self.host(common.seq_lens),
            query_lens=None,
            block_size=size,
            sliding_window=int(getattr(known.layer, "sliding_window", None) or 0),
        )
        self.read(known, step, reads)

    def follow_graph(self, step: Step) -> None:
        """Follow a step inside a full CUDA graph, in which Python does not run, by its metadata."""
        metadata = self._state.metadata
        layers = [known for known in self._layers if known.name in metadata]
        for known in layers:
            if known.reads == known.name:
                self.wrote(known, step, metadata[known.name][0].slot_mapping)
        for known in layers:
            self.read_by_metadata(known, step)

    def host(self, tensor: torch.Tensor) -> Integers:
        """Return an index tensor as an array; from a GPU it is copied once per step."""
        if tensor.device.type == "cpu":
            return tensor.detach().numpy().astype(np.int64)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self._host:
            self._host[key] = tensor.detach().cpu().numpy().astype(np.int64)
        return self._host[key]
