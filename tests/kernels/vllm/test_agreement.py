"""The models agree with vLLM's own kernels of each release on random small cases.

The bound is derived. Both round a weight to the dtype of the values and the output to that of the query,
each once, at scores that differ by float32's rounding of a dot product of head_size terms:

    |difference| ≤ A × (2 u + 2 u + 2 e) + n × 2^-23 × V

where A is the same attention over |value| (the model run with absolute values), u the unit roundoff of
the dtype, e = head_size × 2^-22 × |q| |k| scale, and the last term the weights too small for float16.
"""

import warnings

import numpy as np
import pytest
import torch
from helpers.agreement import agrees, bound, modelled, real
from helpers.cases import hostile, same_bits
from helpers.examples import examples
from helpers.sources import RELEASES, needs_triton, release
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlab.case.case import Case
from attnlab.contracts.contract import ROCM_DECODE, Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels.binding import bind
from attnlab.kernels.triton.launch_plan import LaunchPlan, Subset, launching, needed
from attnlab.kernels.vllm import backend as vllm_ops
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.lab.result import map_errors

pytestmark = needs_triton


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a small Case whose decode kernel is Triton's, with lengths near block edges."""
    kv_cache_dtype = draw(st.sampled_from(("auto", "auto", "fp8", "fp8_e5m2")))
    block_size = draw(st.sampled_from((8, 16, 32, 64)))
    edge = st.tuples(st.integers(0, 2), st.sampled_from((-1, 0, 1)))
    ctx_lens, query_lens = [], []
    for _ in range(draw(st.integers(1, 3))):
        blocks, offset = draw(edge)
        ctx_lens.append(max(0, blocks * block_size + offset))
        query_lens.append(draw(st.sampled_from((1, 1, 2, 17))))
    alibi = draw(st.booleans())
    group = draw(st.integers(1, 8))
    return Case(
        release="0.33.0",
        interleave_v=block_size % 16 == 0 and draw(st.booleans()),
        op=draw(st.sampled_from(("chunked_prefill_paged_decode", "context_attention_fwd"))),
        num_heads=group * draw(st.integers(1, 2 if group <= 4 else 1)),
        num_queries_per_kv=group,
        head_size=draw(st.sampled_from((32, 48, 64, 80, 96, 112, 128)))
        if kv_cache_dtype != "auto"
        else draw(st.sampled_from((24, 40, 64, 96, 128))),
        block_size=block_size,
        dtype=draw(st.sampled_from(("float16", "float16", "float32"))),
        kv_cache_dtype=kv_cache_dtype,
        k_scale=draw(st.sampled_from((1.0, 0.25))),
        v_scale=draw(st.sampled_from((1.0, 2.0))),
        sliding_window=0 if alibi else draw(st.sampled_from((0, 0, 1, 16, block_size))),
        alibi=alibi,
        sinks=not alibi and draw(st.booleans()),
        sm_scale=draw(st.sampled_from((None, 0.1))),
        query_lens=tuple(query_lens),
        ctx_lens=tuple(ctx_lens),
        stage=draw(st.sampled_from(("sound", "sound", "cast_after_cumsum", "int64"))),
        empty_slots=draw(st.sampled_from(("zeros", "nan", "garbage"))),
        platform=draw(st.sampled_from(("sm_90", "gfx942"))),
        distribution="normal",
        output_init="nan",
        seed=draw(st.integers(0, 1000)),
    )


@settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_model_agrees_with_the_real_kernel(source: Source, case: Case) -> None:
    """Both ops agree within the derived bound, NaN for NaN."""
    known = source.rules == "0.33.0" and case.interleave_v
    case = case.replace(release=source.rules, interleave_v=known)
    if ROCM_DECODE in decide(case).kernels:
        case = case.replace(platform="sm_90")
    assert agrees(modelled(case).output, real(case, source).output, bound(case))


def test_agreement_sees_a_wrong_kernel(source: Source) -> None:
    """The bound detects a missing newest token and a scale that is 2 % too large."""
    case = hostile(platform="sm_90", release=source.rules, sm_scale=0.125, num_heads=2)
    right, within = real(case, source).output, bound(case)
    assert agrees(modelled(case).output, right, within)
    for wrong in (
        case.replace(sm_scale=0.1275),
        case.replace(fill="context_only", empty_slots="zeros"),
    ):
        assert not agrees(modelled(wrong).output, right, within)


