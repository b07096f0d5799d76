"""Violations: where a call violates the contracts, found before it runs."""

import dataclasses
import json

import pytest
from helpers.cases import call_of, hostile

from attnlab.case.ops import PREFILL, RELEASES
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.violations import find_violations

SEED = {
    "query_lens": (880, 410, 1),
    "ctx_lens": (10, 0, 20),
    "num_heads": 2,
    "num_queries_per_kv": 1,
    "head_size": 64,
}


def violations_of(case, **changes):
    """Return the violations of the Case's call, its scale passed, with ``changes`` to the call."""
    call, cache = call_of(case)
    call = dataclasses.replace(call, **{"sm_scale": case.head_size**-0.5} | changes)
    return find_violations(call, Target.of(case), decide(case).kernels, cache.provenance)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", ["gfx942", "gfx90a", "sm_90", "cpu"])
@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_a_sound_call_has_no_violation(platform, release, op):
    """Writing every new token before attention violates nothing on any platform, release and op."""
    assert violations_of(hostile(platform=platform, release=release, op=op)) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_a_default_scale_by_heads_is_a_violation(op, release):
    """Up to 0.11.2 the wrapper derives its default scale from the number of heads."""
    found = violations_of(hostile(op=op, release=release), sm_scale=None)
    by_heads = op == "chunked_prefill_paged_decode" and release == "0.11.2"
    assert [violation.kind for violation in found] == ["default_scale"] * by_heads
    if by_heads:
        (violation,) = found
        assert (violation.parameter, violation.tensor) == ("sm_scale", None)
        assert (violation.value, violation.required) == (6, 64)
    as_many = hostile(op=op, release=release, num_heads=64, head_size=64)
    assert violations_of(as_many, sm_scale=None) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_checked_int64_is_rejected_on_rocm(name, release):
    (violation,) = violations_of(hostile(release=release, **{f"{name}_dtype": "int64"}))
    assert (violation.kind, violation.effect) == ("index_dtype", "rejected")
    assert (violation.kernel, violation.tensor, violation.dtype) == (ROCM_DECODE, name, "int64")
    assert violation.row is violation.sequence is violation.block is None


@pytest.mark.parametrize("how", ["int64", "int32_before_cumsum"])
def test_unchecked_int64_is_silent_on_rocm(how):
    """query_start_loc is reinterpreted: each number becomes two, and a row stays unwritten."""
    dtype, rows = violations_of(hostile(**SEED, query_start_loc_dtype=how))
    assert (dtype.kind, dtype.effect, dtype.tensor) == ("index_dtype", "silent", "query_start_loc")
    assert dtype.value == (0, 880, 1290)
    assert dtype.required == (0, 0, 880, 0, 1290, 0)
    assert (rows.kind, rows.effect, rows.kernel) == ("unwritten_rows", "silent", "")
    assert (rows.tensor, rows.row, rows.last_row, rows.sequence) == ("output", 1290, 1290, 2)
    assert (rows.count, rows.value) == (1, 1)


@pytest.mark.parametrize("release", RELEASES)
def test_int64_on_triton(release):
    """Triton reads the dtype that it is given; 0.33.0 converts the block table."""
    violations = violations_of(
        hostile(platform="sm_90", stage="int64", fill="all_rows", release=release)
    )
    if release == "0.11.2":
        assert violations == []
    else:
        assert [(v.effect, v.tensor) for v in violations] == [("harmless", "block_table")]
        assert violations[0].kernel == TRITON_DECODE


def test_the_wrappers_cast_makes_int64_harmless():
    """With the proposed conversion all three tensors are converted, and every row is written."""
    violations = violations_of(hostile(stage="wrapper_cast", fill="all_rows"))
    assert [v.effect for v in violations] == ["harmless"] * 3
    assert {v.tensor for v in violations} == {"block_table", "seq_lens", "query_start_loc"}


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
def test_the_missing_decode_token(platform):
    """With only context in the cache, each decode sequence lacks its newest token."""
    case = hostile(fill="context_only", platform=platform)
    _, cache = call_of(case)
    violations = violations_of(case)
    decodes = [i for i, n in enumerate(case.query_lens) if n == 1]
    assert len(violations) == len(decodes)
    for seq, violation in zip(decodes, violations, strict=True):
        position = case.ctx_lens[seq]
        block, slot = cache.provenance.slot(seq, position)
        assert (violation.kind, violation.effect) == ("unwritten_slot", "silent")
        assert violation.kernel == (ROCM_DECODE if platform == "gfx942" else TRITON_DECODE)
        assert violation.tensor == "kv_cache"
        assert (violation.sequence, violation.position) == (seq, position)
        assert (violation.block, violation.slot, violation.count) == (block, slot, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"fill": "decode_rows"},
        {"fill": "all_rows"},
        {"fill": "context_only", "op": "context_attention_fwd"},  # new tokens are arguments
        {"query_lens": (300, 1), "ctx_lens": (0, 3), "max_query_len": 257},
        {"kv_cache_dtype": "fp8", "x": 16},
        {"kv_cache_dtype": "fp8", "x": 8, "platform": "sm_90"},
        {"max_seq_len": 257},
        {"max_seq_len": 1, "platform": "sm_90"},
        {"query_lens": (2, 1), "ctx_lens": (400, 5), "max_seq_len": 6},  # a prefill has no scratch
    ],
    ids=str,
)
def test_what_violates_nothing(changes):
    assert violations_of(hostile(**changes)) == []


