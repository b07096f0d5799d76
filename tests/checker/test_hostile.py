"""Hostile cases and their variants: valid, explained, and all in use."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.sources import of_release

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import PREFILL, TRITON_OPS, UNIFIED
from attnlab.checker.hostile import (
    LATE_VARIANTS,
    VARIANTS,
    Edges,
    combinations_of,
    covering_cases,
    covering_rows,
    edges,
    edges_of,
    hostile_cases,
    hostile_design,
    launches,
    lengths_knob,
    longest_split,
    uncovered,
)
from attnlab.kernels import find_backend
from attnlab.kernels.model import ModelBackend
from attnlab.kernels.triton.launch_plan import LaunchParameters


def test_every_variant_states_its_reason() -> None:
    reasons = [variant.reason for variant in VARIANTS]
    assert len(set(reasons)) == len(VARIANTS) > 20
    assert all(reason.endswith(".") and reason[0].isupper() for reason in reasons)
    assert all(set(variant.fields) <= set(FIELDS) for variant in VARIANTS)


def test_each_feature_occurs_in_decodes_with_segments() -> None:
    """The kernel with segments has its own code for each feature."""
    segments = [
        variant.fields
        for variant in LATE_VARIANTS
        if variant.fields.get("num_splits") == 4 and set(variant.fields["query_lens"]) == {1}
    ]
    features = {"softcap", "alibi", "sinks", "sliding_window", "kv_cache_dtype", "head_size"}
    assert features <= set[str]().union(*segments)
    assert {fields.get("sliding_window", 0) == 1 for fields in segments} == {True, False}


def test_cases_are_reproducible_and_depend_on_the_seed() -> None:
    subject = ModelBackend(rules="0.33.0")
    for op in TRITON_OPS:
        first, again, other = (
            list(hostile_cases(subject, op, "sm_90", 12, seed)) for seed in (0, 0, 1)
        )
        assert len(first) == 12
        assert first == again
        assert {case.seed for case in first}.isdisjoint(case.seed for case in other)


def test_fewer_cases_are_the_first_of_all() -> None:
    subject = ModelBackend(rules="0.33.0")
    for op in TRITON_OPS[-2:]:
        every = list(hostile_cases(subject, op, "sm_90", None, 0))
        for count in (1, 12, 31, len(every)):
            few = list(hostile_cases(subject, op, "sm_90", count, 0))
            assert few == every[: len(few)]
            assert len(few) >= count  # those with unusual values are not counted
        assert len(set(every)) == len(every)


def test_every_allowed_combination_occurs_in_a_case() -> None:
    """The check of the check: without the rows that have one value, its pairs are missing."""
    subject = ModelBackend(rules="0.33.0")
    for op in ("unified_attention", "reshape_and_cache_flash"):
        cases = list(covering_cases(subject, op, "sm_90", 0))
        found = combinations_of(subject, op, "sm_90", 0, cases)
        assert found["pairs"]["covered"] == found["pairs"]["total"] > 50
        assert not found["pairs"]["missing"] + found["triples"]["missing"]
        knob, names = next(iter(found["knobs"].items()))
        rows = covering_rows(subject, op, "sm_90", 0)
        kept = [c for c, row in zip(cases, rows, strict=True) if row[knob] != names[-1]]
        missing = combinations_of(subject, op, "sm_90", 0, kept)["pairs"]["missing"]
        assert f"{knob} {names[-1]}" in missing[0]


def test_cases_that_ask_for_parts_are_split():
    """unified_attention takes the other form if a sequence has more than 8 new tokens."""
    cases = list(covering_cases(ModelBackend(rules="0.33.0"), "unified_attention", "sm_90", 0))
    split = [case for case in cases if case.num_splits]
    assert max(max(case.lengths.query_lens) for case in split) == 8
    others = [case for case in cases if not case.num_splits]
    assert max(max(case.lengths.query_lens) for case in others) > 8
    longest = [max(max(case.lengths.seq_lens) for case in some) for some in (split, others)]
    assert longest[0] == longest[1]


@pytest.mark.releases
@pytest.mark.parametrize(("version", "most"), [("0.11.2", 1), ("0.33.0", 8)])
def test_the_most_rows_that_are_split_are_read_from_the_launches(version, most):
    assert longest_split(find_backend("vllm", of_release(version).path, "cpu")) == most


@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
def test_sinks_with_alibi_occur_in_several_rows_of_a_sequence(version):
    """A split leaves one row per sequence in older releases, in which wrong distances do not show."""
    backend = find_backend("vllm", of_release(version).path, "cpu")
    cases = hostile_cases(backend, "unified_attention", "sm_90", 2 * len(VARIANTS), 0)
    chosen = (case for case in cases if case.sinks and case.alibi and case.op_argument == "none")
    assert max(map(max, [case.query_lens for case in chosen])) > 1


def test_what_is_refused_has_a_reason_and_is_refused() -> None:
    design = hostile_design(ModelBackend(rules="0.33.0"), "unified_attention", "sm_90")
    assert {len(entry) for entry in design.refused} == {1, 2}
    assert all(design.refused.values())
    for entry in design.refused:
        if len(entry) == 2:
            with pytest.raises(InvalidCase):
                design.make(design.fields({**design.plain(), **dict(entry)}))


@pytest.mark.releases
def test_a_value_that_the_op_itself_refuses_is_in_no_row() -> None:
    """Such rows run nothing: in 0.11.2 they alone had the pair of head size 80 and padding."""
    backend = find_backend("vllm", of_release("0.11.2").path, "cpu")
    design = hostile_design(backend, "unified_attention", "sm_90")
    assert design.refused[(("cache", "fp8 query"),)] == "Q scales not supported"
    assert [*design.values["cache"]] == ["plain", "fp8"]
    assert not uncovered(design, covering_rows(backend, "unified_attention", "sm_90", 0))


def test_rows_depend_on_the_seed() -> None:
    subject = ModelBackend(rules="0.33.0")
    one, other = (covering_rows(subject, TRITON_OPS[0], "sm_90", seed) for seed in (0, 1))
    assert one != other


# Lengths: at the edges of tiles, read from the launches.


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
    fields = list(knob.values.values())
    query_lens = {n for one in fields for n in one["query_lens"]}
    ctx_lens = {n for one in fields for n in one["ctx_lens"]}
    seq_lens = {
        q + c for one in fields for q, c in zip(one["query_lens"], one["ctx_lens"], strict=True)
    }
    assert {7, 8, 9} <= query_lens
    assert {15, 16, 17, 31, 32, 33} <= ctx_lens & seq_lens


def test_sequences_have_several_parts_where_a_part_has_at_least_32_keys(monkeypatch: Any) -> None:
    monkeypatch.setattr("attnlab.checker.hostile.launches", lambda backend, case: [])
    backend: Any = SimpleNamespace(is_interpreted=True)
    lens: Any = {"query_lens": (1,), "ctx_lens": (9,)}
    steps = Case(op="sglang_decode_attention", backend="library:sglang", **lens)
    assert edges(backend, [steps]).keys == {16, 32, 64}
    assert edges(backend, [Case(op="decode_attention_fwd", **lens)]).keys == {16}


@pytest.mark.releases
def test_launches_are_read_without_running_programs() -> None:
    """The prefill kernel of 0.33.0 has 128 rows a program, which the lengths reach and exceed."""
    backend = find_backend("vllm", of_release("0.33.0").path, "cpu")
    sizes = {"num_heads": 2, "head_size": 64, "query_lens": (3,), "ctx_lens": (5,)}
    (launch,) = launches(backend, Case(op=PREFILL, backend="vllm", platform="sm_90", **sizes))
    assert edges_of(launch).queries == {128}
    lengths = hostile_design(backend, PREFILL, "sm_90").values["lengths"].values()
    assert {127, 128, 129} <= {n for value in lengths for n in value["query_lens"]}
