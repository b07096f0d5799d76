"""The table of ops: names, and agreement between abilities."""

import pytest

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS, RELEASES, TRITON_OPS, VLLM_OPS, Op
from attnlab.contracts.contract import Target, contract

LENS = {"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16}


def case_of(op: Op, **changes) -> Case:
    """Return a small Case of an op on a backend, platform and release that it has."""
    platform = {"platform": op.platforms[0]} if op.platforms else {}
    context = {} if op.context else {"ctx_lens": (0, 0)}
    return Case(op=op.name, backend=op.backends[0], **{**platform, **LENS, **context, **changes})


@pytest.mark.parametrize("name", OPS)
def test_each_op_has_a_case_and_a_description(name):
    op = OPS[name]
    assert op.name == name
    assert len(op.summary.split()) > 4
    assert case_of(op).spec is op
    for feature in ("sinks", "softcap"):
        is_passed = getattr(contract(name, Target(), name), feature) != "none"
        assert is_passed == (getattr(op, feature) is not None)


def test_the_folder_of_the_ops_depends_on_the_release():
    op = OPS["unified_attention"]
    old, new = (op.source(release) for release in RELEASES)
    assert old == "vllm/attention/ops/triton_unified_attention.py, vLLM 0.11.2"
    assert new == "vllm/v1/attention/ops/triton_unified_attention.py, vLLM 0.33.0"
    assert set(VLLM_OPS) - set(TRITON_OPS) == {"cpu_attention_with_kv_cache"}


FEATURES = {
    "sinks": (True, lambda op: op.sinks),
    "softcap": (3.0, lambda op: op.softcap),
    "num_splits": (2, lambda op: op.num_splits),
    "alibi": (True, lambda op: op.alibi),
    "sliding_window": (8, lambda op: op.sliding_window),
    "query_lens": ((3, 1), lambda op: op.prefill),
    "interleave_v": (True, lambda op: op.interleave_v_releases),
    "kv_cache_dtype": ("fp8_e5m2", lambda op: "fp8_e5m2" in op.kv_cache_dtypes),
    "kv_layout": ("HND", lambda op: op.hnd),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("field", FEATURES)
def test_a_case_is_refused_if_the_op_lacks_the_feature(name, field):
    """The record alone decides; the error names the field."""
    op, (value, accepts) = OPS[name], FEATURES[field]
    if accepts(op):
        assert getattr(case_of(op, **{field: value}), field) == value
        return
    with pytest.raises(InvalidCase) as caught:
        case_of(op, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("op", "fill", "lens"),
    [
        ("chunked_prefill_paged_decode", "decode_rows", (4, 21)),
        ("context_attention_fwd", "context_only", (4, 20)),
        ("unified_attention", "all_rows", (7, 21)),
    ],
)
def test_tokens_that_an_op_reads_from_the_cache(op, fill, lens):
    """Context tokens, and the new tokens of decode sequences or of all sequences."""
    case = Case(op=op, query_lens=(3, 1), ctx_lens=(4, 20))
    assert case.spec.fill_read == fill
    assert case.lengths.cached_lens(case.spec.fill_read) == lens