@pytest.mark.parametrize(
    ("lens", "name", "change", "kind", "places"),
    [
        # another sequence's tokens, and the same sequence's at other positions
        (((1, 1), (20, 20)), "block_table", lambda table: table.flip(0), "foreign", [(0, 0, 21), (1, 0, 21)]),
        (((1,), (31,)), "block_table", lambda table: table.flip(1), "foreign", [(0, 0, 32)]),
        (((1,), (20,)), "seq_lens", lambda lens: lens + 1, "unwritten", [(0, 21, 1)]),
    ],
    ids=["rows swapped", "blocks swapped", "one too long"],
)  # fmt: skip
def test_wrong_slots_are_read(lens, name, change, kind, places):
    case = hostile(query_lens=lens[0], ctx_lens=lens[1])
    found = violations_of(case, **{name: change(getattr(call_of(case)[0], name))})
    assert {(one.kind, one.effect) for one in found} == {(f"{kind}_slot", "silent")}
    assert [(one.sequence, one.position, one.count) for one in found] == places


def test_without_provenance_slots_are_not_checked():
    """As for a captured call."""
    case = hostile(fill="context_only")
    call, _ = call_of(case)
    assert find_violations(call, Target.of(case), decide(case).kernels) == []


def test_rows_after_max_query_len():
    """The prefill grid covers max_query_len, in tiles of 128 rows; later rows are unwritten."""
    case = hostile(query_lens=(300, 1), ctx_lens=(0, 3), max_query_len=100)
    (violation,) = violations_of(case)
    assert violation.kind == "unwritten_rows"
    assert (violation.row, violation.last_row, violation.count) == (128, 299, 172)
    assert (violation.sequence, violation.value) == (0, 300)
    (violation,) = violations_of(case.replace(max_query_len=1))
    assert (violation.row, violation.last_row) == (0, 299)


def test_fp8_with_x_of_8_on_rocm():
    """The kernel assumes that x is 16 bytes; vLLM's test splits FP8 by 8."""
    (violation,) = violations_of(hostile(kv_cache_dtype="fp8", x=8))
    assert (violation.kind, violation.effect) == ("key_layout", "silent")
    assert (violation.tensor, violation.value, violation.required) == ("key_cache", 8, 16)


def test_a_short_max_seq_len():
    """A partition has 256 tokens; the longest decode row needs two."""
    (violation,) = violations_of(hostile(max_seq_len=256))
    assert (violation.kind, violation.effect) == ("short_scratch", "silent")
    assert (violation.parameter, violation.value, violation.required) == ("max_seq_len", 1, 2)
    assert violation.sequence == 10


@pytest.mark.parametrize(
    ("changes", "kernel", "parameter"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, ROCM_DECODE, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8", "platform": "sm_80"}, PREFILL, "kv_cache_dtype"),
    ],
)
def test_a_format_that_the_kernel_does_not_support(changes, kernel, parameter):
    """Dispatch accepts the format, and the kernel rejects it."""
    violation = violations_of(hostile(**changes))[0]
    assert (violation.kind, violation.effect) == ("unsupported", "rejected")
    assert (violation.kernel, violation.parameter) == (kernel, parameter)


def test_violations_are_sorted_by_effect():
    """Rejections come before silent violations, and these before harmless ones."""
    effects = [v.effect for v in violations_of(hostile(stage="int64", fill="context_only"))]
    assert effects == sorted(effects, key=["rejected", "silent", "harmless"].index)
    assert {"rejected", "silent"} <= set(effects)


CASES = (
    {"stage": "int64", "fill": "context_only"},
    {"query_start_loc_dtype": "int64"},
    {"stage": "wrapper_cast"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"kv_cache_dtype": "fp8", "x": 8},
    {"max_seq_len": 256},
    {"query_lens": (300, 1), "ctx_lens": (0, 3), "max_query_len": 100},
)


@pytest.mark.parametrize("changes", CASES)
def test_every_violation_has_a_sentence_and_is_json(changes):
    """The sentence names the kernel and the tensor or parameter, unless no kernel is at fault."""
    violations = violations_of(hostile(**changes))
    assert violations
    for violation in violations:
        document = json.loads(json.dumps(violation.to_dict()))
        assert document["kind"] == violation.kind
        assert document["text"] == violation.text
        assert "\n" not in violation.text
        assert violation.kernel in violation.text
        assert violation.subject == "kv_cache" or violation.subject in violation.text


def test_sentences_differ_with_every_field():
    """Two violations with different places never have one sentence."""
    found = violations_of(hostile(fill="context_only"))
    changed = [
        dataclasses.replace(found[0], **{name: getattr(found[0], name) + 1})
        for name in ("sequence", "position", "block", "slot", "count")
    ]
    assert len({violation.text for violation in (found[0], *changed)}) == 6
