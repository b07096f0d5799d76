"""Values in place: a right output passes, and each kind of wrong row is found where it is."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers.masked_cases import random_case

from attnlab.case.case import Case
from attnlab.case.masks import MASKS
from attnlab.lab.lab import Lab
from attnlab.serving.batch import Request, Step
from attnlab.serving.begun_op import (
    Intent,
    RowsOfOp,
    check_values,
    contradictions,
    intent_of_layer,
    not_finite,
    sampled_heads,
    sampled_rows,
    wrong_values,
)
from attnlab.tensors.call import KernelCall
from attnlab.weights.plan import numbers

CASE = Case(
    op="unified_attention",
    num_heads=8,
    num_queries_per_kv=2,
    head_size=32,
    block_size=16,
    query_lens=(5, 1, 17),
    ctx_lens=(16, 40, 0),
    distribution="normal",
    stage="sound",
)


@pytest.fixture(scope="module")
def call() -> KernelCall:
    """A right call, with its output."""
    lab = Lab()
    return dataclasses.replace(lab.call(CASE), output=lab.run(CASE).output)


@pytest.mark.parametrize("mask", sorted(MASKS))
def test_some_rows_of_a_call_with_a_mask(mask: str) -> None:
    """The data of a mask are those of the sampled sequences."""
    case = next(case for i in range(9) if (case := random_case(mask, i)).lengths.query_lens[1:])
    call = Lab().call(case)
    call = dataclasses.replace(call, output=Lab().run(case).output)
    last = len(call.output) - 1
    for seed in range(4):
        assert not check_values(call, rows=1, heads=1, seed=seed).wrong
    found = check_values(changed(call, last, 0, 3.0), rows=None, heads=None, seed=0)
    assert [(row.row, row.heads) for row in found.wrong] == [(last, (0,))]


def changed(call: KernelCall, row: int, head: int, value: float) -> KernelCall:
    output = call.output.clone()
    output[row, head, 3] += value
    return dataclasses.replace(call, output=output)


@pytest.mark.parametrize(("rows", "heads"), [(None, None), (4, 3), (1, 1)])
def test_a_right_output_passes(call, rows, heads):
    found = check_values(call, rows=rows, heads=heads, seed=5)
    assert found.wrong == ()
    assert 0 < found.worst <= 1
    assert (found.rows, found.heads) == (rows or 23, heads or 8)


@pytest.mark.parametrize(("row", "place"), [(0, (0, 0)), (5, (1, 0)), (22, (2, 16))])
def test_one_wrong_element_is_found(call, row, place):
    found = check_values(changed(call, row, 6, 0.05), rows=None, heads=None, seed=0)
    (wrong,) = found.wrong
    assert (wrong.row, (wrong.seq, wrong.token), wrong.heads) == (row, place, (6,))
    assert wrong.error > wrong.bound > 0
    assert found.worst > 1


def test_samples_find_it_in_the_end(call):
    """Four of 23 rows and two of eight heads: after 200 samples, the element was among them."""
    wrong = changed(call, 7, 6, 0.05)
    found = [check_values(wrong, rows=4, heads=2, seed=seed).wrong for seed in range(200)]
    assert set([one[0].row for one in found if one]) == {7}


def test_nan_is_reported_with_the_state_of_its_inputs(call):
    output = check_values(changed(call, 5, 2, torch.nan), rows=None, heads=None, seed=0)
    assert [(one.row, one.finite_inputs) for one in output.wrong] == [(5, True)]
    query = call.query.clone()
    query[5] = torch.nan
    bad = dataclasses.replace(changed(call, 5, 2, torch.nan), query=query)
    bad.output[5] = torch.nan
    assert check_values(bad, rows=None, heads=None, seed=0).wrong == ()  # as it must be


def step() -> Step:
    """A step whose first request has rows that the op does not get."""
    lens = torch.tensor([2, 5, 1, 17]).numpy()
    seq_lens = torch.tensor([2, 21, 41, 17]).numpy()
    requests = [Request(name, i) for i, name in enumerate("xabc", 1)]
    return Step(number=9, requests=requests, query_lens=lens, seq_lens=seq_lens, tokens=lens)


def test_rows_of_an_op_that_gets_a_part_of_the_batch(call):
    place = RowsOfOp(layer="layers.1", step_number=9, step=step(), rank=0, first_token=2)
    bad = changed(changed(call, 3, 1, 0.1), 5, 2, torch.inf)
    found = wrong_values(place, check_values(bad, rows=None, heads=None, seed=0))
    assert [(one.kind, one.request, one.position, one.step) for one in found] == [
        ("value", "a", 19, 9),
        ("not_finite", "b", 40, 9),
    ]
    assert [one.request for one in not_finite(place, bad, set())] == ["b"]
    assert not_finite(place, bad, {2}) == []
    assert not_finite(place, call, set()) == []


def test_sampled_rows_are_of_different_sequences():
    for seed in range(50):
        rows = sampled_rows([100, 1, 1], 3, seed)
        assert len(rows) == 3
        assert {100, 101} <= set(rows)
    assert sampled_rows([2, 0], 5, 0) == [0, 1]
    seen = {row for seed in range(300) for row in sampled_rows([9, 3], 2, seed)}
    assert seen == set(range(12))


def test_sampled_heads_are_of_neighbouring_kv_heads():
    for seed in range(50):
        heads = sampled_heads(16, 4, 3, seed)
        assert len({head // 4 for head in heads}) == 1
    seen = {head for seed in range(300) for head in sampled_heads(16, 4, 3, seed)}
    assert seen == set(range(16))


def test_ranges_as_text():
    assert numbers((0, 1, 2, 3, 7, 9, 10)) == "0–3, 7, 9–10"


# Intent against arguments: each contradiction is found, and equal meanings are none.


INTENT = Intent(
    sm_scale=0.125,
    softcap=30.0,
    sliding_window=64,
    causal=True,
    sinks=[1.0, 2.0],
    alibi_slopes=[],
    kv_cache_dtype="auto",
    element_bytes=2,
    k_scale=1.0,
    v_scale=0.5,
    block_size=16,
)
FIELDS = {
    "sm_scale": 0.125,
    "softcap": 30.0,
    "sliding_window": 64,
    "causal": True,
    "sinks": torch.tensor([1.0, 2.0]),
    "k_scale": torch.ones(3, 2),
    "v_scale": 0.5,
    "seq_lens": torch.tensor([50, 200]),
    "key_cache": torch.empty(1, dtype=torch.float16),
}
ARGUMENTS = {"kv_cache_dtype": "auto", "sliding_window": 64, "s_aux": None, "alibi_slopes": None}


def found(arguments=None, block_size=16, reads_tensors=True, intent=INTENT, **fields):
    ones = contradictions(
        intent,
        {**ARGUMENTS, **(arguments or {})},
        {**FIELDS, **fields},
        block_size=block_size,
        reads_tensors=reads_tensors,
    )
    return [(one.argument, one.intended, one.given) for one in ones]


def test_equal_arguments_contradict_nothing():
    assert found() == []


@pytest.mark.parametrize(
    ("name", "value", "intended", "given"),
    [
        ("sm_scale", 0.25, 0.125, 0.25),
        ("softcap", 0.0, 30.0, 0.0),
        ("softcap", None, 30.0, 0.0),
        ("sliding_window", 0, 64, 0),
        ("sliding_window", 65, 64, 65),
        ("causal", False, True, False),
        ("sinks", None, [1.0, 2.0], []),
        ("sinks", torch.tensor([1.0, 3.0]), [1.0, 2.0], [1.0, 3.0]),
        ("alibi_slopes", torch.tensor([0.5]), [], [0.5]),
        ("k_scale", torch.full((3, 2), 2.0), 1.0, 2.0),
        ("v_scale", 1.0, 0.5, 1.0),
    ],
)
def test_a_wrong_argument_is_found(name, value, intended, given):
    assert found(**{name: value}) == [(name, intended, given)]


SHORT = {"seq_lens": torch.tensor([50, 64])}
FP8 = {"intent": Intent(kv_cache_dtype="fp8")}
LATE = {"reads_tensors": False}  # tensors would wait for a GPU


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"arguments": {"kv_cache_dtype": "fp8"}}, ["kv_cache_dtype"]),
        ({"block_size": 32}, ["block_size"]),
        ({"key_cache": torch.zeros(1, dtype=torch.uint8)}, ["key_cache"]),
        ({"arguments": {"kv_cache_dtype": "bfloat16"}}, []),
        ({"arguments": {"kv_cache_dtype": "fp8_e4m3"}, **FP8}, []),
        ({"arguments": {"kv_cache_dtype": "fp8_e5m2"}, **FP8}, ["kv_cache_dtype"]),
        ({"sliding_window": 0, **SHORT}, []),
        ({"sliding_window": 100, **SHORT}, []),
        ({"sliding_window": 63, **SHORT}, ["sliding_window"]),
        ({"sinks": None, "k_scale": torch.full((3, 2), 2.0), **LATE}, []),
        ({"v_scale": 1.0, **LATE}, ["v_scale"]),
    ],
)
def test_formats_windows_and_tensors_are_compared_by_their_meaning(given, names):
    assert [name for name, *_ in found(**given)] == names


def test_what_the_op_has_no_parameter_for_is_not_compared():
    arguments = {"kv_cache_dtype": "auto"}
    fields = {"key_cache": FIELDS["key_cache"]}
    assert contradictions(INTENT, arguments, fields, block_size=16) == []


def test_the_intent_of_a_layer():
    layer = SimpleNamespace(
        sliding_window=None,
        kv_cache_torch_dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        attn_type="decoder",
        _k_scale_float=1.0,
        _v_scale_float=2.0,
    )
    asked = {"scale": 0.1, "logits_soft_cap": None, "alibi_slopes": [0.5], "sinks": None}
    intent = intent_of_layer(layer, asked, causal=True, block_size=16)
    assert intent == Intent(
        sm_scale=0.1,
        softcap=0.0,
        sliding_window=0,
        causal=True,
        sinks=[],
        alibi_slopes=[0.5],
        kv_cache_dtype="auto",
        element_bytes=2,
        k_scale=1.0,
        v_scale=2.0,
        block_size=16,
    )
    unknown = intent_of_layer(
        SimpleNamespace(attn_type="encoder"), None, causal=True, block_size=None
    )
    assert unknown == Intent()
