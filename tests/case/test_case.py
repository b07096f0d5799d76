"""Case: which values it refuses, and its conversions."""

import dataclasses
import json
import random
import shlex

import numpy as np
import pytest
import torch
from helpers.cases import hostile, refused
from helpers.commands import error_line
from helpers.examples import examples
from helpers.strategies import cases
from hypothesis import given, settings

from attnlab.case.case import Case, Lengths, draw_lengths
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
    difference,
    suggestion,
)
from attnlab.case.masks import DATA_FIELDS, MASK_DATA, MASKS
from attnlab.case.ops import OPS, RELEASES, TRITON_OPS, VLLM_OPS, Op
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import Target, contract

NAN, INF = float("nan"), float("inf")
WRONG = {
    BackendName: ["nonsense", "", 1, None, ["x"], "m.py", "m.py:", "m.py:1f", "plugin:", "a b:c"],
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
    assert Case(**LENS, block_table=((0, 1, 2), (2, 3, 4))).total_blocks == 5


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
    with refused(name):
        field_type(name).parse(name, text)


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


# Drawn lengths equal those of vLLM's test.


QUERY_LENS = (880, 410, 792, 927, 446, 57, 281, 1004, 539, 1)
CTX_LENS = (430, 956, 818, 865, 326, 1007, 504, 382, 613, 929)


def test_seed_0_is_the_investigated_batch():
    """The failure was reported with 5337 tokens, the last one a decode."""
    lengths = Case().lengths
    assert lengths.query_lens == QUERY_LENS
    assert lengths.ctx_lens == CTX_LENS
    assert lengths.num_tokens == 5337
    assert lengths.num_tokens * 64 * 128 == 43_720_704
    assert lengths.seq_lens[0] == 1310
    assert lengths.seq_lens[-1] == 930


def test_the_alibi_test_forces_no_decode():
    """Without ``force_decode`` the tenth length stays, and the contexts are unchanged."""
    lengths = Case(force_decode=False).lengths
    assert lengths.query_lens[:9] == QUERY_LENS[:9]
    assert lengths.query_lens[9] > 1
    assert lengths.ctx_lens == CTX_LENS


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_draw_is_pythons_own(seed):
    """Ten query lengths, then ten context lengths, from one generator with vLLM's limits."""
    rng = random.Random(seed)
    expected = [rng.randint(16, 1024) for _ in range(20)]
    expected[9] = 1
    lengths = draw_lengths(seed, 10, 1024, 1024, True)
    assert [*lengths.query_lens, *lengths.ctx_lens] == expected


def test_the_draw_leaves_pythons_generator_alone():
    """The global random generator is not used, so other draws of a notebook do not change."""
    random.seed(5)
    before = random.getstate()
    draw_lengths(99, 3, 50, 60, True)
    assert random.getstate() == before


def test_short_bounds():
    """If a limit is below 16, it is both ends of the range."""
    lengths = draw_lengths(0, 4, 3, 2, False)
    assert lengths == Lengths(query_lens=(3, 3, 3, 3), ctx_lens=(2, 2, 2, 2))


# The mask of a Case: what is refused, with which field, and the ways to state one.


MASKED = {"op": "unified_attention", "query_lens": (3, 1), "ctx_lens": (5, 9)}
ENCODED = {"op": "triton_prefill_attention", "query_lens": (3,), "ctx_lens": (0,)}
WITH_ARGUMENT = {"op": "unified_attention", "backend": "vllm", "op_argument": "tensor_descriptors"}


def test_every_mask_has_an_op_and_its_data_a_field():
    assert set(MASK_DATA) == set(DATA_FIELDS)
    assert set(MASK_DATA) < set(FIELDS)
    assert all(mask.ops or mask.name == "causal" for mask in MASKS.values())


PACKED = {"op_argument": "head_major_packed", "block_size": 20, "fill": None}
IMPOSSIBLE = [
    (
        MASKED,
        [
            ({"mask": "range"}, "mask"),
            ({"mask": "ranges", "op": "context_attention_fwd"}, "mask"),
            ({"mask": "bidirectional", "op": "merge_attn_states"}, "mask"),
            ({"mask": "bidirectional", "release": "0.11.2"}, "mask"),
            ({"mask": "bidirectional", "op": "context_attention_fwd", "alibi": True}, "alibi"),
            ({"mask": "chunks"}, "sliding_window"),
            ({"mask": "prefix_and_window"}, "sliding_window"),
            ({"mask": "ranges", "sliding_window": 4, "freed": "empty"}, "freed"),
            ({"mask": "ranges", "chunk_lookback": 1}, "chunk_lookback"),
            ({"causal_seqs": (1, 0)}, "causal_seqs"),
            ({"mask": "causal_by_sequence", "causal_seqs": (1,)}, "causal_seqs"),
            ({"mask": "causal_by_sequence", "causal_seqs": (1, 2)}, "causal_seqs"),
            ({"mask": "ranges", "mm_prefix_range": ((0, 3),)}, "mm_prefix_range"),
            ({"mask": "ranges", "mm_prefix_range": ((0, 3, 4), (0, 1, 1))}, "mm_prefix_range"),
            ({"mask": "ranges", "mm_prefix_range": ((0, 8), (0, 1))}, "mm_prefix_range"),
            ({"mask": "ranges", "mm_prefix_range": ((3, 1), (0, 1))}, "mm_prefix_range"),
            (
                {"mask": "prefix_and_window", "sliding_window": 2, "rswa_prefix_lens": (9, 0)},
                "rswa_prefix_lens",
            ),
            ({"mask": "chunks", "sliding_window": 2, "chunk_lookback": 2}, "chunk_lookback"),
            ({"mask": "tree", "tree_parents": (0, 0)}, "tree_parents"),
            ({"mask": "tree", "tree_parents": (0, 2, 0)}, "tree_parents"),
        ],
    ),
    (
        ENCODED,
        [
            ({"ctx_lens": (1,)}, "ctx_lens"),
            ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
            ({"alibi": True}, "alibi"),
            ({"release": "0.11.2"}, "release"),
            ({"freed": "empty", "sliding_window": 4}, "freed"),
            ({"mask": "tree"}, "mask"),
            ({"backend": "rocm"}, "backend"),
        ],
    ),
    (
        WITH_ARGUMENT,
        [
            ({"op": "merge_attn_states"}, "op_argument"),
            ({"backend": "model"}, "op_argument"),
            ({"sliding_window": 4, "alibi": False, "op_argument": "fp8_query"}, "kv_cache_dtype"),
            ({"op_argument": "tensor_descriptor"}, "op_argument"),
            ({"kv_head_range": (0, 1)}, "op_argument"),
            ({"op_argument": "int4_per_token_head", "mask": "bidirectional"}, "mask"),
            ({"op_argument": "int4_per_token_head", "head_size": 63, "x": 1}, "head_size"),
            ({"op_argument": "diffkv", "head_size": 2, "x": 1}, "head_size"),
            (
                {"op": "reshape_and_cache_flash", **PACKED},
                "block_size",
            ),
        ],
    ),
]


@pytest.mark.parametrize(
    ("good", "fields", "field"), [(good, *row) for good, rows in IMPOSSIBLE for row in rows]
)
def test_impossible_combinations(good, fields, field):
    Case(**good)
    with refused(field):
        Case(**{**good, **fields})


@pytest.mark.parametrize("mask", list(MASKS))
def test_a_case_survives_json_and_the_command_line(mask):
    given = {"causal_seqs": (1, 0), "rswa_prefix_lens": (4, 0), "chunk_lookback": 2}
    given |= {"mm_prefix_range": ((0, 6), (2, 9)), "tree_parents": (0, 0, 1)}
    data = {MASKS[mask].data: given[MASKS[mask].data]} if MASKS[mask].data else {}
    case = Case(**MASKED, mask=mask, sliding_window=6, **data)
    assert Case.from_json(case.to_json()) == case
    assert mask == "causal" or f"--mask {mask}" in case.to_cli()


# The table of ops: names, and agreement between abilities.


OF_OPS = {"query_lens": (1, 1), "ctx_lens": (5, 20), "block_size": 16}


def case_of(op: Op, **changes) -> Case:
    """Return a small Case of an op on a backend, platform and release that it has."""
    platform = {"platform": op.platforms[0]} if op.platforms else {}
    context = {} if op.context else {"ctx_lens": (0, 0)}
    return Case(op=op.name, backend=op.backends[0], **{**platform, **OF_OPS, **context, **changes})


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
    with refused(field):
        case_of(op, **{field: value})


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


# Suggestions for wrong values, names and flags.


@pytest.mark.parametrize(
    ("field", "word", "meant"),
    [
        ("platform", "MI300X", "gfx942"),
        ("platform", "mi250", "gfx90a"),
        ("platform", "AMD Instinct MI355X", "gfx950"),
        ("platform", "H100", "sm_90"),
        ("platform", "NVIDIA H200", "sm_90"),
        ("platform", "B200", "sm_90"),
        ("platform", "a100", "sm_80"),
        ("dtype", "fp16", "float16"),
        ("dtype", "torch.bfloat16", "bfloat16"),
        ("dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "e4m3", "fp8_e4m3"),
        ("kv_cache_dtype", "E5M2", "fp8_e5m2"),
        ("op", "unified-attention", "unified_attention"),
        ("op", "chunked_prefil_paged_decode", "chunked_prefill_paged_decode"),
        ("stage", "fill_al", "fill_all"),
        ("release", "0.14.0", "0.33.0"),
        ("release", "0.10.2", "0.11.2"),
    ],
)
def test_a_near_value_is_suggested(field, word, meant):
    with pytest.raises(InvalidCase) as caught:
        Case(**{field: word})
    assert meant in str(caught.value).rpartition(";")[0] + str(caught.value).partition("; ")[2]
    assert meant in str(caught.value).partition("; ")[2]


@pytest.mark.parametrize("word", ["quantum", "", "x" * 2000, "gfx", "日本"])
def test_nothing_is_suggested_for_something_else(word):
    assert suggestion(word, ("sm_80", "cpu")) == ""


def test_a_gpu_without_rules_is_named_as_such():
    assert "no rules for sm_100" in suggestion("B200", PLATFORMS)


def test_a_field_of_json():
    with pytest.raises(InvalidCase, match="num_heads"):
        Case.from_dict({"num_head": 3})


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["rum"], "did you mean run?"),
        (["explian"], "did you mean explain?"),
        (["run", "--sliding-windw", "3"], "did you mean --sliding-window?"),
        (["check", "--op", "unified_atention"], "did you mean unified_attention?"),
        (["run", "--platform", "MI300X"], "did you mean gfx942?"),
    ],
)
def test_commands_and_flags(capsys, argv, meant):
    assert meant in error_line(capsys, argv)


def test_what_differs_between_the_releases_with_rules():
    assert [difference(version) for version in RELEASES] == ["", ""]
    assert "softmax scale" in difference("0.14.0")
    assert "ROCm kernel lets NaN" in difference("0.29.0")
    assert "Triton" not in difference("0.29.0")
    assert difference("0.32.0") == ""
