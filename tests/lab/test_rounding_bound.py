"""The tolerance: the rounding bound of each element, or the test's."""

import dataclasses

import pytest
import torch
from helpers.cases import decode_rows, hostile

from attnlab.lab.lab import Lab
from attnlab.lab.rounding import rounding_bound


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
