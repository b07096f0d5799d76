"""Step: the batch of one step of the engine, as the scheduler made it."""

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The requests of a running engine: their token ids, and a number that identifies each prefix.
#
# With prefix caching a request reads blocks that another one wrote. That is right if the two requests have
# the same tokens from the first to the one that is read. So a written token is identified by its prefix: a
# hash of all token ids up to it, h(p) = h(p - 1) · M + mix(token p) modulo 2⁶⁴, computed with prefix sums.

Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]

_M = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_M_INVERSE = pow(_M, -1, 1 << 64)


@functools.cache
def _powers(base: int, size: int) -> Hashes:
    """Return base^p modulo 2⁶⁴ for p < size."""
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    found: Hashes = np.multiply.accumulate(factors)
    return found


def _mixed(tokens: Integers) -> Hashes:
    """Return a well mixed number for each token id (the finaliser of splitmix64)."""
    x = tokens.astype(np.uint64) + np.uint64(_M)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def text_number(text: str) -> int:
    """Return a number of 63 bits for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Request:
    """A request and its tokens.

    - ``name``: vLLM's request id. ``number``: unique in this process, from 1.
    - ``length``: how many of its token ids are known; ``prompt_len``: how many of them came with the request.
    - ``is_running``: False while it is preempted and after it finished: then its blocks may be given to
      others. ``has_tokens``: False if its token ids are unknown; ``prefixes`` then mean nothing.
    """

    def __init__(self, name: str, number: int, seed: str = "") -> None:
        self.name, self.number = name, number
        self.is_running = True
        self.has_tokens = True
        self.length = self.prompt_len = 0
        self._seed = np.uint64(text_number(seed)) if seed else np.uint64(0)
        self._prefixes = np.zeros(64, np.uint64)
        self._marks: list[
            tuple[int, int, int]
        ] = []  # images and such: first, end, number of the content

    @property
    def prefixes(self) -> Hashes:
        """Return the hash of the tokens up to each known position, [length]."""
        return self._prefixes[: self.length]

    def mark(self, first: int, end: int, content: str) -> None:
        """Tell apart placeholder tokens of different images: those from ``first`` to ``end``."""
        self._marks.append((first, end, text_number(content)))

    def set_prompt(self, tokens: Integers) -> None:
        """Set the token ids that came with the request."""
        self.set_tokens(0, tokens)
        self.prompt_len = self.length

    def set_tokens(self, first: int, tokens: Integers) -> None:
        """Set the token ids from position ``first`` on, except those of the prompt, and forget later ones.

        If the tokens before ``first`` are unknown, ``has_tokens`` becomes False.
        """
        if first < self.prompt_len:
            tokens, first = tokens[self.prompt_len - first :], self.prompt_len
            if not len(tokens):
                return
        if first > self.length or (len(tokens) and int(tokens.min()) < 0):
            self.has_tokens = False
        end = first + len(tokens)
        if end > len(self._prefixes):
            grown = np.zeros(max(end, 2 * len(self._prefixes)), np.uint64)
            grown[: self.length] = self.prefixes
            self._prefixes = grown
        mixed = _mixed(np.asarray(tokens, np.int64))
        for start, stop, content in self._marks:
            inside = slice(max(start - first, 0), max(stop - first, 0))
            mixed[inside] ^= np.uint64(content)
        count = len(tokens) + 1
        size = 1 << len(tokens).bit_length()  # so few sizes are kept
        up, down = (_powers(base, size)[:count] for base in (_M, _M_INVERSE))
        before = self._prefixes[first - 1] if first else self._seed
        sums = np.cumsum(mixed * down[:-1], dtype=np.uint64) * up[:-1]
        self._prefixes[first:end] = sums + before * up[1:]
        self.length = end


class Requests:
    """The requests of this process, by vLLM's id and by number."""

    def __init__(self) -> None:
        self._by_name: dict[str, Request] = {}
        self._by_number: dict[int, Request] = {}
        self._next = 1

    def __getitem__(self, name: str) -> Request:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_number.values())

    def of_number(self, number: int) -> Request:
        """Return the request with a number."""
        return self._by_number[number]

    def update(self, scheduled: Any) -> None:
        """Take note of vLLM's SchedulerOutput: requests that finished, were preempted, or are new."""
        for name in scheduled.finished_req_ids:
            if name in self._by_name:
                self._by_name.pop(name).is_running = False
        for name in getattr(scheduled, "preempted_req_ids", None) or ():
            if name in self._by_name:
                self._by_name[name].is_running = False
        for new in scheduled.scheduled_new_reqs:
            lora = getattr(new, "lora_request", None)
            one = self.add(new.req_id, f"lora {lora.lora_int_id}" if lora is not None else "")
            for feature in getattr(new, "mm_features", None) or ():
                place = feature.mm_position
                one.mark(place.offset, place.offset + place.length, str(feature.identifier))
            tokens: Sequence[int] | None = getattr(new, "prefill_token_ids", None)
            tokens = tokens if tokens is not None else new.prompt_token_ids
            if tokens is None:
                one.has_tokens = False
            else:
                one.set_prompt(np.asarray(tokens, np.int64))
        for name in scheduled.num_scheduled_tokens:
            if name not in self._by_name:
                self.add(name).has_tokens = False
            self._by_name[name].is_running = True

    def add(self, name: str, seed: str = "") -> Request:
        """Add a request, or replace the one of that name."""
        one = Request(name, self._next, seed)
        self._next += 1
        self._by_name[name] = self._by_number[one.number] = one
        return one

    def forget_except(self, numbers: Iterable[int]) -> None:
        """Drop finished requests, except those with the given numbers."""
        kept = {*numbers, *(one.number for one in self._by_name.values())}
        self._by_number = {n: one for n, one in self._by_number.items() if n in kept}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLayer:
    """An attention layer of the model.

    - ``name``: vLLM's. ``number``: the first number in it, or None. ``index``: counted from 0.
    - ``layer``, ``impl``: vLLM's objects. ``reads``: the name of the layer whose cache it reads.
    - ``is_decoder``: False for encoders and cross attention; only their values are checked.
    """

    name: str
    number: int | None
    index: int
    layer: Any
    impl: Any
    reads: str
    is_decoder: bool


