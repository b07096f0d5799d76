"""Hostile cases: small Cases that keep every contract and exercise what kernels often get wrong.

All cases have shuffled blocks, three spare blocks, ragged lengths at the edges of blocks, and NaN in every
slot that was never written. The first ones have few features each (``variants.toml``); the rest combine
them.
"""

import contextlib
import hashlib
import json
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from itertools import combinations, islice, product, zip_longest
from pathlib import Path
from typing import Any

import covertable

from attnlab.case.case import Case
from attnlab.case.declaration import field_type
from attnlab.case.errors import AttnLabError, InvalidCase, KernelFailed, KernelRejected, Unavailable
from attnlab.case.fields import is_plugin
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.case.op_arguments import OP_ARGUMENTS
from attnlab.case.ops import OPS, PREFILL, UNIFIED, WRAPPER, Op
from attnlab.kernels.backend import Backend
from attnlab.kernels.cache_folder import private_folder, writing
from attnlab.kernels.triton.launch_plan import LaunchParameters, recording_launches
from attnlab.kernels.vllm.backend import VllmBackend, check_fp8_format
from attnlab.lab.lab import Lab

# Variants: cases with few features each, of the table variants.toml.


@dataclass(frozen=True, slots=True)
class Variant:
    """The fields of a Case that a variant changes, and why kernels get them wrong.

    ``ops``: the ops that it is for, by name or by what their records state; empty for all that support it.
    """

    fields: dict[str, Any]
    reason: str
    ops: tuple[str, ...] | Callable[[Op], bool] = ()

    def is_for(self, op: str) -> bool:
        """Answer whether the variant is for an op."""
        if callable(self.ops):
            return self.ops(OPS[op])
        return not self.ops or op in self.ops

    def fields_of(self, op: str) -> dict[str, Any]:
        """Return the fields for an op; of [partitioned], with a whole partition for each later sequence."""
        if self.ops is not _partitioned:
            return self.fields
        contexts = self.fields["ctx_lens"]
        whole = (OPS[op].partition_size * n for n in reversed(range(len(contexts))))
        return {**self.fields, "ctx_lens": tuple(map(sum, zip(contexts, whole, strict=True)))}


def _partitioned(op: Op) -> bool:
    """Answer whether other kernels of an op take long sequences, in partitions."""
    return op.partition_size > 0


_TABLES = tomllib.loads((files(__package__) / "variants.toml").read_text(encoding="utf-8"))
_SORTS: dict[str, Callable[[Op], bool]] = {
    # An op that computes, or merges, attention of several new tokens.
    "scoring": lambda op: op.prefill and op.is_triton and not op.writes_cache,
    "splitting": lambda op: op.num_splits is not None,
    "partitioned": _partitioned,
    "merging": lambda op: op.merges,
}
_ROW = re.compile(r"(?:\[([^]]*)\])?(.*)")


def _table_fields(text: str) -> dict[str, Any]:
    """Return the fields of a Case that the words of a row set."""
    fields: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            fields[name] = field_type(name).check(name, field_type(name).parse(name, value))
        elif word != "plain":
            fields |= _table_fields(_TABLES["words"][word])
    return fields


def _table(name: str) -> Iterator[Variant]:
    """Yield the variants of a table."""
    for row, reason in _TABLES[name].items():
        match = _ROW.fullmatch(row)
        assert match is not None
        ops = match[1] or ""
        yield Variant(_table_fields(match[2]), reason, _SORTS.get(ops, tuple(ops.split())))


