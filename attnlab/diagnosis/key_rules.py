"""KeyRule: a set of keys of each row, stated as a rule, such as "the keys of the last block"."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.problem import Problem
from attnlab.diagnosis.pattern_places import TILES

_MOST_BLOCKS = 64  # blocks of a sequence that are tried one by one
_MOST_POSITIONS = 256  # positions that are tried one by one
Members = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """Some keys of each row.

    - ``text``: the rule in words, as the subject of a sentence in the plural.
    - ``members``: returns the keys of a sequence, [1 or rows, keys] bool, for its index and the positions
      of its rows, [rows, 1] int64.
    - ``hidden``: the rule is about keys that the rows must not see.
    """

    text: str
    members: Members
    hidden: bool = False


def key_rules(problem: Problem) -> Iterator[KeyRule]:
    """Yield the rules, the simplest first."""
    yield from _ends(problem)
    yield from _hidden(problem)
    size, of_cached = problem.call.block_size, _of_cached(problem)
    units = {size: "block", PARTITION_SIZE: "partition"}
    units |= {tile: "tile" for tile in TILES if tile != size}
    for unit, name in units.items():
        yield KeyRule(
            text=f"the keys of the last {name} of {unit}{of_cached}",
            members=_last_of(problem, unit),
        )
    for unit, name in units.items():
        yield from _single(problem, unit, name)
    for unit, name in units.items():
        first = KeyRule(text="", members=_between(problem, 0, unit))
        last = _last_of(problem, unit)
        yield KeyRule(text=f"all keys but the first {unit}", members=_not(first.members))
        yield KeyRule(
            text=f"all keys but those of the last {name} of {unit}{of_cached}", members=_not(last)
        )
    yield from _periodic(problem)
    longest = max(map(problem.seq_len, problem.computed_seqs()))
    for at in range(min(_MOST_POSITIONS, longest)):
        yield KeyRule(text=f"the keys at position {at}", members=_between(problem, at, at + 1))


def _periodic(problem: Problem) -> Iterator[KeyRule]:
    """Yield rules about every second key, and about one slot of every block."""

    def rule(text: str, size: int, rest: int) -> KeyRule:
        return KeyRule(
            text=text, members=lambda seq, position: (_keys(problem, seq) % size == rest)[None]
        )

    size = problem.call.block_size
    yield rule("the keys at odd positions", 2, 1)
    yield rule("the keys at even positions", 2, 0)
    for rest in (size - 1, *range(size - 1)) if size > 2 else ():
        yield rule(f"the keys in slot {rest} of every block of {size}", size, rest)


def _ends(problem: Problem) -> Iterator[KeyRule]:
    """Yield rules about the ends of a sequence, and about context and new tokens."""
    size = problem.call.block_size

    def after_last_full(seq: int, position: torch.Tensor) -> torch.Tensor:
        keys, cached = _keys(problem, seq), problem.cached_len(seq)
        return ((keys >= cached // size * size) & (keys < cached))[None]

    yield KeyRule(
        text="the newest keys of the sequences",
        members=lambda seq, position: (_keys(problem, seq) == problem.seq_len(seq) - 1)[None],
    )
    yield KeyRule(
        text="the keys of the rows' own tokens",
        members=lambda seq, position: _keys(problem, seq) == position,
    )
    yield KeyRule(text="the first keys of the sequences", members=_between(problem, 0, 1))
    yield KeyRule(
        text="the keys of the context",
        members=lambda seq, position: (_keys(problem, seq) < _ctx_len(problem, seq))[None],
    )
    yield KeyRule(
        text="the keys of the new tokens",
        members=lambda seq, position: (_keys(problem, seq) >= _ctx_len(problem, seq))[None],
    )
    yield KeyRule(
        text="the last keys of the context",
        members=lambda seq, position: (_keys(problem, seq) == _ctx_len(problem, seq) - 1)[None],
    )
    yield KeyRule(
        text=f"the cached keys after the last full block of {size}", members=after_last_full
    )
    window = problem.call.sliding_window
    if window:
        yield KeyRule(
            text="the oldest keys of the window",
            members=lambda seq, position: _keys(problem, seq) == position - window + 1,
        )


def _hidden(problem: Problem) -> Iterator[KeyRule]:
    """Yield rules about keys after a row's own, and before its window."""

    def rule(text: str, members: Members) -> KeyRule:
        return KeyRule(text=text, members=members, hidden=True)

    window = problem.call.sliding_window
    yield rule(
        "the keys right after the rows' own tokens",
        lambda seq, position: _keys(problem, seq) == position + 1,
    )
    yield rule("all later keys", lambda seq, position: _keys(problem, seq) > position)
    if window:
        yield rule(
            "the keys right before the window",
            lambda seq, position: _keys(problem, seq) == position - window,
        )
        yield rule(
            "all keys before the window",
            lambda seq, position: _keys(problem, seq) <= position - window,
        )
        yield rule(
            "the keys of the context before the window",
            lambda seq, position: (
                (_keys(problem, seq) <= position - window)
                & (_keys(problem, seq) < _ctx_len(problem, seq))
            ),
        )
        yield rule(
            "the new keys before the window",
            lambda seq, position: (
                (_keys(problem, seq) <= position - window)
                & (_keys(problem, seq) >= _ctx_len(problem, seq))
            ),
        )


def _single(problem: Problem, unit: int, name: str) -> Iterator[KeyRule]:
    """Yield one rule for each block, tile or partition of the longest sequence."""
    longest = max(map(problem.seq_len, problem.computed_seqs()))
    for i in range(min(_MOST_BLOCKS, -(-longest // unit))):
        yield KeyRule(
            text=f"the keys at positions {i * unit}–{(i + 1) * unit - 1} ({name} {i} of {unit})",
            members=_between(problem, i * unit, (i + 1) * unit),
        )


def _keys(problem: Problem, seq: int) -> torch.Tensor:
    """Return the positions of a sequence's keys."""
    return torch.arange(problem.seq_len(seq))


def _ctx_len(problem: Problem, seq: int) -> int:
    return problem.seq_len(seq) - problem.query_len(seq)


def _between(problem: Problem, start: int, stop: int) -> Members:
    def members(seq: int, position: torch.Tensor) -> torch.Tensor:
        keys = _keys(problem, seq)
        return ((keys >= start) & (keys < stop))[None]

    return members


def _last_of(problem: Problem, unit: int) -> Members:
    """Return the members of the last block, tile or partition of the cached keys."""

    def members(seq: int, position: torch.Tensor) -> torch.Tensor:
        keys, cached = _keys(problem, seq), problem.cached_len(seq)
        return ((keys >= (cached - 1) // unit * unit) & (keys < cached))[None]

    return members


def _of_cached(problem: Problem) -> str:
    """Return whose keys the last tile of the cached keys holds, in words: "" if all keys are cached."""
    seqs = problem.computed_seqs()
    if all(problem.cached_len(seq) == problem.seq_len(seq) for seq in seqs):
        return ""
    if all(problem.cached_len(seq) == _ctx_len(problem, seq) for seq in seqs):
        return " of the context"
    return " of the cached keys"


def _not(members: Members) -> Members:
    return lambda seq, position: ~members(seq, position)