def test_left_out_programs_write_nothing(source: Source) -> None:
    """All programs in one process give the same bits as the needed ones in several."""
    for op in ("chunked_prefill_paged_decode", "context_attention_fwd"):
        case = hostile(op=op, platform="sm_90", release=source.rules, num_heads=2)
        few, call = real(case, source), Lab().call(case)
        function = vllm_ops.load(source, case.machine, "cpu").function(op)
        with launching(LaunchPlan()):
            function(**bind(function, call, Target.of(case)))
        assert same_bits(call.output, few.output)


def test_a_choice_of_heads_leaves_the_others_alone(source: Source) -> None:
    """Rows of heads that did not run keep their bits; the others are compared and match."""
    case = hostile(
        platform="sm_90",
        backend="vllm",
        release=source.rules,
        kv_head_range=(1, 2),
        empty_slots="zeros",
        sm_scale=0.125,
    )
    result = Lab(source=source.path).run(case.replace(atol=1e-2))
    assert result.status == "match"
    assert result.backend == f"vllm {source.version}, Triton interpreter"
    assert result.call.output[:, [0, 1, 4, 5]].isnan().all()
    assert result.errors.heads == range(2, 4)
    assert result.errors.total == case.lengths.num_tokens * 2 * case.head_size
    assert "query heads 2 to 3 of 6" in result.verdict


def test_on_mi300_the_wrapper_calls_the_model_of_the_rocm_kernel(source: Source) -> None:
    """The real wrapper uses the lab's dispatch, and its arguments form the same call."""
    case = hostile(platform="gfx942", backend="vllm", release=source.rules, num_heads=2)
    for stage in ("sound", "int32_before_cumsum", "wrapper_cast"):
        staged = case.replace(stage=stage)
        result = Lab(source=source.path).run(staged)
        assert result.backend.endswith("ROCm decode: model")
        assert agrees(modelled(staged).output, result.call.output, bound(staged))
    result = Lab(source=source.path).run(case.replace(stage="int64"))
    assert (result.status, result.error) == ("rejected", "expected scalar type Int but found Long")


@pytest.mark.releases
def test_findings_by_release() -> None:
    """0.11.2 takes the default scale from the number of heads and reads NaN of the last block; 0.33.0
    does not."""
    found = {}
    for version in RELEASES:
        source = release(version)
        if isinstance(source, str):
            pytest.skip(source)
        case = hostile(platform="sm_90", release=source.rules, num_heads=2)
        by_default = real(case.replace(empty_slots="zeros"), source).output
        by_size = real(case.replace(empty_slots="zeros", sm_scale=0.125), source).output
        by_heads = real(case.replace(empty_slots="zeros", sm_scale=2**-0.5), source).output
        nan = int(real(case, source).output.isnan().sum())
        found[version] = (same_bits(by_default, by_size), nan)
        decodes = torch.tensor(case.query_lens) == 1
        prefill = torch.repeat_interleave(~decodes, torch.tensor(case.query_lens))
        assert same_bits(by_default[prefill], by_heads[prefill]) is (version == "0.11.2")
    # Four of six decodes end inside a block: 4 rows of 2 heads of 64.
    assert found == {"0.11.2": (False, 4 * 2 * 64), "0.33.0": (True, 0)}


def test_needed_runs_kernels_that_it_does_not_know() -> None:
    """All programs of an unknown kernel run."""
    assert needed("kernel_of_next_year", {}, (3, 4, 5), Subset(kv_heads=range(1)))


def test_compare_counts_the_heads_that_ran() -> None:
    """A head that did not run counts neither as error nor as match."""
    case = hostile()
    expected = torch.zeros(case.lengths.num_tokens, 6, 64)
    output = expected.clone()
    output[0, 1], output[7, 3, 5] = 1.0, 1.0
    errors = map_errors(output, expected, case.lengths, 1e-4, 0.0, range(2, 4))
    assert (errors.mismatched, errors.first_index) == (1, (7, 3, 5))
    assert errors.greatest_abs.index == (7, 3, 5)
    assert torch.isneginf(errors.error[:, [0, 1, 4, 5]]).all()
    assert [place.heads for place in errors.places()] == [(3,)]


@pytest.mark.releases
def test_the_labs_launch_gives_the_bits_of_tritons_own() -> None:
    """The lab's launch gives the same bits as the stock launch, for 0.33.0, which the stock launch can
    run."""
    source = release("0.33.0")
    if isinstance(source, str):
        pytest.skip(source)
    case = hostile(platform="sm_90", num_heads=2, alibi=True)
    call, mine = Lab().call(case), real(case, source)
    stock = vllm_ops.load_stock(source, case.machine).function(case.op)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        stock(**bind(stock, call, Target.of(case)))
    assert same_bits(call.output, mine.output)
