"""Lengths: at the edges of tiles, read from the launches."""

import pytest
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.ops import PREFILL, UNIFIED
from attnlab.checker.hostile import Edges, edges_of, hostile_design, launches, lengths_knob
from attnlab.kernels import find_backend
from attnlab.kernels.triton.launch_plan import LaunchParameters


def test_edges_are_tiles_and_groups_of_tiles() -> None:
    numbers = {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "num_unroll_cache": 2,
        "BLOCK_DMODEL": 96,
        "stride": 8,
    }
    assert edges_of(LaunchParameters("kernel", numbers)) == Edges(
        frozenset({128}), frozenset({64, 128})
    )


def test_lengths_are_at_each_edge_and_next_to_it() -> None:
    knob = lengths_knob(UNIFIED, Edges(frozenset({8}), frozenset({16, 32})))
    fields = [value.fields for value in knob.values]
    query_lens = {n for one in fields for n in one["query_lens"]}
    ctx_lens = {n for one in fields for n in one["ctx_lens"]}
    seq_lens = {
        q + c for one in fields for q, c in zip(one["query_lens"], one["ctx_lens"], strict=True)
    }
    assert {7, 8, 9} <= query_lens
    assert {15, 16, 17, 31, 32, 33} <= ctx_lens & seq_lens


@pytest.mark.releases
def test_launches_are_read_without_running_programs() -> None:
    """The prefill kernel of 0.33.0 has 128 rows a program, which the lengths reach and exceed."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    sizes = {"num_heads": 2, "head_size": 64, "query_lens": (3,), "ctx_lens": (5,)}
    case = Case(op=PREFILL, backend="vllm", platform="sm_90", **sizes)
    (launch,) = launches(backend, case)
    assert edges_of(launch).queries == {128}
    lengths = hostile_design(backend, PREFILL, "sm_90").values["lengths"].values()
    assert {127, 128, 129} <= {n for value in lengths for n in value.fields["query_lens"]}
