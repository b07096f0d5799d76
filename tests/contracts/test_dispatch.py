"""Dispatch: vLLM's predicate, term by term."""

import pytest
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.case.ops import MERGE, PREFILL, RELEASES
from attnlab.case.platforms import PLATFORMS
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.contracts.dispatch import decide

CDNA = ("gfx90a", "gfx942", "gfx950")
RDNA = ("gfx1100", "gfx1201")
OTHER = ("sm_80", "sm_90", "cpu")
_NINE = {"num_heads": 8, "num_queries_per_kv": 1, "head_size": 128}
_ELEVEN = {"num_heads": 8, "num_queries_per_kv": 4, "block_size": 16}
GOOD = {name: _ELEVEN if name in RDNA else _NINE for name in PLATFORMS}
# Changes that make one term of a good Case fail: (platforms, changes, the term).
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
    (CDNA, {"kv_cache_dtype": "fp8_e5m2"}),  # dispatch accepts it, the kernel rejects it
]


def spread(table):
    """Return the rows of a table, one for each of its platforms."""
    return [(platform, *rest) for platforms, *rest in table for platform in platforms]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("platform", "changes"), spread(YES))
def test_the_custom_kernel_runs(platform, changes, release):
    """If every term holds, the ROCm kernel runs after the prefill kernel."""
    decision = decide(Case(**GOOD[platform] | changes, platform=platform, release=release))
    assert decision.kernels == (PREFILL, ROCM_DECODE)
    assert decision.decode == ROCM_DECODE
    assert decision.refused == ()
    assert decision.terms
    assert all(term.holds for term in decision.terms)
    assert decision.release == release


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("platform", "changes", "term"), spread(NO))
def test_each_term_alone_selects_triton(platform, changes, term, release):
    case = Case(**GOOD[platform] | changes, platform=platform, release=release)
    decision = decide(case)
    assert decision.kernels == (PREFILL, TRITON_DECODE)
    value = "given" if term == "sinks" else getattr(case, term)
    expected = str(value).lower() if value is True else str(value)
    assert [(t.name, t.value) for t in decision.refused] == [(term, expected)]
    assert len(decision.reasons) == 1


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("platform", OTHER)
def test_only_the_platform_is_checked_without_an_amd_gpu(platform, release):
    decision = decide(Case(**GOOD[platform], platform=platform, release=release))
    assert decision.decode == TRITON_DECODE
    assert [t.name for t in decision.refused] == ["platform"]


@pytest.mark.parametrize("platform", CDNA + RDNA)
def test_switches_of_0_11_2(platform):
    """0.11.2 checks two settings, the second only on CDNA; 0.33.0 checks neither."""
    case = Case(**GOOD[platform], platform=platform, release="0.11.2")
    off, aiter = {"rocm_custom_paged_attn": False}, {"aiter_paged_attn": True}
    assert decide(case.replace(**off)).decode == TRITON_DECODE
    expected = TRITON_DECODE if platform in CDNA else ROCM_DECODE
    assert decide(case.replace(**aiter)).decode == expected
    assert decide(case.replace(release="0.33.0", **off, **aiter)).decode == ROCM_DECODE


@pytest.mark.parametrize("release", RELEASES)
def test_a_block_size_that_is_not_a_power_of_two(release):
    """24 is not a supported size; 0.33.0 also requires a power of two."""
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
    """In vLLM's test only head size 128, ratio 1 and no window select the custom kernel."""
    assert decide(Case(**changes)).decode == decode


def test_context_attention_fwd_dispatches_nothing():
    """The prefill kernel serves every sequence, and no decode kernel runs."""
    decision = decide(Case(op="context_attention_fwd"))
    assert decision.kernels == (PREFILL,)
    assert decision.decode is None
    assert decision.terms == ()
    assert len(decision.reasons) == 1


def test_no_prefill_if_max_query_len_is_one():
    """The op skips the prefill kernel if the max_query_len that is passed is 1."""
    case = hostile(query_lens=(1, 1), ctx_lens=(4, 5))
    assert decide(case).kernels == (ROCM_DECODE,)
    assert decide(case.replace(max_query_len=2)).kernels == (PREFILL, ROCM_DECODE)


def test_target_of_a_case():
    case = hostile(platform="gfx90a", release="0.11.2", stage="wrapper_cast", aiter_paged_attn=True)
    target = Target.of(case)
    assert target.platform is PLATFORMS["gfx90a"]
    assert (target.release, target.wrapper_cast, target.aiter_paged_attn) == (
        "0.11.2",
        True,
        True,
    )
    assert not Target.of(hostile(stage="int64")).wrapper_cast


def test_contracts_are_those_of_the_kernels_that_run():
    case = hostile()
    contracts = decide(case).contracts(Target.of(case), case.op)
    assert [contract.name for contract in contracts] == [PREFILL, ROCM_DECODE]
    assert [contract.serves for contract in contracts] == ["prefill", "decode"]
    direct = case.replace(op=PREFILL)
    (contract,) = decide(direct).contracts(Target.of(direct), direct.op)
    assert contract.serves == "all"
    assert MERGE not in decide(case).kernels
