"""MLA paths with models: sound ones match, and every fault is found and named."""

import pytest
import torch
from helpers.drawn_cases import draw_cases

from attnlab.case.errors import InvalidCase
from attnlab.mla.faults import MLA_FAULTS, SOUND, faults_of
from attnlab.mla.mla_case import LSE_AS_TRITON_MLA, MLA_VARIANTS, PATHS, MlaCase
from attnlab.mla.ops import ModelOps
from attnlab.mla.partial import Partial, make_inputs
from attnlab.mla.run import _projected, compared, run_path

ONE = (1, 1, 1)
# A case on which each fault changes the output by more than rounding.
CASES = {
    "prefill": MlaCase(ctx_lens=(70, 40, 0), seed=1),
    "aligned": MlaCase(ctx_lens=(70, 20, 0), chunking="aligned", empty_lse="inf"),
    "fp8 output": MlaCase(tokens_with_context=True, output_scale=0.03125),
    "fp8 cache": MlaCase(kv_cache_dtype="fp8", k_scale=0.5),
    "decode": MlaCase(path="decode", query_lens=(3, 3, 3), kv_cache_dtype="fp8", k_scale=0.5),
    "shards": MlaCase(path="shards", query_lens=ONE, num_ranks=4, spread=4.0),
    "lse": LSE_AS_TRITON_MLA.case.replace(lse_dtype="float32"),
}
PLANTED = [(name, one.name) for name, case in CASES.items() for one in faults_of(case)]
# A rounding of the LSE is below the bound of the output unless the LSE is large.
BLURRED = {("prefill", "lse_in_query_dtype"), ("aligned", "lse_in_query_dtype")}
BLURRED |= {(name, "lse_in_query_dtype") for name in ("fp8 output", "fp8 cache", "shards")}


@pytest.mark.parametrize("one", MLA_VARIANTS, ids=lambda one: one.reason)
def test_a_sound_hostile_case_matches(one):
    result = run_path(one.case)
    assert (result.status, result.first_wrong, result.cause) == ("match", None, None)


@pytest.mark.parametrize("path", PATHS)
def test_random_sound_cases_match(path):
    for case in draw_cases(path, 12):
        assert run_path(case).status == "match", case


@pytest.mark.parametrize(("name", "fault"), [one for one in PLANTED if one not in BLURRED])
def test_a_planted_fault_is_found_and_named(name, fault):
    result = run_path(CASES[name], fault=fault)
    assert (result.status, result.cause) == ("mismatch", fault)
    assert result.worst > 1


def test_every_fault_is_planted_in_some_case():
    assert {fault for _, fault in set(PLANTED) - BLURRED} == set(MLA_FAULTS)


def test_the_lse_of_triton_mla_is_found_and_named():
    result = run_path(LSE_AS_TRITON_MLA.case)
    assert (result.status, result.cause) == ("mismatch", "lse_in_query_dtype")


def test_the_first_wrong_step_is_where_the_fault_is():
    assert run_path(CASES["prefill"], fault="chunk_starts_early").first_wrong == "chunk 1"
    assert run_path(CASES["prefill"], fault="weights_exchanged").first_wrong == "merge chunk 1"
    assert run_path(CASES["shards"], fault="rank_missing").first_wrong == "combine ranks"


def test_a_fault_that_no_name_has_is_not_named():
    """Values of the wrong head: no fault of the table."""

    class OtherHead:
        name = "other head"

        def __init__(self):
            self.model = ModelOps()

        def decode(self, call):
            output, lse = self.model.decode(call)
            return output.roll(1, 1), lse

    result = run_path(CASES["decode"], OtherHead())
    assert (result.status, result.cause) == ("mismatch", None)


@pytest.mark.parametrize(("factor", "is_right"), [(0.9, True), (1.1, False)])
def test_an_error_of_one_element_beyond_its_bound_is_found(factor, is_right):
    exact = run_path(CASES["prefill"]).last.exact
    output, at = exact.output.clone(), (2, 1, 3)
    output[at] += factor * exact.errors[0][at]
    ratio = compared(Partial(output=output, lse=exact.lse), exact)
    assert (float(ratio.amax()) <= 1) is is_right


def test_a_fault_that_does_not_apply_is_refused():
    for fault in ("value_offset", "nonsense"):
        with pytest.raises(InvalidCase) as raised:
            run_path(MlaCase(), fault=fault)
        assert raised.value.field == "fault"


def test_prefill_is_attention_over_all_keys():
    """The merged output is one softmax over context and new tokens, computed without chunks."""
    case = MlaCase(num_heads=2)
    exact = run_path(case).last.exact.output
    for one, ctx_len in zip(_projected(case, make_inputs(case), SOUND), case.ctx_lens, strict=True):
        scores = torch.einsum("qhd,khd->hqk", one.query, one.key) * case.scale
        at = torch.arange(one.query.shape[0])[:, None] + ctx_len
        scores = scores.masked_fill(torch.arange(one.key.shape[0]) > at, -torch.inf)
        whole = torch.einsum("hqk,khd->qhd", scores.softmax(-1), one.value)
        assert torch.allclose(exact[one.rows], whole, atol=1e-12)
