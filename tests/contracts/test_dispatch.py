"""Dispatch: vLLM's predicate, term by term."""

import pytest
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.case.ops import PREFILL, RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.dispatch import ROCM_DECODE, TRITON_DECODE, Target, decide

CDNA = ("gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
OTHER = ("sm_80", "sm_90", "cpu")
_NINE = {"num_heads": 8, "num_queries_per_kv": 1, "head_size": 128}
_ELEVEN = {"num_heads": 8, "num_queries_per_kv": 4, "block_size": 16}
GOOD = {name: _ELEVEN if name in RDNA else _NINE for name in PLATFORMS}
# What turns a good Case down by itself: (platforms, changes, the term that says no).
NO = [
    (CDNA + RDNA, {"sliding_window": 16}, "sliding_window"),
    (CDNA + RDNA, {"dtype": "float32"}, "dtype"),
    (CDNA + RDNA, {"head_size": 24}, "head_size"),
    (CDNA + RDNA, {"head_size": 256}, "head_size"),
    (RDNA, {"head_size": 64}, "head_size"),
    (CDNA + RDNA, {"block_size": 8}, "block_size"),
    (CDNA + RDNA, {"block_size": 64}, "block_size"),
    (RDNA, {"block_size": 32}, "block_size"),
    (CDNA + RDNA, {"num_heads": 17, "num_queries_per_kv": 17}, "num_queries_per_kv"),
    (CDNA + RDNA, {"num_heads": 64, "num_queries_per_kv": 64}, "num_queries_per_kv"),
    (RDNA, {"num_queries_per_kv": 2}, "num_queries_per_kv"),
    (CDNA + RDNA, {"max_seq_len": 131_073}, "max_seq_len"),
    (RDNA, {"alibi": True}, "alibi"),
    (CDNA + RDNA, {"sinks": True}, "sinks"),
    (RDNA, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    (RDNA, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
]
YES = [
    (CDNA + RDNA, {}),
    (CDNA + RDNA, {"dtype": "bfloat16"}),
    (CDNA + RDNA, {"max_seq_len": 131_072}),
    (CDNA + RDNA, {"num_heads": 16, "num_queries_per_kv": 16}),
    (RDNA, {"num_heads": 6, "num_queries_per_kv": 3}),
    (CDNA, {"head_size": 64}),
    (CDNA, {"block_size": 16}),
    (CDNA, {"alibi": True}),
    (CDNA, {"kv_cache_dtype": "fp8"}),
    (CDNA, {"kv_cache_dtype": "fp8_e5m2"}),  # taken here, rejected by the kernel
]


def spread(table):
    """Return the rows of a table, one for each of its platforms."""
    return [(platform, *rest) for platforms, *rest in table for platform in platforms]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("platform", "changes"), spread(YES))
def test_the_custom_kernel_is_taken(platform, changes, release):
    """Where every term holds, the ROCm kernel decodes, behind the prefill."""
    decision = decide(Case(**GOOD[platform] | changes, platform=platform, release=release))
    assert decision.kernels == (PREFILL, ROCM_DECODE)
    assert decision.decode == ROCM_DECODE
    assert decision.refused == ()
    assert decision.reasons == [f"{ROCM_DECODE}: every term of the predicate holds"]
    assert release in decision.source


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("platform", "changes", "term"), spread(NO))
def test_each_term_says_no_by_itself(platform, changes, term, release):
    """One knob is enough for Triton, and the reason names it with its value."""
    case = Case(**GOOD[platform] | changes, platform=platform, release=release)
    decision = decide(case)
    assert decision.kernels == (PREFILL, TRITON_DECODE)
    assert [t.name for t in decision.refused] == [term]
    value = "given" if term == "sinks" else getattr(case, term)
    assert f"{term} is {str(value).lower() if value is True else value}" in decision.reasons[0]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", OTHER)
def test_the_platform_alone_decides_elsewhere(platform, release):
    """Off AMD GPUs nothing else is asked."""
    decision = decide(Case(**GOOD[platform], platform=platform, release=release))
    assert decision.decode == TRITON_DECODE
    assert [t.name for t in decision.refused] == ["platform"]


@pytest.mark.parametrize("platform", CDNA + RDNA)
def test_switches_of_0_11_2(platform):
    """0.11.2 asks for two switches, the second on CDNA alone; 0.33.0 asks for neither."""
    case = Case(**GOOD[platform], platform=platform, release="0.11.2")
    off, aiter = {"rocm_custom_paged_attn": False}, {"aiter_paged_attn": True}
    assert decide(case.replace(**off)).decode == TRITON_DECODE
    expected = TRITON_DECODE if platform in CDNA else ROCM_DECODE
    assert decide(case.replace(**aiter)).decode == expected
    assert decide(case.replace(release="0.33.0", **off, **aiter)).decode == ROCM_DECODE


@pytest.mark.parametrize("release", RELEASES)
def test_blocks_that_are_no_power_of_two(release):
    """A block of 24 is refused by its size; 0.33.0 says besides that it is no power of two."""
    decision = decide(Case(**GOOD["gfx942"], block_size=24, release=release))
    assert decision.decode == TRITON_DECODE
    assert len(decision.refused) == (1 if release == "0.11.2" else 2)


@pytest.mark.parametrize(
    ("changes", "decode"),
    [
        ({}, ROCM_DECODE),
        ({"kv_cache_dtype": "fp8_e5m2"}, ROCM_DECODE),
        ({"kv_cache_dtype": "fp8_e5m2", "head_size": 24, "x": 8}, TRITON_DECODE),
        ({"kv_cache_dtype": "fp8_e5m2", "num_queries_per_kv": 64}, TRITON_DECODE),
        ({"sliding_window": 16}, TRITON_DECODE),
        ({"platform": "gfx1100", "num_queries_per_kv": 4}, TRITON_DECODE),  # block_size 32
    ],
)
def test_the_tests_own_parameters(changes, decode):
    """Of vLLM's test only head size 128, ratio 1 and no window reach the custom kernel."""
    assert decide(Case(**changes)).decode == decode


def test_context_attention_fwd_dispatches_nothing():
    """Called directly, the prefill kernel does every sequence and no decode kernel runs."""
    decision = decide(Case(op="context_attention_fwd"))
    assert decision.kernels == (PREFILL,)
    assert decision.decode is None
    assert decision.terms == ()
    assert "called directly" in decision.reasons[0]


def test_no_prefill_without_a_query_longer_than_one():
    """The op skips the prefill where max_query_len, as passed, is 1."""
    case = hostile(query_lens=(1, 1), ctx_lens=(4, 5))
    assert decide(case).kernels == (ROCM_DECODE,)
    assert decide(case.replace(max_query_len=2)).kernels == (PREFILL, ROCM_DECODE)


def test_setting_of_a_case():
    """What is no argument of the op is in the Setting."""
    case = hostile(platform="gfx90a", release="0.11.2", stage="wrapper_cast", aiter_paged_attn=True)
    target = Target.of(case)
    assert target.platform is PLATFORMS["gfx90a"]
    assert (target.release, target.wrapper_cast, target.aiter_paged_attn) == (
        "0.11.2",
        True,
        True,
    )
    assert not Target.of(hostile(stage="int64")).wrapper_cast
