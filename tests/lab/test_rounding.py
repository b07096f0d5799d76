"""The rounding bound holds for every kernel model, and small errors exceed it."""

import dataclasses
import random

import pytest
import torch
from fault_injection import correct_run, random_case
from helpers.cases import decode_rows, hostile

from attnlab.case.errors import KernelRejected
from attnlab.diagnosis.candidates import locate
from attnlab.lab.lab import Lab
from attnlab.lab.reference import rounding_bound


def worst(case) -> float:
    """Return the largest error of a correct run in units of the bound."""
    problem, output = correct_run(Lab(), case)
    return float(locate(problem, output).ratio.max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("platform", ["gfx942", "gfx1100", "sm_90"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_sound_runs_stay_within_it(dtype, platform, kv):
    assert (
        worst(hostile(dtype=dtype, platform=platform, kv_cache_dtype=kv, empty_slots="zeros")) <= 1
    )


def test_random_sound_runs_stay_within_it():
    rng, ran = random.Random(5), 0
    while ran < 25:
        try:
            assert worst(random_case(rng)) <= 1
        except KernelRejected:
            continue
        ran += 1


def test_it_is_within_a_factor_of_what_kernels_do():
    """The errors of float16 reach a fifth of the bound."""
    assert worst(hostile(platform="sm_90", empty_slots="zeros")) > 0.2


def test_an_error_just_above_it_is_seen():
    """An error of twice the bound in one element gives one wrong row."""
    case = hostile()
    problem, output = correct_run(Lab(), case)
    row_slice = problem.row_slice_of(20, torch.tensor([3]))
    rounding = problem.correct(row_slice).bound[0, 0, 7]
    output[20, 3, 7] = (problem.correct(row_slice).output[0, 0, 7] + 2 * rounding).to(output.dtype)
    assert torch.nonzero(locate(problem, output).is_wrong).tolist() == [[20, 3]]


def test_long_contexts_have_a_sharper_bound():
    """If values cancel, the probable bound is far below the worst case and still holds."""
    case = hostile(
        query_lens=(1, 1), ctx_lens=(900, 1500), platform="sm_90", distribution="uniform_1e-3"
    )
    problem, output = correct_run(Lab(), case)
    row_slice = problem.row_slice_of(1, torch.arange(6))
    share = problem.attention_inputs(row_slice).rounding.relative(1501, 0.0)
    worst_case = share * 5e-4  # the mean magnitude of ±1e-3
    assert float(problem.correct(row_slice).bound.max()) < worst_case / 2
    assert float(locate(problem, output).ratio.max()) <= 1


# The tolerance: the rounding bound of each element, or the test's.


@pytest.mark.parametrize("distribution", ["normal", "uniform_1e-3"])
@pytest.mark.parametrize("op", ["unified_attention", "context_attention_fwd", "merge_attn_states"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_sound_kernel_matches_on_any_data(distribution, op, kv_cache_dtype):
    case = hostile(op=op, distribution=distribution, kv_cache_dtype=kv_cache_dtype, sm_scale=0.125)
    result = Lab().run(case.replace(reference_dtype="float32"))
    assert (result.status, result.errors.mismatched, result.beyond_rounding) == ("match", 0, 0)
    assert result.errors.is_derived


def test_an_error_beyond_rounding_is_a_mismatch():
    """Twice its own bound is wrong for an element of a decode row, 0.9 times it is not."""
    lab, case = Lab(), hostile(op="unified_attention")
    result = lab.run(case)
    row = int(torch.nonzero(decode_rows(case)).flatten()[-1])
    bounds = rounding_bound(case, lab.batch(case), result.call, result.decision.kernels)
    bound = bounds[row, 2, 5]
    for factor, wrong in ((0.9, 0), (2.0, 1)):
        output = lab.reference(case).clone()
        output[row, 2, 5] += factor * bound
        call = dataclasses.replace(result.call, output=output)
        assert lab.errors(case, call, lab.reference(case)).mismatched == wrong
    assert (
        bound < lab.errors(case, call, lab.reference(case)).atol
    )  # another row has a larger bound


def test_both_counts_of_a_tolerance():
    """Rounding exceeds a small tolerance; a large one accepts what rounding does not explain."""
    strict = Lab().run(hostile(op="unified_attention", atol=1e-5))
    assert (strict.status, strict.beyond_rounding) == ("mismatch", 0)
    missing = hostile(op="unified_attention", fill="decode_rows", empty_slots="zeros", atol=100.0)
    lenient = Lab().run(missing)
    assert lenient.status == "match"
    assert lenient.beyond_rounding > 0
    assert lenient.to_dict(0)["beyond_rounding"] == lenient.beyond_rounding
