"""Knobs: what the hostile cases vary, as one table. A knob is added in one line, a value likewise.

The values of a knob are named. The first is plain. Two values that set the same field, or that the rules of
a Case refuse together, are not combined.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlab.case.ops import MERGE, OPS, WRITE


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a knob: the fields of a Case that it sets."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Knob:
    """A property of a case, with its values, the plain one first, and the ops whose result depends on it."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[str, ...]


def _knob(name: str, ops: tuple[str, ...] = tuple(OPS), **values: Mapping[str, Any]) -> Knob:
    """Return a knob; an underscore in the name of a value is a space."""
    named = (Value(text.replace("_", " "), fields) for text, fields in values.items())
    return Knob(name, tuple(named), ops)


def _mask(name: str, **fields: Any) -> dict[str, Any]:
    return {"mask": name, **fields}


def _argument(name: str, **fields: Any) -> dict[str, Any]:
    return {"op_argument": name, **fields}


_ATTENTION = tuple(op for op in OPS if op not in (MERGE, WRITE))  # the ops that compute scores
_CACHED = tuple(op for op in OPS if OPS[op].cache_layout is not None)  # those that get a cache
_BATCHED = tuple(op for op in OPS if op != MERGE)  # those that get the tokens of sequences
MASK, CACHE, SPLIT, LENGTHS = "mask", "cache", "split", "lengths"
_FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": 2.0}
KNOBS = (
    _knob(
        MASK,
        _ATTENTION,
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
    ),
    _knob(
        CACHE,
        _CACHED,
        plain={},
        fp8=_FP8,
        packed_values={"interleave_v": True},
        fp8_query=_argument("fp8_query", **_FP8),
        int8_per_token_head=_argument("int8_per_token_head"),
        fp8_per_token_head=_argument("fp8_per_token_head"),
    ),
    _knob(SPLIT, _ATTENTION, none={"num_splits": 0}, four={"num_splits": 4}),
    _knob(
        "heads",
        two_per_KV_head={"num_heads": 4, "num_queries_per_kv": 2},
        three_per_KV_head={"num_heads": 6, "num_queries_per_kv": 3},
        one_per_KV_head={"num_heads": 2, "num_queries_per_kv": 1},
        five_of_one_KV_head={"num_heads": 5, "num_queries_per_kv": 5},
    ),
    _knob(
        "head size",
        tuple(OPS),
        **{"64": {"head_size": 64}, "80": {"head_size": 80}, "32": {"head_size": 32}},
    ),
    _knob(
        "block size",
        _CACHED,
        **{"16": {"block_size": 16}, "48": {"block_size": 48}, "8": {"block_size": 8}},
    ),
    _knob("dtype", float16={}, float32={"dtype": "float32"}, bfloat16={"dtype": "bfloat16"}),
    _knob(
        "strides", _BATCHED, contiguous={}, fused={"kv_layout": "fused"}, HND={"kv_layout": "HND"}
    ),
    _knob("padding", none={}, five={"pad_batch": 5, "max_blocks_per_seq": 40}),
    _knob("sinks", _ATTENTION, none={}, one_per_head={"sinks": True}),
    _knob("soft cap", _ATTENTION, none={}, **{"2": {"softcap": 2.0}}),
    _knob("scale", _ATTENTION, given={}, default={"sm_scale": None}, large={"sm_scale": 16.0}),
    _knob("index dtype", _BATCHED, int32={}, int64={"stage": "int64"}),
)
TRIPLE = (MASK, CACHE, SPLIT)


def values_of(op: str, lengths: Knob) -> dict[str, dict[str, Value]]:
    """Return the values of the knobs of an op by the names of knob and value; ``lengths`` is one of them."""
    knobs = [knob for knob in (*KNOBS, lengths) if op in knob.ops]
    return {knob.name: {value.name: value for value in knob.values} for knob in knobs}