# Query and context lengths around the edges of blocks, tiles and partitions.
LENGTHS = tuple(
    {"query_lens": query_lens, "ctx_lens": ctx_lens}
    for query_lens, ctx_lens in (
        ((1, 5, 1), (16, 15, 31)),
        ((1, 17), (15, 0)),
        ((2, 1, 1), (33, 63, 1)),
        ((1, 9), (64, 40)),
        ((1, 1), (129, 1)),
        ((19, 1), (0, 48)),
    )
)
VARIANTS = (*_table("first"),)
# Of each op in benchmarks: all variants, so that the further ones run, too, and rows of the covering design.
DEFAULT_CASES = len(VARIANTS) + 5
_LENGTHS = _table_fields("lengths")
LATE_VARIANTS = (
    *_table("late"),
    *(
        Variant({**_LENGTHS, "op_argument": name}, f"Other strides: {one.summary}.")
        for name, one in OP_ARGUMENTS.items()
        if one.strided is not None
    ),
    *_table("late_segments"),
)
_STATED = (
    *_table("values"),
    *_table("partitions"),
    *_table("stated"),
    *LATE_VARIANTS,
    *_table("last"),
)
# All of them: an op argument or a mask without a variant of its own has the plain one.
ARGUMENT_VARIANTS = (
    *_STATED,
    *(
        Variant({**_LENGTHS, **one.needs, "op_argument": name}, one.summary)
        for name, one in OP_ARGUMENTS.items()
        if name not in {variant.fields.get("op_argument") for variant in _STATED}
    ),
    *(
        Variant(
            {**_LENGTHS, "mask": name, **({"sliding_window": 5} if one.needs_window else {})},
            one.summary,
        )
        for name, one in MASKS.items()
        if name != CAUSAL and name not in {variant.fields.get("mask") for variant in _STATED}
    ),
    *_table("further"),
)


# Knobs: what the hostile cases vary, as one table. A knob is added in one line, a value likewise.
#
# The values of a knob are named. The first is plain. Two values that set the same field, or that the rules
# of a Case refuse together, are not combined.


# The fields of a Case that each value of a knob sets, by its name.
Values = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Knob:
    """A property of a case, with its values, the plain one first, and which ops' results depend on it."""

    name: str
    values: Values
    is_of: Callable[[Op], bool] = lambda op: True


def _knob(name: str, is_of: Callable[[Op], bool], **values: Mapping[str, Any]) -> Knob:
    """Return a knob; an underscore in the name of a value is a space."""
    return Knob(name, {text.replace("_", " "): fields for text, fields in values.items()}, is_of)


def _every(op: Op) -> bool:
    return True


def _attention(op: Op) -> bool:
    """Answer whether an op computes scores."""
    return op.scores


def _cached(op: Op) -> bool:
    """Answer whether an op gets a cache."""
    return op.cache_layout is not None


def _batched(op: Op) -> bool:
    """Answer whether an op gets the tokens of sequences."""
    return op.scores or op.writes_cache


def _mask(name: str, **fields: Any) -> dict[str, Any]:
    return {"mask": name, **fields}


def _argument(name: str, **fields: Any) -> dict[str, Any]:
    return {"op_argument": name, **fields}


