"""MLA paths on vLLM's Triton ops under the interpreter, with faults planted in copies of its source."""

import pytest
from helpers.drawn_cases import draw_cases
from helpers.sources import needs_triton, of_release

from attnlab.mla.mla_case import LSE_AS_TRITON_MLA, PATHS, MlaCase
from attnlab.mla.ops import VllmOps
from attnlab.mla.run import run_path
from study.mla_chain import MLA_EDITS, edited_ops

pytestmark = [pytest.mark.releases, needs_triton]
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


@pytest.mark.parametrize("path", PATHS)
def test_ops_of_0_33_0_match(path):
    """A few random cases of each path; models agree with the ops because both match."""
    for case in draw_cases(path, 4, seed=7):
        assert run_path(case, ops_of("0.33.0")).status == "match", case


def test_the_decode_op_as_partial_attention_matches():
    case = MlaCase(num_heads=1, query_lens=(2,), ctx_lens=(40,), partials="op")
    assert run_path(case, ops_of("0.33.0")).status == "match"


@pytest.mark.parametrize("name", MLA_EDITS)
def test_a_fault_in_the_source_is_found_and_named(name, tmp_path):
    ops = edited_ops(of_release("0.33.0"), name, tmp_path, EDITED[name])
    result = run_path(EDITED[name], ops)
    assert (result.status, result.cause) == ("mismatch", name)


def test_0_11_2_merges_two_empty_parts_to_nan():
    case = EDITED["both_empty_as_nan"]
    assert run_path(case, ops_of("0.33.0")).status == "match"
    found = run_path(case.replace(release="0.11.2"), ops_of("0.11.2"))
    assert (found.status, found.cause) == ("mismatch", "both_empty_as_nan")


def test_the_lse_of_triton_mla_loses_precision():
    found = run_path(LSE_AS_TRITON_MLA.case, ops_of("0.33.0"))
    assert (found.status, found.cause) == ("mismatch", "lse_in_query_dtype")
