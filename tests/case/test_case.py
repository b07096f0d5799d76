"""Case: which values it refuses, and its conversions."""

import dataclasses
import json
import shlex

import numpy as np
import pytest
import torch
from helpers.cases import hostile
from helpers.examples import examples
from helpers.strategies import cases
from hypothesis import given, settings

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS, OpName, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    ArgumentName,
    BackendName,
    Flag,
    Int,
    Lens,
    Maybe,
    Number,
    OneOf,
    Span,
    Table,
)

NAN, INF = float("nan"), float("inf")
WRONG = {
    BackendName: ["nonsense", "", 1, True, None, ["x"], "mine.py", "mine.py:", "plugin:", "a b:c"],
    OneOf: ["nonsense", "", 1, True, None, ["x"], 2.0],
    OpName: ["nonsense", "", 1, True, None, ["x"], 2.0],
    ArgumentName: ["nonsense", "", 1, True, None, ["x"], "far_rows", "far_values"],
    Int: [
        True,
        False,
        -1,
        1.0,
        "8",
        None,
        NAN,
        2**31,
        10**5000,
        [1],
        torch.ones(3, 3),
        np.int64(8),
    ],
    Number: [True, "1", -1.0, NAN, INF, -INF, 10**400, [1.0], 1j],
    Flag: [0, 1, "true", None, 1.0],
    Lens: [[], 5, "1,2", [1, True], [1, -1], [1.0], {1: 2}, [[1]], [1, 2**31]],
    Span: [[], [1], [2, 1], [0, 0], [0, 1, 2], "0:2", [-1, 2], [0, 1.0], [False, True], 3],
    Table: [[], [[]], [[0], [1, 2]], [0, 1], [[0, -1]], [[True]], "[[0]]", [[0.5]]],
}


def wrong_values(name):
    """Return values that the field's type refuses."""
    kind = field_type(name)
    inner = kind.kind if isinstance(kind, Maybe) else kind
    values = [v for v in WRONG[type(inner)] if not (v is None and isinstance(kind, Maybe))]
    if isinstance(inner, Int):
        values += [inner.least - 1, inner.most + 1]
    if isinstance(inner, Lens):
        values.append([inner.least - 1])
    if isinstance(inner, Number) and not inner.zero:
        values += [0, 0.0, -0.0]
    return values


@pytest.mark.parametrize("name", list(FIELDS))
def test_each_field_refuses_wrong_values(name):
    """The error is one line that names the field."""
    for value in wrong_values(name):
        with pytest.raises(InvalidCase) as caught:
            Case(**{name: value})
        text = str(caught.value)
        assert caught.value.field == name
        assert text.startswith(name)
        assert " must be " in text
        assert ", got " in text
        assert "\n" not in text


LENS = {"query_lens": (20, 1), "ctx_lens": (0, 40), "block_size": 16}
CROSS = [
    ({"num_heads": 64, "num_queries_per_kv": 3}, "num_queries_per_kv", "divisor"),
    ({"num_heads": 4, "num_queries_per_kv": 8}, "num_queries_per_kv", "divisor"),
    ({"kv_head_range": (0, 1)}, "kv_head_range", "none with backend model"),
    ({"kv_head_range": (0, 65), "backend": "vllm"}, "kv_head_range", "at most 0:64"),
    ({"head_size": 20}, "head_size", "multiple of x (8)"),
    ({"head_size": 24, "kv_cache_dtype": "fp8"}, "head_size", "multiple of x (16)"),
    ({"head_size": 24, "x": 16}, "head_size", "multiple of x (16)"),
    ({"query_lens": (1, 2)}, "ctx_lens", "must be given"),
    ({"ctx_lens": (1, 2)}, "query_lens", "must be given"),
    ({"query_lens": (1, 2), "ctx_lens": (1,)}, "ctx_lens", "as long as query_lens (2)"),
    ({**LENS, "max_blocks_per_seq": 2}, "seq_lens[1]", "at most 32"),
    ({**LENS, "block_table": ((0, 1), (2, 3))}, "seq_lens[1]", "at most 32"),
    ({**LENS, "num_blocks": 5}, "num_blocks", "at least 6"),
    ({"num_blocks": 639}, "num_blocks", "at least 640"),
    ({"max_blocks_per_seq": 43}, "seq_lens[2]", "at most 1376"),
    ({**LENS, "block_table": ((0, 1, 2),)}, "block_table", "one row per sequence (2)"),
    (
        {**LENS, "block_table": ((0, 1, 2), (3, 4, 9)), "num_blocks": 9},
        "block_table[1][2]",
        "below num_blocks (9)",
    ),
    (
        {**LENS, "block_table": ((0, 1, 2), (3, 1, 5))},
        "block_table[1][1]",
        "other than block_table[0][1]",
    ),
    (
        {**LENS, "block_table": ((0, 1, 2), (3, 4, 3))},
        "block_table[1][2]",
        "other than block_table[1][0]",
    ),
    ({"cache_write": "numeric"}, "cache_write", "fp8"),
    ({"cache_format": "fp8_e4m3fn"}, "cache_format", "fp8"),
]


@pytest.mark.parametrize(("fields", "name", "words"), CROSS)
def test_rules_between_fields(fields, name, words):
    """Values that are allowed alone but not together: one line that begins with one of the fields."""
    with pytest.raises(InvalidCase) as caught:
        Case(**fields)
    text = str(caught.value)
    assert text.startswith(name + " must be ")
    assert caught.value.field in (name.partition("[")[0], None)
    assert words in text
    assert "\n" not in text


