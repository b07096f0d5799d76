"""Hypothesis strategies."""

import contextlib

import numpy as np
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import Flag, Maybe, Number, OneOf
from attnlab.case.masks import CAUSAL
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import CPU_ATTENTION, OPS


@st.composite
def cases(draw):
    """Return a random valid Case in which most fields differ from their defaults."""
    fields = {}
    for name in FIELDS:
        kind = field_type(name)
        inner = kind.kind if isinstance(kind, Maybe) else kind
        if isinstance(kind, Maybe) and draw(st.booleans()):
            continue
        if isinstance(inner, OneOf):
            fields[name] = draw(st.sampled_from(inner.choices))
        elif isinstance(inner, Flag):
            fields[name] = draw(st.booleans())
        elif isinstance(inner, Number):
            fields[name] = draw(st.floats(1e-9, 1e9))
    count = draw(st.integers(1, 4))
    lens = st.lists(st.integers(1, 90), min_size=count, max_size=count)
    fields |= {"query_lens": tuple(draw(lens)), "ctx_lens": tuple(draw(lens))}
    fields |= {
        "num_queries_per_kv": draw(st.integers(1, 5)),
        "block_size": draw(st.integers(1, 40)),
    }
    fields |= {"num_heads": fields["num_queries_per_kv"] * draw(st.integers(1, 5))}
    fields |= {"x": draw(st.sampled_from([1, 2, 8])), "head_size": 8 * draw(st.integers(1, 9))}
    if fields.get("kv_cache_dtype", "auto") == "auto":
        fields |= {"cache_write": "scaled", "cache_format": None}
    if fields["op"] == CPU_ATTENTION or fields["backend"] == "vllm-cpu":
        fields |= {"op": CPU_ATTENTION, "backend": "vllm-cpu"}
        fields |= {"platform": "cpu", "release": "0.33.0"}
    fields["trace_reads"] = fields["trace_reads"] and fields["backend"] in ("rocm", "vllm")
    if not fields["alibi"]:
        fields["sliding_window"] = draw(st.integers(0, 100))
    fields |= _accepted_by(OPS[fields["op"]], fields)
    if draw(st.booleans()):
        blocks = -(-180 // fields["block_size"])
        table = np.random.default_rng(draw(st.integers(0, 99))).permutation(count * blocks)
        fields["block_table"] = tuple(map(tuple, table.reshape(count, blocks).tolist()))
        fields["max_blocks_per_seq"] = None
    return _made(fields)


def _made(fields):
    """Return a Case, without its op argument or mask if that needs other fields."""
    for plain in ({}, {"op_argument": NONE}, {"mask": CAUSAL}):
        with contextlib.suppress(InvalidCase):
            return Case(**{**fields, **plain})
    return Case(**{**fields, "op_argument": NONE, "mask": CAUSAL})


def _accepted_by(op, fields):
    """Return changes that remove what the drawn op does not accept."""
    changes = {"interleave_v": False, **_where_it_runs(op, fields), **_cache_of(op, fields)}
    count = len(fields["query_lens"])
    for name, plain in (
        ("sinks", False),
        ("softcap", None),
        ("alibi", False),
        ("sliding_window", 0),
    ):
        if not getattr(op, name):
            changes[name] = plain
    if not op.prefill:
        changes["query_lens"] = (1,) * count
    if not op.context:
        changes["ctx_lens"] = (0,) * count
    if not (op.attends_to_cache and {**fields, **changes}.get("sliding_window")):
        changes["freed"] = "kept"
    return changes


def _where_it_runs(op, fields):
    """Return changes to a backend and a release that have the op, and to tensors that the backend takes."""
    changes = {}
    if fields["backend"] not in op.backends:
        changes |= {"backend": "model", "trace_reads": False}
    if op.platforms and fields.get("platform") not in op.platforms:
        changes["platform"] = op.platforms[0]
    if fields["release"] not in op.releases:
        changes["release"] = op.releases[-1]
    if fields["backend"] not in ("model", "vllm"):
        changes |= {"kv_layout": "contiguous", "pad_batch": 0}
    if not op.hnd:
        changes["kv_layout"] = "contiguous"
    return changes


def _cache_of(op, fields):
    """Return changes to a dtype of the cache that the op accepts."""
    if fields.get("kv_cache_dtype") in op.kv_cache_dtypes:
        return {}
    if op.kv_cache_dtypes == ("auto",):
        return {"kv_cache_dtype": "auto", "cache_write": "scaled", "cache_format": None}
    return {"kv_cache_dtype": "fp8"}
