"""MLA paths with models: sound ones match, and every fault is found and named."""

import pytest
import torch
from helpers.cases import refused
from helpers.drawn_cases import draw_cases
from helpers.sources import needs_triton, of_release

from attnlab.case.errors import InvalidCase
from attnlab.mla.faults import MLA_FAULTS, SOUND, chunks_of, faults_of
from attnlab.mla.mla_case import CHUNKINGS, LSE_AS_TRITON_MLA, MLA_VARIANTS, PATHS, PREFILL, MlaCase
from attnlab.mla.partial import ModelOps, Partial, VllmOps, make_inputs
from attnlab.mla.run import _projected, compared, run_path
from study.mla_chain import MLA_EDITS, edited_ops

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
        with refused("fault"):
            run_path(MlaCase(), fault=fault)


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


# The chunks of a context: every token once, and within the limits of each plan.


DRAWN = list(draw_cases(PREFILL, 30))
CHUNKED = [case.replace(chunking=one, empty_lse="-inf") for one in CHUNKINGS for case in DRAWN]
PACKED = [[(0, 0, 32)], [(0, 32, 40)], [(2, 0, 5), (3, 0, 20)]]  # 5 + 20 fit into one chunk
ALIGNED = [
    [(0, 0, 32), (1, 0, 0), (2, 0, 5), (3, 0, 20)],
    [(0, 32, 40), (1, 0, 0), (2, 5, 5), (3, 20, 20)],
]


def spans_of(case: MlaCase) -> list[list[tuple[int, int, int]]]:
    return [[(one.seq, one.start, one.end) for one in spans] for spans in chunks_of(case)]


def test_every_token_of_a_context_is_in_one_chunk():
    for case in CHUNKED:
        found = [(seq, at) for spans in spans_of(case) for seq, a, b in spans for at in range(a, b)]
        assert sorted(found) == [(s, at) for s, n in enumerate(case.ctx_lens) for at in range(n)]


def test_a_packed_chunk_has_neighbours_and_fits():
    for case in CHUNKED[:30]:
        case = case.replace(chunking="packed")
        for spans in spans_of(case):
            assert sum(end - start for _, start, end in spans) <= case.chunk_rows
            seqs = [seq for seq, _, _ in spans]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
            assert all(end > start and start % case.block_size == 0 for _, start, end in spans)


@pytest.mark.parametrize(("chunking", "expected"), [("packed", PACKED), ("aligned", ALIGNED)])
def test_an_example(chunking, expected):
    case = MlaCase(query_lens=(1,) * 4, ctx_lens=(40, 0, 5, 20), chunking=chunking)
    assert spans_of(case) == expected


# The fields of an MlaCase, and what is refused.


WRONG = [
    ({"path": "encode"}, "path"),
    ({"num_heads": 0}, "num_heads"),
    ({"num_heads": True}, "num_heads"),
    ({"query_lens": ()}, "query_lens"),
    ({"query_lens": (0, 1, 2)}, "query_lens"),
    ({"query_lens": "3,4"}, "query_lens"),
    ({"ctx_lens": (1, 2)}, "ctx_lens"),
    ({"ctx_lens": (1, -2, 3)}, "ctx_lens"),
    ({"ctx_lens": (1 << 30, 0, 0)}, "ctx_lens"),
    ({"chunk_rows": 24}, "chunk_rows"),
    ({"block_size": 48, "chunk_rows": 48}, "block_size"),
    ({"spread": float("nan")}, "spread"),
    ({"output_scale": 0.0}, "output_scale"),
    ({"k_scale": 2.0}, "k_scale"),
    ({"kv_cache_dtype": "fp8", "platform": "sm_80"}, "kv_cache_dtype"),
    (
        {"kv_cache_dtype": "fp8", "path": "decode", "query_lens": ONE, "release": "0.11.2"},
        "kv_cache_dtype",
    ),
    ({"tokens_with_context": True, "ctx_lens": (0, 5, 6)}, "ctx_lens"),
    ({"output_scale": 0.5, "release": "0.11.2"}, "output_scale"),
    ({"padding": 1}, "padding"),
    ({"path": "decode", "query_lens": (1, 2, 1)}, "query_lens"),
    ({"path": "decode", "query_lens": ONE, "num_ranks": 4}, "num_ranks"),
    ({"path": "shards", "query_lens": (2, 2, 2)}, "query_lens"),
    ({"path": "shards", "query_lens": ONE, "num_ranks": 3}, "num_ranks"),
    ({"path": "shards", "query_lens": ONE, "kv_lora_rank": 48}, "kv_lora_rank"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG, ids=lambda one: str(one)[:40])
def test_what_is_refused(fields, field):
    with refused(field):
        MlaCase(**fields)


def test_fields_survive_json():
    case = MlaCase(
        path="decode", query_lens=(2, 2), ctx_lens=(0, 7), kv_cache_dtype="fp8", k_scale=0.5
    )
    assert MlaCase.from_dict(case.to_dict()) == case


def test_an_unknown_field_is_refused():
    with pytest.raises(InvalidCase, match="heads is not a field"):
        MlaCase.from_dict({"heads": 3})
    with pytest.raises(InvalidCase):
        MlaCase().replace(heads=3)


# MLA paths on vLLM's Triton ops under the interpreter, with faults planted in copies of its source.


# With empty chunks, and with pages that hold finite numbers where the wrong slots are.
EDITED = {
    "merge_base_2": MlaCase(num_heads=1, query_lens=(2,), ctx_lens=(40,), chunk_rows=16),
    "weights_exchanged": MlaCase(num_heads=1, query_lens=(2,), ctx_lens=(40,), chunk_rows=16),
    "both_empty_as_nan": MlaCase(
        num_heads=1, query_lens=(1, 2), ctx_lens=(40, 0), chunking="aligned"
    ),
    "page_as_slot": MlaCase(
        path="decode", num_heads=2, query_lens=(1,), ctx_lens=(40,), num_splits=1
    ),
}


def ops_of(release: str) -> VllmOps:
    return VllmOps(source=of_release(release), platform=MlaCase().machine)


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("path", PATHS)
def test_ops_of_0_33_0_match(path):
    """A few random cases of each path; models agree with the ops because both match."""
    for case in draw_cases(path, 4, seed=7):
        assert run_path(case, ops_of("0.33.0")).status == "match", case


@pytest.mark.releases
@needs_triton
def test_the_decode_op_as_partial_attention_matches():
    case = MlaCase(num_heads=1, query_lens=(2,), ctx_lens=(40,), partials="op")
    assert run_path(case, ops_of("0.33.0")).status == "match"


@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("name", MLA_EDITS)
def test_a_fault_in_the_source_is_found_and_named(name, tmp_path):
    ops = edited_ops(of_release("0.33.0"), name, tmp_path, EDITED[name])
    result = run_path(EDITED[name], ops)
    assert (result.status, result.cause) == ("mismatch", name)


@pytest.mark.releases
@needs_triton
def test_0_11_2_merges_two_empty_parts_to_nan():
    case = EDITED["both_empty_as_nan"]
    assert run_path(case, ops_of("0.33.0")).status == "match"
    found = run_path(case.replace(release="0.11.2"), ops_of("0.11.2"))
    assert (found.status, found.cause) == ("mismatch", "both_empty_as_nan")


@pytest.mark.releases
@needs_triton
def test_the_lse_of_triton_mla_loses_precision():
    found = run_path(LSE_AS_TRITON_MLA.case, ops_of("0.33.0"))
    assert (found.status, found.cause) == ("mismatch", "lse_in_query_dtype")
