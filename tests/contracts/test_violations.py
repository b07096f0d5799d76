"""Violations: what the contracts say of a call before it runs."""

import dataclasses

import pytest
from helpers.cases import call_of, hostile

from attnlab.case.ops import PREFILL, RELEASES
from attnlab.contracts.dispatch import ROCM_DECODE, TRITON_DECODE, Target, decide
from attnlab.contracts.violations import find_violations

SEED = {
    "query_lens": (880, 410, 1),
    "ctx_lens": (10, 0, 20),
    "num_heads": 2,
    "num_queries_per_kv": 1,
    "head_size": 64,
}


def breaches_of(case, **changes):
    """Return the violations of the Case's call, its scale passed, with ``changes`` to the call."""
    call, cache = call_of(case)
    call = dataclasses.replace(call, **{"sm_scale": case.head_size**-0.5} | changes)
    return find_violations(call, Target.of(case), decide(case).kernels, cache.provenance)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", ["gfx942", "gfx90a", "sm_90", "cpu"])
@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_a_sound_call_has_no_breach(platform, release, op):
    """Production's order breaks nothing, whatever platform, release and op."""
    assert breaches_of(hostile(platform=platform, release=release, op=op)) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("op", ["chunked_prefill_paged_decode", "context_attention_fwd"])
def test_a_default_scale_by_heads_is_a_breach(op, release):
    """Up to 0.11.2 the wrapper takes its default scale from the number of heads; not where they agree."""
    found = breaches_of(hostile(op=op, release=release), sm_scale=None)
    by_heads = op == "chunked_prefill_paged_decode" and release == "0.11.2"
    assert [violation.kind for violation in found] == ["default_scale"] * by_heads
    as_many = hostile(op=op, release=release, num_heads=64, head_size=64)
    assert breaches_of(as_many, sm_scale=None) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_checked_int64_is_rejected_on_rocm(name, release):
    """The two tensors that the kernel checks, each by itself."""
    (violation,) = breaches_of(hostile(release=release, **{f"{name}_dtype": "int64"}))
    assert (violation.kind, violation.effect, violation.subject) == (
        "index_dtype",
        "rejected",
        name,
    )
    assert violation.kernel == ROCM_DECODE
    assert "expected scalar type Int but found Long" in violation.text


@pytest.mark.parametrize("how", ["int64", "int32_before_cumsum"])
def test_unchecked_int64_is_silent_on_rocm(how):
    """query_start_loc is reinterpreted: the text shows the pairs, and rows are left unwritten."""
    violations = breaches_of(hostile(**SEED, query_start_loc_dtype=how))
    dtype, rows = violations
    assert (dtype.kind, dtype.effect, dtype.subject) == ("index_dtype", "silent", "query_start_loc")
    assert "0, 880, 1290, … becomes 0, 0, 880, 0, 1290, 0, …" in dtype.text
    assert (rows.kind, rows.effect, rows.kernel) == ("unwritten_rows", "silent", "")
    assert "row 1290 of output (sequence 2, query_len 1)" in rows.text


@pytest.mark.parametrize("release", RELEASES)
def test_int64_on_triton(release):
    """Triton reads the dtype it is given; 0.33.0 converts the block table, which harms nobody."""
    violations = breaches_of(
        hostile(platform="sm_90", stage="int64", fill="all_rows", release=release)
    )
    if release == "0.11.2":
        assert violations == []
    else:
        assert [(b.effect, b.subject) for b in violations] == [("harmless", "block_table")]
        assert violations[0].kernel == TRITON_DECODE


def test_the_wrappers_cast_makes_int64_harmless():
    """With the proposed conversion all three are converted, and every row is written."""
    violations = breaches_of(hostile(stage="wrapper_cast", fill="all_rows"))
    assert [b.effect for b in violations] == ["harmless"] * 3
    assert {b.subject for b in violations} == {"block_table", "seq_lens", "query_start_loc"}


@pytest.mark.parametrize("platform", ["gfx942", "sm_90"])
def test_the_missing_decode_token(platform):
    """Context alone in the cache: each decode sequence lacks its newest token, and no other does."""
    case = hostile(fill="context_only", platform=platform)
    _, cache = call_of(case)
    violations = breaches_of(case)
    decodes = [i for i, n in enumerate(case.query_lens) if n == 1]
    assert len(violations) == len(decodes)
    for seq, violation in zip(decodes, violations, strict=True):
        position = case.ctx_lens[seq]
        block, offset = cache.provenance.slot(seq, position)
        assert (violation.kind, violation.effect) == ("unwritten_slot", "silent")
        assert violation.kernel == (ROCM_DECODE if platform == "gfx942" else TRITON_DECODE)
        assert (
            f"sequence {seq}, position {position}: block {block}, offset {offset},"
            in violation.text
        )
        assert "more" not in violation.text


