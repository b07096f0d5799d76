"""Hypothesis strategies."""

import numpy as np
from hypothesis import strategies as st

from attnlab.case.case import FIELDS, Case, field_type
from attnlab.case.fields import Flag, Maybe, Number, OneOf
from attnlab.case.rules import PARTS_UNKNOWN, SINK_OPS, SOFTCAP_OPS


@st.composite
def cases(draw):
    """Return a random valid Case in which most knobs are turned."""
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
    if fields["op"] == "cpu_attention_with_kv_cache" or fields["backend"] == "vllm-cpu":
        fields |= {"op": "cpu_attention_with_kv_cache", "backend": "vllm-cpu"}
        fields |= {"platform": "cpu", "release": "0.33.0"}
    fields["trace_reads"] = fields["trace_reads"] and fields["backend"] in ("rocm", "vllm")
    if not fields["alibi"]:
        fields["sliding_window"] = draw(st.integers(0, 100))
    fields |= _what_the_op_knows(fields)
    fields |= _freed_by(fields)
    if draw(st.booleans()):
        blocks = -(-180 // fields["block_size"])
        table = np.random.default_rng(draw(st.integers(0, 99))).permutation(count * blocks)
        fields["block_table"] = tuple(map(tuple, table.reshape(count, blocks).tolist()))
        fields["max_blocks_per_seq"] = None
    return Case(**fields)


def _what_the_op_knows(fields):
    """Return changes for what the drawn op does not take."""
    changes = {"interleave_v": False}
    if fields["op"] == "decode_attention_fwd":
        ones = (1,) * len(fields["query_lens"])
        changes |= {"query_lens": ones, "alibi": False, "sliding_window": 0}
    others = ("chunked_prefill_paged_decode", "context_attention_fwd", "merge_attn_states")
    if fields["backend"] not in ("model", "vllm"):
        changes |= {"kv_layout": "contiguous", "pad_batch": 0}
    if fields["op"] not in ("unified_attention", "reshape_and_cache_flash"):
        changes |= {"kv_layout": "contiguous"}
    if fields["kv_cache_dtype"] == "fp8_e5m2" and fields["op"] not in others:
        changes["kv_cache_dtype"] = "fp8"
    if fields["op"] not in SINK_OPS:
        changes["sinks"] = False
    if fields["op"] not in SOFTCAP_OPS:
        changes["softcap"] = None
    return changes


def _freed_by(fields):
    """Return changes where the drawn op or window frees no block."""
    frees = fields["op"] not in PARTS_UNKNOWN and fields.get("sliding_window")
    return {} if frees else {"freed": "kept"}