def test_blocks_that_no_token_needs_may_be_shared():
    """Only blocks that hold tokens belong to a sequence; padding entries may be any block."""
    case = Case(**LENS, block_table=((0, 1, 2), (2, 3, 4)))
    assert case.total_blocks == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"nonsense": 1}', "nonsense is not a field"),
        ('{"two\\nlines": 1}', "two lines is not a field"),
        ("[1, 2]", "case must be a JSON object"),
        ("3", "case must be a JSON object"),
        ("null", "case must be a JSON object"),
        ("", "case must be a JSON object"),
        ("{", "case must be a JSON object"),
        ("[" * 100_000, "case must be a JSON object"),
        ('{"k_scale": NaN}', "k_scale must be"),
        ('{"k_scale": 1e999}', "k_scale must be"),
        ('{"num_heads": null}', "num_heads must be"),
        ('{"num_heads": "64"}', "num_heads must be"),
    ],
)
def test_json_that_is_no_case(text, words):
    """The error is one line."""
    with pytest.raises(InvalidCase) as caught:
        Case.from_json(text)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_names_that_are_no_strings_are_no_fields():
    """Such a name raises InvalidCase, not TypeError."""
    with pytest.raises(InvalidCase, match="2 is not a field"):
        Case.from_dict({2: 3, "num_heads": 8})


@given(cases())
@settings(max_examples=examples(80), deadline=None)
def test_json_round_trip(case):
    """A Case read back from its JSON is equal and has the same hash."""
    again = Case.from_json(case.to_json())
    assert again == case
    assert hash(again) == hash(case)
    assert len({case, again}) == 1


@given(cases())
@settings(max_examples=examples(80), deadline=None)
def test_command_line_round_trip(case):
    """``to_cli`` names every change once, and parsing the words gives the same Case."""
    program, verb, *words = shlex.split(case.to_cli())
    assert (program, verb) == ("attnlab", "run")
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    fields = {n: field_type(n).parse(n, text) for n, text in zip(names, words[1::2], strict=True)}
    assert set(names) == set(case.changes())
    assert len(names) == len(fields)
    assert Case(**fields) == case


def test_command_line_of_a_known_case():
    """Lengths are separated by commas; the default Case has no flags."""
    assert Case().to_cli() == "attnlab run"
    case = Case(query_lens=(880, 1), ctx_lens=(430, 929), alibi=True, k_scale=0.5)
    assert case.to_cli() == (
        "attnlab run --alibi true --query-lens 880,1 --ctx-lens 430,929 --k-scale 0.5"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_heads", "eight"),
        ("k_scale", "big"),
        ("alibi", "maybe"),
        ("query_lens", "1,,2"),
        ("block_table", "[[1"),
        ("seed", "1.5"),
        ("atol", ""),
    ],
)
def test_text_that_cannot_be_parsed(name, text):
    with pytest.raises(InvalidCase) as caught:
        field_type(name).parse(name, text)
    assert caught.value.field == name


def test_defaults_are_those_of_the_test():
    """64 blocks per sequence, 640 blocks, x = 8; the tolerance is what rounding explains."""
    case = Case()
    assert (case.blocks_per_seq, case.total_blocks) == (64, 640)
    assert (case.num_kv_heads, case.key_x, case.tolerance) == (64, 8, None)
    assert (case.passed_max_query_len, case.passed_max_seq_len) == (1024, 1024)
    assert case.changes() == {}


@pytest.mark.parametrize(
    ("fields", "tolerance", "x"),
    [
        ({"kv_cache_dtype": "fp8"}, None, 16),
        ({"dtype": "float32"}, None, 4),
        ({"op": "reshape_and_cache_flash"}, 0.0, 8),
        ({"atol": 0.0, "x": 2}, 0.0, 2),
    ],
)
def test_tolerance_and_x(fields, tolerance, x):
    """A given value is used, 0 included; a cache write is exact."""
    case = Case(**fields)
    assert (case.tolerance, case.key_x) == (tolerance, x)


def test_lists_become_tuples_and_ints_floats():
    """A Case from JSON equals the same Case from Python."""
    case = Case(query_lens=[3, 1], ctx_lens=[0, 9], k_scale=2)
    assert case.query_lens == (3, 1)
    assert isinstance(case.k_scale, float)
    assert case == Case(query_lens=(3, 1), ctx_lens=(0, 9), k_scale=2.0)


def test_replace_and_frozen():
    """``replace`` gives a new, checked Case; a Case itself cannot be changed."""
    case = hostile()
    assert case.replace(seed=3).seed == 3
    assert case.replace() == case
    assert case.seed == 7
    with pytest.raises(InvalidCase, match=r"^seed must be"):
        case.replace(seed=-1)
    with pytest.raises(InvalidCase, match=r"^nonsense is not a field"):
        case.replace(nonsense=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.seed = 4


def test_staging_takes_overrides():
    """A given field overrides only its part of the stage."""
    staging = Case(stage="int64", seq_lens_dtype="int32", fill="decode_rows").staging
    assert (staging.seq_lens, staging.fill) == ("int32", "decode_rows")
    assert (staging.block_table, staging.query_start_loc) == ("int64", "int64")


def test_json_names_every_field():
    assert set(json.loads(Case().to_json())) == set(FIELDS)


def test_help_texts_explain_the_field():
    """Each is a phrase, starts in lower case unless with a name, and has no full stop."""
    for name, field in FIELDS.items():
        text = field.metadata["help"]
        assert len(text.split()) >= 3, name
        assert not text.endswith("."), name


@pytest.mark.parametrize(
    "name", ["seed", "first_block", "draw_max_ctx_len", "ctx_lens", "block_table"]
)
def test_an_integer_field_names_its_limits(name):
    value = {"ctx_lens": (10**11,), "block_table": ((10**11,),)}.get(name, 10**11)
    with pytest.raises(InvalidCase) as caught:
        Case(**{name: value})
    assert "to 2147483647, got 100000000000" in str(caught.value)