MASK, CACHE, SPLIT, LENGTH_KNOBS = "mask", "cache", "split", "lengths"
_FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
KNOBS = (
    _knob(
        MASK,
        _attention,
        causal={},
        window_of_a_block={"sliding_window": 16},
        window_of_one_token={"sliding_window": 1},
        short_window={"sliding_window": 5},
        freed_blocks={"sliding_window": 20, "freed": "empty"},
        recycled_blocks={"sliding_window": 12, "freed": "recycled"},
        ALiBi={"alibi": True},
        bidirectional=_mask("bidirectional"),
        two_sided_window=_mask("bidirectional", sliding_window=7),
        causal_by_sequence=_mask("causal_by_sequence"),
        ranges=_mask("ranges"),
        ranges_in_window=_mask("ranges_in_window", sliding_window=5),
        prefix_and_window=_mask("prefix_and_window", sliding_window=6),
        chunks=_mask("chunks", sliding_window=16),
        tree=_mask("tree"),
        tree_in_window=_mask("tree", sliding_window=7),
    ),
    _knob(
        CACHE,
        _cached,
        plain={},
        fp8=_FP8,
        packed_values={"interleave_v": True},
        fp8_query=_argument("fp8_query", **_FP8),
        int8_per_token_head=_argument("int8_per_token_head"),
        fp8_per_token_head=_argument("fp8_per_token_head"),
    ),
    _knob(SPLIT, _attention, none={"num_splits": 0}, four={"num_splits": 4}),
    _knob(
        "heads",
        _every,
        two_per_KV_head={"num_heads": 4, "num_queries_per_kv": 2},
        three_per_KV_head={"num_heads": 6, "num_queries_per_kv": 3},
        one_per_KV_head={"num_heads": 2, "num_queries_per_kv": 1},
        five_of_one_KV_head={"num_heads": 5, "num_queries_per_kv": 5},
    ),
    _knob(
        "head size",
        _every,
        **{"64": {"head_size": 64}, "80": {"head_size": 80}, "32": {"head_size": 32}},
    ),
    _knob(
        "block size",
        _cached,
        **{"16": {"block_size": 16}, "48": {"block_size": 48}, "8": {"block_size": 8}},
    ),
    _knob(
        "dtype", _every, float16={}, float32={"dtype": "float32"}, bfloat16={"dtype": "bfloat16"}
    ),
    _knob(
        "strides", _batched, contiguous={}, fused={"kv_layout": "fused"}, HND={"kv_layout": "HND"}
    ),
    _knob("padding", _every, none={}, five={"pad_batch": 5, "max_blocks_per_seq": 40}),
    _knob("sinks", _attention, none={}, one_per_head={"sinks": True}),
    _knob("soft cap", _attention, none={}, **{"2": {"softcap": 2.0}}),
    _knob("scale", _attention, given={}, default={"sm_scale": None}, large={"sm_scale": 16.0}),
    _knob("index dtype", _batched, int32={}, int64={"stage": "int64"}),
)
TRIPLE = (MASK, CACHE, SPLIT)


def values_of(op: str, lengths: Knob) -> dict[str, Values]:
    """Return the values of the knobs of an op by the names of knob and value; ``lengths`` is one of them."""
    return {knob.name: knob.values for knob in (*KNOBS, lengths) if knob.is_of(OPS[op])}


# Covering design: rows of knob values in which every allowed pair occurs, and every allowed triple of mask,
# cache kind and split.
#
# covertable makes the rows. What is allowed follows from the rules of a Case: the values of a pair must fit
# when all other knobs are plain, and every row must be a Case.

