"""Lengths at the edges of what a kernel processes at once: tiles, blocks of the cache, and parts.

The edges are read from the parameters of the kernels' launches: the op is called, but no program runs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.ops import OPS, PREFILL, WRAPPER
from attnlab.checker.knobs import LENGTHS, Knob, Value
from attnlab.kernels.backend import Backend
from attnlab.kernels.triton.launch_plan import LaunchParameters, recording_launches
from attnlab.lab.lab import Lab

# Parameters of kernels that count new tokens, keys, and tiles that belong together.
_QUERIES = re.compile(r"BLOCK_[MQ]")
_KEYS = re.compile(r"(PHYSICAL_)?BLOCK(_N|_SIZE)?|TILE_SIZE|PAGE_SIZE")
_TILES = re.compile(r"NUM_(SEGMENTS_PER_SEQ|KV_SPLITS)|num_unroll_cache")
_LONGEST = 160  # tokens; longer edges take long under the interpreter
_FEW = 3  # new tokens where their number does not matter
_SEQS = 3  # sequences of a case


@dataclass(frozen=True, slots=True)
class Edges:
    """The numbers of new tokens, and of keys, at which the kernels begin another tile, block or part."""

    queries: frozenset[int] = frozenset()
    keys: frozenset[int] = frozenset()

    def __or__(self, other: "Edges") -> "Edges":
        return Edges(self.queries | other.queries, self.keys | other.keys)


# Those of the models, and of kernels whose launches are not interpreted.
_USUAL = Edges(frozenset({16}), frozenset({16, 32, 64, 128}))
_BLOCK = Edges(frozenset({16}), frozenset({16}))  # of ops whose launches have no edges


def edges(backend: Backend, cases: Iterable[Case]) -> Edges:
    """Return the edges of the launches of some Cases."""
    if backend.name != "vllm" or backend.device != "cpu":
        return _USUAL
    found = Edges()
    for case in cases:
        for launch in launches(backend, case):
            found |= edges_of(launch)
    return found if found.keys and found.queries else found | _BLOCK


def launches(backend: Backend, case: Case) -> list[LaunchParameters]:
    """Return the launches of a Case on interpreted kernels; none if the release refuses it."""
    lab = Lab(source=backend.path, device="cpu")
    with recording_launches() as found:
        try:
            lab.run(case)
        except AttnLabError:
            return []
    return found


def edges_of(launch: LaunchParameters) -> Edges:
    """Return the edges of a launch: the sizes of its tiles, and of tiles that one step or part has."""
    keys, tiles = _matching(launch, _KEYS), _matching(launch, _TILES)
    several = {key * count for key in keys for count in tiles}
    return Edges(_short(_matching(launch, _QUERIES)), _short(keys | several))


def _matching(launch: LaunchParameters, pattern: re.Pattern[str]) -> set[int]:
    return {number for name, number in launch.numbers.items() if pattern.fullmatch(name)}


def _short(numbers: set[int]) -> frozenset[int]:
    return frozenset(n for n in numbers if 4 <= n <= _LONGEST)


def lengths_knob(op: str, found: Edges) -> Knob:
    """Return the knob of lengths: each edge, one token less and one more, as length of a sequence; and for
    ops with prefill as number of new tokens and as length of a context."""
    seqs = [(1, n - 1) for n in _around(found.keys)]
    contexts = [0, *_around(found.keys)]
    longest_first = _around(found.queries)[::-1]
    if op == PREFILL:  # one program has all rows of a sequence, whether it is a decode or not
        seqs = [*zip_longest(longest_first[: len(contexts)], contexts, fillvalue=_FEW)]
    elif not OPS[op].context:
        seqs = [(n, 0) for n in (1, _FEW, *_around(found.queries | found.keys))]
    elif op == WRAPPER:  # its prefill rows are those of PREFILL
        seqs += [(_FEW, n) for n in contexts[:4]]
    elif OPS[op].prefill:
        seqs += zip_longest(longest_first[: len(contexts)], contexts, fillvalue=_FEW)
    return Knob(LENGTHS, tuple(_values(seqs)), (op,))


def _around(numbers: Iterable[int]) -> list[int]:
    return sorted({n for number in numbers for n in (number - 1, number, number + 1)})


def _values(seqs: list[tuple[int, int]]) -> list[Value]:
    """Distribute sequences, each (query_len, ctx_len), over values; the first value is the shortest."""
    ordered = sorted(seqs, key=sum)
    count = max(2, len(seqs) // _SEQS)
    made = sorted((ordered[i::count] for i in range(count)), key=lambda one: sum(map(sum, one)))
    return [
        Value(
            ", ".join(f"{query_len} after {ctx_len}" for query_len, ctx_len in one),
            {"query_lens": tuple(q for q, _ in one), "ctx_lens": tuple(c for _, c in one)},
        )
        for one in made
    ]
