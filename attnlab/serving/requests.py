"""The requests of a running engine: their token ids, and a number that identifies each prefix.

With prefix caching a request reads blocks that another one wrote. That is right if the two requests have the
same tokens from the first to the one that is read. So a written token is identified by its prefix: a hash of
all token ids up to it, h(p) = h(p - 1) · M + mix(token p) modulo 2⁶⁴, computed with prefix sums.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Hashes = NDArray[np.uint64]

_M = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_M_INVERSE = pow(_M, -1, 1 << 64)


class _Powers:
    """M^p and M^-p modulo 2⁶⁴ for p from 0, as far as they were asked for."""

    def __init__(self) -> None:
        self._up = self._down = np.ones(1, np.uint64)

    def upto(self, end: int) -> tuple[Hashes, Hashes]:
        """Return M^p and M^-p for p < end."""
        if len(self._up) < end:
            size = max(end, 2 * len(self._up))
            self._up, self._down = (_powers(base, size) for base in (_M, _M_INVERSE))
        return self._up[:end], self._down[:end]


def _powers(base: int, size: int) -> Hashes:
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    found: Hashes = np.multiply.accumulate(factors)
    return found


_POWERS = _Powers()


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
        up, down = _POWERS.upto(len(tokens) + 1)
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
            self._add(new)
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

    def _add(self, new: Any) -> None:
        """Add the request of vLLM's NewRequestData with the tokens that are known."""
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