Row = dict[str, str]  # the name of a value by the name of its knob
Tuple = tuple[tuple[str, str], ...]  # the same for some knobs
Make = Callable[[Mapping[str, Any]], object]  # returns the Case of fields, or raises InvalidCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The knobs of an op, and what is not allowed.

    - ``values``: the values by the names of knob and value; each is allowed alone.
    - ``refused``: the reason of each value, pair and triple that is not allowed.
    - ``make``: returns the Case of a row's fields.
    """

    values: Mapping[str, Values]
    refused: Mapping[Tuple, str]
    make: Make

    def fields(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a Case that a row sets; raise InvalidCase if two values set one field."""
        fields: dict[str, Any] = {}
        for knob, name in row.items():
            for field, value in self.values[knob][name].items():
                if field in fields and fields[field] != value:
                    raise InvalidCase(f"two values set {field}", field=field)
                fields[field] = value
        return fields

    def plain(self) -> Row:
        """Return the row of plain values."""
        return {knob: next(iter(values)) for knob, values in self.values.items()}

    def wanted(self) -> Iterator[Tuple]:
        """Yield every allowed pair, and every allowed triple of mask, cache kind and split."""
        triple = [knob for knob in self.values if knob in TRIPLE]
        groups = [*combinations(self.values, 2), *([tuple(triple)] if len(triple) == 3 else [])]
        for knobs in groups:
            for names in product(*(self.values[knob] for knob in knobs)):
                entry = tuple(zip(knobs, names, strict=True))
                if not self.reason(entry):
                    yield entry

    def reason(self, entry: Tuple) -> str:
        """Return why a pair or triple is not allowed, or ""."""
        sizes = range(2, len(entry) + 1)
        parts = (part for size in sizes for part in combinations(entry, size))
        return next((self.refused[part] for part in parts if part in self.refused), "")

    def rows(self, seed: int) -> Iterator[Row]:
        """Yield the rows, those that cover most first. covertable looks up places faster than names."""
        knobs = list(self.values)
        triple = [place for place, knob in enumerate(knobs) if knob in TRIPLE]
        made = covertable.make_async(
            [list(values) for values in self.values.values()],
            strength=2,
            sub_models=[{"fields": triple, "strength": 3}] if len(triple) == 3 else [],
            constraints=list(self._constraints(knobs)),
            salt=str(seed),
        )
        for names in made:
            yield dict(zip(knobs, names, strict=True))

    def _constraints(self, knobs: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the constraints in covertable's form: of each pair of knobs, and of whole rows."""
        known = {
            tuple(knobs.index(knob) for knob, _ in pair) for pair in self.refused if len(pair) > 1
        }
        for one, other in sorted(known):

            def is_allowed(row: Mapping[int, str], one: int = one, other: int = other) -> bool:
                return ((knobs[one], row[one]), (knobs[other], row[other])) not in self.refused

            yield {"operator": "fn", "requires": [one, other], "evaluate": is_allowed}

        def is_case(row: Mapping[int, str]) -> bool:
            return not self.refusal({knob: row[place] for place, knob in enumerate(knobs)})

        yield {"operator": "fn", "requires": list(range(len(knobs))), "evaluate": is_case}

    def refusal(self, row: Row) -> str:
        """Return why a row is not a Case, or ""."""
        try:
            self.make(self.fields(row))
        except InvalidCase as error:
            return str(error)
        return ""


def find_design(
    values: Mapping[str, Values], make: Make, refusal: Callable[[Any], str] = lambda case: ""
) -> Design:
    """Return the design of some knobs, without the values that are not allowed alone.

    ``refusal``: why the op itself refuses what ``make`` returned, or "". Such a row would run nothing, so its
    pairs would be covered in name only.
    """
    refused: dict[Tuple, str] = {}
    every = Design(values=values, refused=refused, make=make)
    kept: dict[str, dict[str, Mapping[str, Any]]] = {}
    for knob, named in values.items():
        kept[knob] = {}
        made = list[object]()
        for name, value in named.items():
            row = {**every.plain(), knob: name}
            why = every.refusal(row)
            if not why and (case := make(every.fields(row))) in made:
                why = "it changes nothing"
            why = why or refusal(case)
            if why:
                refused[((knob, name),)] = why
            else:
                made.append(case)
                kept[knob][name] = value
    kept = {knob: named for knob, named in kept.items() if len(named) > 1}
    design = Design(values=kept, refused=refused, make=make)
    for one, other in combinations(kept, 2):
        for names in product(kept[one], kept[other]):
            entry = ((one, names[0]), (other, names[1]))
            if why := design.refusal({**design.plain(), **dict(entry)}):
                refused[entry] = why
    return design


def uncovered(design: Design, rows: Iterable[Mapping[str, str]]) -> list[Tuple]:
    """Return the allowed pairs and triples that no row has."""
    made = [set(row.items()) for row in rows]
    return [entry for entry in design.wanted() if not any(row.issuperset(entry) for row in made)]


# Lengths at the edges of what a kernel processes at once: tiles, blocks of the cache, and parts.
#
# The edges are read from the parameters of the kernels' launches: the op is called, but no program runs.

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
    """Return the edges of the launches of some Cases, and of one and two parts of their sequences."""
    if not backend.is_interpreted:
        return _USUAL
    found = Edges()
    for case in cases:
        if (step := OPS[case.op].split_step or 1) > 1:
            found |= Edges(keys=frozenset({step, 2 * step}))
        for launch in launches(backend, case):
            found |= edges_of(launch)
    return found if found.keys and found.queries else found | _BLOCK


def launches(backend: Backend, case: Case) -> list[LaunchParameters]:
    """Return the launches of a Case on interpreted kernels; none if the release refuses it."""
    return _call_op(Lab(source=backend.path, device="cpu"), case)[0]


def _call_op(lab: Lab, case: Case) -> tuple[list[LaunchParameters], str]:
    """Call the op of a Case without a program; return its launches, and what it states as a limit, or ""."""
    with recording_launches() as found:
        try:
            lab.output(case)
        except KernelFailed:
            return found, ""
        except KernelRejected as error:
            return found, str(error)
        except AttnLabError:
            return [], ""
    return found, ""


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
    ops with prefill as number of new tokens and as length of a context; a value has those of a partition."""
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
    values = _values(seqs)
    if size := OPS[op].partition_size:
        values |= _value([(1, n - 1) for n in _around({size})])
    return Knob(LENGTH_KNOBS, values)


def _around(numbers: Iterable[int]) -> list[int]:
    return sorted({n for number in numbers for n in (number - 1, number, number + 1)})


def _values(seqs: list[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """Distribute sequences, each (query_len, ctx_len), over values; the first value is the shortest."""
    ordered = sorted(seqs, key=sum)
    count = max(2, len(seqs) // _SEQS)
    made = sorted((ordered[i::count] for i in range(count)), key=lambda one: sum(map(sum, one)))
    return {name: fields for one in made for name, fields in _value(one).items()}


def _value(seqs: list[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """Return the value of sequences, each (query_len, ctx_len), by its name."""
    text = ", ".join(f"{query_len} after {ctx_len}" for query_len, ctx_len in seqs)
    queries, contexts = zip(*seqs, strict=True)
    return {text: {"query_lens": queries, "ctx_lens": contexts}}


# The rows of a covering design, kept in the cache folder: covertable needs seconds for many knobs.


def design_rows(design: Design, seed: int) -> list[Row]:
    """Return the rows of a design, from the cache folder if they were made before."""
    knobs = {knob: list(values) for knob, values in design.values.items()}
    inputs = [knobs, sorted(map(str, design.refused)), seed, version("covertable")]
    name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    try:
        file = private_folder("designs") / f"{name}.json"
        if not file.is_file():
            _write(file, list(design.rows(seed)))
        rows: list[Row] = json.loads(file.read_text())
    except Unavailable:  # no folder can be written
        return list(design.rows(seed))
    return rows


def _write(file: Path, rows: list[Row]) -> None:
    """Write the rows in one step, so that other processes read all of them or none."""
    with writing():
        partial = file.with_suffix(f".{hashlib.sha256(repr(rows).encode()).hexdigest()[:8]}")
        partial.write_text(json.dumps(rows))
        partial.replace(file)


DEFAULTS: dict[str, Any] = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 64,
    "block_size": 16,
    "sm_scale": 0.125,
    "stage": "sound",
    "fill": "all_rows",
    "kv_layout": "contiguous",
    "distribution": "normal",
    "empty_slots": "nan",
    "output_init": "nan",
    "reference_dtype": "float64",
}
_LONGEST_SPLIT = 8  # MAX_3D_QUERY_LEN of unified_attention (0.33.0)
_SPARE_BLOCKS = 3
_LENS = ("query_lens", "ctx_lens")
_EVERYWHERE = {"mask", "distribution"}  # fields of variants that run on every backend
_MOST_ROWS = 3  # of a sequence, for merge_attn_states
_SPLITS = (None, 0, 4)  # of the variants in turn: as vLLM splits, not at all, in four parts


def hostile_cases(
    backend: Backend, op: str, platform: str, count: int | None, seed: int
) -> Iterator[Case]:
    """Yield ``count`` Cases of an op, the most informative first; None for all.

    First each variant with fixed lengths, then the Cases of ARGUMENT_VARIANTS, which are not counted, then
    the rows of the covering design. Variants that the op or the backend does not support are skipped. The
    Cases of a smaller ``count`` are the first of those of a larger one.
    """
    if not backend.has_op(op):
        return
    rng = random.Random(seed)
    first = [*islice(_variant_cases(backend, op, platform, rng), count)]
    yield from first
    if len(first) == count:
        return
    yield from _argument_cases(backend, op, platform, rng)
    left = None if count is None else count - len(first)
    yield from islice(covering_cases(backend, op, platform, seed), left)


def _variant_cases(backend: Backend, op: str, platform: str, rng: random.Random) -> Iterator[Case]:
    """Yield a Case of each variant that the op and the backend support, two if a split would hide rows."""
    for i, variant in enumerate(VARIANTS):
        if not variant.is_for(op):
            continue
        lengths, splits = LENGTHS[i % len(LENGTHS)], {"num_splits": _SPLITS[i % len(_SPLITS)]}
        fields = {**lengths, **(splits if OPS[op].num_splits else {}), **variant.fields}
        seed = rng.randrange(1 << 30)
        for form in ({}, *([{"num_splits": 0}] if _loses_rows(backend, op, fields) else [])):
            with contextlib.suppress(InvalidCase):
                yield _make_case(backend, op, platform, fields | form, seed)


def _loses_rows(backend: Backend, op: str, fields: Mapping[str, Any]) -> bool:
    """Answer whether a split leaves one new token per sequence, so that the op must also run without it."""
    is_split = op == UNIFIED and bool(fields.get("num_splits"))
    return is_split and max(fields["query_lens"]) > longest_split(backend) == 1


def _argument_cases(backend: Backend, op: str, platform: str, rng: random.Random) -> Iterator[Case]:
    """Yield the Cases with a mask, unusual values, or a window and ALiBi; of vLLM also with an argument.

    The others exercise what Triton's interpreter runs alone, but for those of partitions.
    """
    names = _EVERYWHERE | ({"op_argument"} if backend.name == "vllm" else set())
    for variant in ARGUMENT_VARIANTS:
        fields = set(variant.fields)
        is_everywhere = names & fields or fields >= {"alibi", "sliding_window"}
        is_everywhere = is_everywhere or variant.ops is _partitioned
        if not variant.is_for(op) or not (backend.is_interpreted or is_everywhere):
            continue
        seed = rng.randrange(1 << 30)
        with contextlib.suppress(InvalidCase):
            yield _make_case(backend, op, platform, variant.fields_of(op), seed)


def covering_cases(backend: Backend, op: str, platform: str, seed: int) -> Iterator[Case]:
    """Yield the Cases of the covering design, those that cover most first."""
    design = hostile_design(backend, op, platform)
    for i, row in enumerate(covering_rows(backend, op, platform, seed)):
        yield _make_case(backend, op, platform, design.fields(row), seed * 65537 + i)


@lru_cache(maxsize=8)
def covering_rows(backend: Backend, op: str, platform: str, seed: int) -> tuple[Row, ...]:
    """Return the rows of the covering design of an op, those that cover most first."""
    return tuple(design_rows(hostile_design(backend, op, platform), seed))


@lru_cache(maxsize=8)
def hostile_design(backend: Backend, op: str, platform: str) -> Design:
    """Return the design of an op: its knobs, with lengths at the edges of its tiles, and what it refuses."""

    def make(fields: Mapping[str, Any]) -> Case:
        case = _make_case(backend, op, platform, fields, 0)
        if missing := backend.missing_scales(case):
            raise InvalidCase(f"{op} has no argument for the scales of an {', '.join(missing)}")
        return case

    plain = [make(LENGTHS[0])]
    if OPS[op].num_splits:
        plain.append(plain[0].replace(num_splits=_SPLITS[-1]))
    values = values_of(op, lengths_knob(op, edges(backend, plain)))
    if not backend.is_interpreted:
        return find_design(values, make)
    lab = Lab(source=backend.path, device="cpu")
    return find_design(values, make, lambda case: _call_op(lab, case)[1])


_UNUSUAL = 0.2  # the share of knobs that a random case sets to another value than the plain one
_RANDOM_DTYPES = ("float16", "bfloat16", "float32")


def random_case(backend: Backend, op: str, platform: str, rng: random.Random) -> Case:
    """Return a Case with random knobs, lengths, heads and sizes. Raises InvalidCase if they do not fit."""
    fields: dict[str, Any] = {}
    for knob in KNOBS:
        others = [one for one in [*knob.values.values()][1:] if "op_argument" not in one]
        if knob.is_of(OPS[op]) and others and rng.random() < _UNUSUAL:
            fields |= rng.choice(others)
    group = rng.choice((1, 1, 2, 3, 4, 8))
    fields |= {
        "num_queries_per_kv": group,
        "num_heads": group * rng.choice((1, 2, 3)),
        "head_size": rng.choice((32, 64, 80, 128)),
        "block_size": rng.choice((8, 16, 32)),
        "dtype": rng.choice([one for one in _RANDOM_DTYPES if one in backend.dtypes]),
    }
    count = rng.randint(1, 4)
    fields["query_lens"] = tuple(
        rng.choice((1, rng.randint(1, 40), rng.randint(1, 40))) for _ in range(count)
    )
    fields["ctx_lens"] = tuple(
        rng.choice((0, rng.randint(1, 40), rng.randint(1, 200))) for _ in range(count)
    )
    return _make_case(backend, op, platform, fields, rng.randrange(1 << 30))


def _make_case(
    backend: Backend, op: str, platform: str, changes: Mapping[str, Any], seed: int
) -> Case:
    """Return the Case of some changed fields; raise InvalidCase if they do not fit."""
    _check_supported(backend, op, changes)
    _check_sizes(op, {**DEFAULTS, **changes})
    fields: dict[str, Any] = {
        "op": op,
        "backend": backend.name,
        "release": backend.release,
        "platform": OPS[op].platform_of(platform),
        "seed": seed,
        "dtype": OPS[op].dtype,
        **DEFAULTS,
        **changes,
        "empty_slots": OPS[op].poison,
    }
    if not OPS[op].prefill:
        fields["query_lens"] = (1,) * len(fields["query_lens"])
    if not OPS[op].context:
        fields["query_lens"] = tuple(map(sum, zip(*(fields[n] for n in _LENS), strict=True)))
        fields["ctx_lens"] = (0,) * len(fields["query_lens"])
    if OPS[op].merges:  # each row is a program of its own, so that a few are enough
        fields["query_lens"] = tuple(min(n, _MOST_ROWS) for n in fields["query_lens"])
    if is_plugin(backend.name) and fields["stage"] == "int64":
        fields["stage"] = "sound"
    if OPS[op].writes_cache:
        fields["fill"] = None  # only the context is in the cache; the op writes the new tokens
    has = {"sm_scale": backend.has_scale(op), "num_splits": backend.has_splits(op)}
    fields |= {name: None for name, is_there in has.items() if not is_there}
    if fields.get("num_splits") is not None:
        fields["num_splits"] = max(fields["num_splits"], OPS[op].min_splits)
    if op == UNIFIED and fields.get("num_splits"):
        fields |= _short_rows(fields, longest_split(backend))
    case = Case(**fields)
    backend.check_features(case)
    if isinstance(backend, VllmBackend) and backend.device == "cuda":
        check_fp8_format(case)
    return case.replace(num_blocks=case.total_blocks + _SPARE_BLOCKS)


def _check_sizes(op: str, fields: Mapping[str, Any]) -> None:
    """Raise InvalidCase for a size that the op's contract excludes."""
    for name in ("block_size", "head_size"):
        allowed = OPS[op].contract.get(f"{name}s")
        if allowed and fields[name] not in allowed:
            text = f"{name} must be one of {', '.join(map(str, allowed))} with {op}"
            raise InvalidCase(f"{text}, got {fields[name]}", field=name)


def _short_rows(fields: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return lengths with at most ``most`` new tokens per sequence, so that unified_attention splits them.

    The others become context, so that the sequences keep their lengths.
    """
    lens = [*zip(fields["query_lens"], fields["ctx_lens"], strict=True)]
    return {
        "query_lens": tuple(min(q, most) for q, _ in lens),
        "ctx_lens": tuple(c + max(0, q - most) for q, c in lens),
    }


@lru_cache(maxsize=64)
def longest_split(backend: Backend) -> int:
    """Return the most new tokens of a sequence that unified_attention of a backend splits.

    It is read from the launches of a release: 8 in 0.33.0, 1 in older ones.
    """
    if backend.name != "vllm" or backend.device != "cpu":
        return _LONGEST_SPLIT
    lens: dict[str, Any] = {"query_lens": (_LONGEST_SPLIT,), "ctx_lens": (40,)}
    case = Case(op=UNIFIED, backend="vllm", release=backend.release, **DEFAULTS, **lens)
    return _LONGEST_SPLIT if len(launches(backend, case)) > 1 else 1


def _check_supported(backend: Backend, op: str, changes: Mapping[str, Any]) -> None:
    """Raise InvalidCase for changes that the backend or the op does not support."""
    has_sinks_and_alibi = changes.get("sinks") and changes.get("alibi")
    if changes.get("mask", CAUSAL) not in backend.masks:
        raise InvalidCase("the backend does not support the mask")
    if changes.get("kv_cache_dtype", "auto") not in backend.kv_cache_dtypes:
        raise InvalidCase("the backend does not support the kv_cache_dtype")
    if changes.get("dtype", "float16") not in backend.dtypes:
        raise InvalidCase("the backend's device does not compute the dtype exactly")
    if "first_block" in changes and (not backend.large_caches or OPS[op].copies_cache):
        raise InvalidCase("the backend may copy the cache, which is too large here")
    if changes.get("freed", "kept") != "kept" and backend.name == "model":
        raise InvalidCase("the models do not define reads before a window")
    if has_sinks_and_alibi and backend.name == "model":
        raise InvalidCase("the models repeat an error of vLLM's op here")
    # "Sinks arg is not supported with alibi" (context_attention_fwd); vLLM's ops say so themselves
    if has_sinks_and_alibi and not OPS[op].sinks_with_alibi and backend.name != "vllm":
        raise InvalidCase("the op rejects attention sinks together with ALiBi")
    if OPS[op].merges and changes.get("kv_layout", "contiguous") != "contiguous":
        raise InvalidCase("kv_layout must be contiguous: the op has two outputs")


# Combinations: which pairs and triples of knob values the cases of a check cover, and which are refused.


def combinations_of(
    backend: Backend, op: str, platform: str, seed: int, cases: Sequence[Case]
) -> dict[str, Any]:
    """Return the combinations that some Cases of an op cover, as JSON-able values.

    - ``knobs``: the names of the values of each knob that the op has.
    - ``pairs``, ``triples``: their number, ``covered`` and ``missing``.
    - ``refused``: the values, pairs and triples that no Case can have, each with the reason.
    """
    design = hostile_design(backend, op, platform)
    run = set(cases)
    made = zip(
        covering_rows(backend, op, platform, seed),
        covering_cases(backend, op, platform, seed),
        strict=True,
    )
    missing = uncovered(design, [row for row, case in made if case in run])
    found: dict[str, Any] = {"knobs": {knob: [*values] for knob, values in design.values.items()}}
    for name, size in (("pairs", 2), ("triples", 3)):
        absent = [entry for entry in missing if len(entry) == size]
        total = sum(len(entry) == size for entry in design.wanted())
        found[name] = {
            "total": total,
            "covered": total - len(absent),
            "missing": [_text(entry) for entry in absent],
        }
    found["refused"] = {_text(entry): why for entry, why in design.refused.items()}
    return found


def _text(entry: Tuple) -> str:
    """Return a combination as text, such as "mask causal, cache fp8"."""
    return ", ".join(f"{knob} {name}" for knob, name in entry)