@pytest.mark.parametrize("fill", ["decode_rows", "all_rows"])
def test_a_filled_cache_lacks_nothing(fill):
    """Filling decode rows is enough; filling all rows harms no prefill row."""
    assert breaches_of(hostile(fill=fill)) == []


def test_context_attention_reads_no_new_token_from_the_cache():
    """Called directly it takes every new token from its arguments: nothing is missing."""
    assert breaches_of(hostile(fill="context_only", op="context_attention_fwd")) == []


def test_a_foreign_slot():
    """A block table whose rows are swapped reads another sequence's tokens."""
    case = hostile(query_lens=(1, 1), ctx_lens=(20, 20))
    call, _ = call_of(case)
    violations = breaches_of(case, block_table=call.block_table.flip(0))
    assert [(b.kind, b.effect) for b in violations] == [("foreign_slot", "silent")] * 2
    assert "sequence 0, position 0" in violations[0].text
    assert "and 20 more positions" in violations[0].text


def test_a_sequences_own_blocks_in_another_order():
    """The right sequence's tokens at other positions are foreign too."""
    case = hostile(query_lens=(1,), ctx_lens=(31,))
    call, _ = call_of(case)
    (violation,) = breaches_of(case, block_table=call.block_table.flip(1))
    assert violation.kind == "foreign_slot"
    assert "sequence 0, position 0" in violation.text
    assert "and 31 more positions" in violation.text


def test_seq_lens_one_too_long():
    """A seq_len that counts a token too many reads a slot that nobody wrote."""
    case = hostile(query_lens=(1,), ctx_lens=(20,))
    call, _ = call_of(case)
    (violation,) = breaches_of(case, seq_lens=call.seq_lens + 1)
    assert violation.kind == "unwritten_slot"
    assert "position 21" in violation.text


def test_without_provenance_nothing_is_said_of_slots():
    """A captured call's slots are nobody's business."""
    case = hostile(fill="context_only")
    call, _ = call_of(case)
    assert find_violations(call, Target.of(case), decide(case).kernels) == []


def test_rows_behind_max_query_len():
    """The prefill grid covers max_query_len, in tiles of 128 rows; rows behind it are unwritten."""
    case = hostile(query_lens=(300, 1), ctx_lens=(0, 3), max_query_len=100)
    (violation,) = breaches_of(case)
    assert violation.kind == "unwritten_rows"
    assert violation.text.startswith("rows 128–299 of output (sequence 0, query_len 300)")
    assert breaches_of(case.replace(max_query_len=257)) == []
    (violation,) = breaches_of(case.replace(max_query_len=1))
    assert violation.text.startswith("rows 0–299")


def test_fp8_with_x_of_8_on_rocm():
    """The kernel takes x for 16 bytes; vLLM's test splits FP8 by 8."""
    (violation,) = breaches_of(hostile(kv_cache_dtype="fp8", x=8))
    assert (violation.kind, violation.effect, violation.subject) == (
        "key_layout",
        "silent",
        "key_cache",
    )
    assert "x = 8" in violation.text
    assert "takes it for 16" in violation.text
    assert breaches_of(hostile(kv_cache_dtype="fp8", x=16)) == []
    assert breaches_of(hostile(kv_cache_dtype="fp8", x=8, platform="sm_90")) == []


def test_a_short_max_seq_len():
    """Scratch for fewer partitions than the longest decode needs is short; 256 tokens make one."""
    (violation,) = breaches_of(hostile(max_seq_len=256))
    assert (violation.kind, violation.effect, violation.subject) == (
        "short_scratch",
        "silent",
        "max_seq_len",
    )
    assert "room for 1 partitions" in violation.text
    assert "needs 2" in violation.text
    assert breaches_of(hostile(max_seq_len=257)) == []
    assert breaches_of(hostile(max_seq_len=1, platform="sm_90")) == []


def test_a_long_prefill_needs_no_scratch():
    """Only sequences that the decode kernel serves count."""
    assert breaches_of(hostile(query_lens=(2, 1), ctx_lens=(400, 5), max_seq_len=6)) == []


@pytest.mark.parametrize(
    ("changes", "kernel", "subject"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, ROCM_DECODE, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8", "platform": "sm_80"}, PREFILL, "kv_cache_dtype"),
    ],
)
def test_what_a_kernel_does_not_take(changes, kernel, subject):
    """A format that dispatch lets through and the kernel rejects."""
    violation = breaches_of(hostile(**changes))[0]
    assert (violation.kind, violation.effect) == ("unsupported", "rejected")
    assert (violation.kernel, violation.subject) == (kernel, subject)


def test_the_worst_comes_first():
    """Rejections stand before silent violations, and these before harmless ones."""
    effects = [b.effect for b in breaches_of(hostile(stage="int64", fill="context_only"))]
    assert effects == sorted(effects, key=["rejected", "silent", "harmless"].index)
    assert {"rejected", "silent"} <= set(effects)
