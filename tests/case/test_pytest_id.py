"""Conversion between vLLM's pytest ids and Cases."""

import pytest

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase

PLAIN = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
ALIBI = "test_contexted_kv_attention_alibi[context_attention_fwd-cuda:0-fp8-dtype0-24-64-64]"
F32 = "test_contexted_kv_attention_f32[context_attention_fwd-16-cuda:1-auto-dtype0-128-64-64]"
ALIBI_F32 = (
    "test_contexted_kv_attention_alibi_f32"
    "[chunked_prefill_paged_decode-cuda:0-fp8_e5m2-dtype0-128-1-64]"
)
FILE = "tests/kernels/attention/test_prefix_prefill.py::"


@pytest.mark.parametrize("path", ["", FILE])
@pytest.mark.parametrize(
    ("test_id", "fields"),
    [
        (PLAIN, {"op": "chunked_prefill_paged_decode", "num_queries_per_kv": 1, "alibi": False}),
        (PLAIN, {"dtype": "float16", "head_size": 128, "num_heads": 64, "force_decode": True}),
        (ALIBI, {"op": "context_attention_fwd", "alibi": True, "force_decode": False}),
        (ALIBI, {"kv_cache_dtype": "fp8", "cache_write": "numeric", "head_size": 24}),
        (F32, {"dtype": "float32", "sliding_window": 16, "num_queries_per_kv": 64}),
        (ALIBI_F32, {"dtype": "float32", "alibi": True, "kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_ids_of_the_four_tests(test_id, path, fields):
    """Each id gives its Case, with or without the file's path."""
    case = Case.from_test_id(path + test_id)
    assert {name: getattr(case, name) for name in fields} == fields
    assert (case.stage, case.key_x) == ("cast_after_cumsum", 8)


@pytest.mark.parametrize(
    ("test_id", "atol"),
    [
        (PLAIN, 1e-4),
        (ALIBI, 1e-3),
        (F32, 1e-4),
        (PLAIN.replace("_attention[", "_attention_alibi[").replace("-0-cuda", "-cuda"), 1e-6),
    ],
)
def test_the_tolerance_is_the_tests(test_id, atol):
    assert Case.from_test_id(test_id).tolerance == atol


def test_the_ratio_precedes_the_heads():
    """``-1-64]`` means 64 heads with a GQA ratio of 1, not 64."""
    case = Case.from_test_id(PLAIN)
    assert (case.num_queries_per_kv, case.num_heads, case.num_kv_heads) == (1, 64, 64)


@pytest.mark.parametrize(
    ("test_id", "other"),
    [(PLAIN, PLAIN.replace("auto", "float16")), (F32, F32.replace("auto", "float32"))],
)
def test_auto_and_the_models_dtype_are_one(test_id, other):
    """Older ids have auto, newer ones the dtype."""
    assert Case.from_test_id(test_id) == Case.from_test_id(other)


def test_interleave_v_in_front():
    """In 0.33.0 interleave_v is the first parameter."""
    plain = Case.from_test_id(PLAIN)
    assert Case.from_test_id(PLAIN.replace("[", "[False-")) == plain
    packed = Case.from_test_id(PLAIN.replace("[", "[True-"))
    assert packed == plain.replace(interleave_v=True)


@pytest.mark.parametrize("window", [0, 16, 2048])
def test_sliding_windows(window):
    """The window is the second parameter of the plain test."""
    case = Case.from_test_id(PLAIN.replace("-0-cuda", f"-{window}-cuda"))
    assert case.sliding_window == window


def test_changes_override_the_id():
    """Changes override the fields of the id."""
    assert Case.from_test_id(PLAIN, stage="int64", seed=3).stage == "int64"


@pytest.mark.parametrize(
    "test_id",
    [
        "",
        "nonsense",
        "test_contexted_kv_attention",
        "test_contexted_kv_attention[]",
        "test_other[" + PLAIN.partition("[")[2],
        PLAIN + "x",
        PLAIN.replace("-64]", "]"),
        PLAIN.replace("-64]", "-64-64]"),
        PLAIN.replace("_attention[", "_attention_alibi["),
        ALIBI.replace("_alibi", ""),
        PLAIN.replace("-128-", "-wide-"),
        PLAIN.replace("-128-", "-²-"),
        PLAIN.replace("-128-", "-" + "9" * 5000 + "-"),
        PLAIN.replace("-0-cuda", "-None-cuda"),
        PLAIN.replace("dtype0", "dtype1"),
        PLAIN.replace("cuda:0", "tpu:0"),
        PLAIN.replace("auto", "int4"),
        PLAIN.replace("chunked_prefill_paged_decode", "other_op"),
        PLAIN.replace("-1-64]", "-3-64]"),
        PLAIN.replace("-", "\n", 1),
        None,
    ],
)
def test_ids_that_are_none(test_id):
    """Any other text is refused with one line."""
    with pytest.raises(InvalidCase) as caught:
        Case.from_test_id(test_id)
    assert " must " in str(caught.value)
    assert "\n" not in str(caught.value)