@dataclass(slots=True, kw_only=True, eq=False)
class LayerCall:
    """A call that runs: its layer and method, and what was seen of it so far."""

    known: KnownLayer
    method: str
    is_in_op: bool = False
    ops: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The batch of a step.

    - ``number``: counted from 0. ``requests``: by row of the batch.
    - ``query_lens``: [num_reqs], the new tokens of each request, by the scheduler.
    - ``seq_lens``: [num_reqs], the position of each request's last new token, plus one.
    - ``tokens``: [num_tokens], the number of each new token in the TokenTable.
    """

    number: int
    requests: Sequence[Request]
    query_lens: Integers
    seq_lens: Integers
    tokens: Integers

    @property
    def starts(self) -> Integers:
        """Return the first new token of each request in the batch, [num_reqs + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.query_lens)])

    def request_of_row(self, row: int) -> tuple[int, Request]:
        """Return the row in the batch and the request of one new token."""
        seq = int(np.searchsorted(self.starts, row, side="right")) - 1
        return seq, self.requests[seq]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadArguments:
    """What an op, or the metadata of a layer, says about the cache reads of a batch.

    - ``block_table``: [n, max_blocks]; ``seq_lens``: [n]; ``query_lens``: [n] or None if unknown.
    - ``first``: the row of the step's batch that is row 0 here.
    - ``block_size``: tokens per block; ``sliding_window``: keys that a row sees, 0 for all.
    """

    block_table: Integers
    seq_lens: Integers
    query_lens: Integers | None
    block_size: int
    sliding_window: int = 0
    first: int = 0

    def is_same(self, other: "ReadArguments") -> bool:
        """Answer whether another op reads the same slots."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return all(one is two or np.array_equal(one, two) for one, two in pairs)


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A KV-cache group: its layers, which share block tables and slot numbers.

    - ``num_slots``, ``block_size``: of the cache, as the block manager counts.
    - ``unchecked``: why slots of the group are not followed, or "".
    """

    layers: tuple[str, ...]
    num_slots: int
    block_size: int
    unchecked: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Layers:
    """The layers of a runner: by the id of their implementation, and their groups by layer name."""

    by_impl: dict[int, KnownLayer] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    builders: set[type] = field(default_factory=set)

    def __iter__(self) -> Iterator[KnownLayer]:
        return iter(self.by_impl.values())


def layers_of(runner: Any) -> Layers:
    """Return the layers of a runner whose cache is allocated (vLLM 0.11.2 to 0.33.0)."""
    found = Layers()
    context = runner.vllm_config.compilation_config.static_forward_context
    for name, layer in context.items():
        impl = getattr(layer, "impl", None)
        if impl is None:
            continue
        digits = re.search(r"\d+", name)
        found.by_impl[id(impl)] = KnownLayer(
            name=name,
            number=int(digits.group()) if digits else None,
            index=len(found.by_impl),
            layer=layer,
            impl=impl,
            reads=getattr(layer, "kv_sharing_target_layer_name", None) or name,
            is_decoder=str(getattr(layer, "attn_type", "decoder")).rpartition(".")[2].lower()
            == "decoder",
        )
    config = runner.kv_cache_config
    for group in config.kv_cache_groups:
        spec, unchecked = group.kv_cache_spec, ""
        kinds = {type(spec).__name__, *(type(s).__name__ for s in _members(spec))}
        for kind in kinds:
            if kind.startswith(("Chunked", "Cross", "Encoder", "Mamba")):
                unchecked = f"slots of layers with a {kind}"
        size = int(spec.block_size)
        one = Group(
            layers=tuple(group.layer_names),
            num_slots=config.num_blocks * size,
            block_size=size,
            unchecked=unchecked,
        )
        found.groups |= dict.fromkeys(one.layers, one)
    for groups in runner.attn_groups:
        for attention_group in groups:
            builders = getattr(attention_group, "metadata_builders", None) or []
            found.builders |= {type(builder) for builder in builders}
            if getattr(attention_group, "kernel_block_stride", None):
                for name in attention_group.layer_names:
                    found.groups[name].unchecked = "slots of layers in a packed KV cache"
    return found


def _members(spec: Any) -> list[Any]:
    members = getattr(spec, "kv_cache_specs", None)
    return list(members.values()) if isinstance(members, dict) else []


def unchecked_slots(runner: Any) -> str:
    """Return why slots are not followed in this engine, or ""."""
    config, parallel = runner.vllm_config, runner.vllm_config.parallel_config
    if getattr(config, "kv_transfer_config", None) is not None:
        return "slots: a KV connector writes the cache, too"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            return f"slots: {name} is above 1"
    if getattr(parallel, "enable_dbo", False) or int(getattr(parallel, "num_ubatches", 1) or 1) > 1:
        return "slots: the batch is split into microbatches"
    return ""
