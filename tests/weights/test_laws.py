"""Laws of weights: constants of tiles, parts and heads, scales of keys and values, rows of zeros."""

import pytest
import torch
from helpers import faulty_attention, hooked_attention

import attnlab
from attnlab.case.case import Case
from attnlab.weights.key_rules import OtherSlots, TileTimes
from attnlab.weights.plan import LAST
from attnlab.weights.score_rules import Gain, HeadGain, HeadScore, NotRescaled, ScoreFactor

FIELDS = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "block_size": 16,
    "query_lens": (5, 9, 20),
    "ctx_lens": (40, 67, 90),
    "distribution": "normal",
    "empty_slots": "garbage",
    "output_init": "nan",
    "platform": "sm_90",
}


def xray_of(name: str, **options):
    op = getattr(hooked_attention, name).op
    case = Case(**FIELDS, op=op, backend=f"{hooked_attention.__file__}:{name}")
    return attnlab.xray(case, **options)


def described(name: str):
    """Return the rules of a description that a second case confirms."""
    found = xray_of(name)
    assert (found.status, found.confirmed) == ("described", True), found.sentences
    return found.description.rules


def test_a_constant_of_a_tile_names_the_tile():
    (rule,) = described("tile_1_three_times")
    assert isinstance(rule, TileTimes)
    assert (rule.steps.tile, rule.steps.only, rule.of) == (32, 1, "values")
    assert rule.times.number == pytest.approx(3, rel=1e-3)


def test_a_rule_that_changes_no_decode_here_is_tried_for_prefills_alone():
    """The decode has no key in tile 2. Those of the second case have, and they are right."""
    fields = {
        **FIELDS,
        "query_lens": (5, 1),
        "ctx_lens": (90, 50),
        "op": "chunked_prefill_paged_decode",
    }
    case = Case(**fields, backend=f"{hooked_attention.__file__}:tile_2_in_prefills")
    found = attnlab.xray(case)
    assert (found.status, found.confirmed) == ("described", True), found.sentences
    assert found.description.scope.kernels == ("context_attention_fwd",)


def test_a_missing_rescale_names_the_part():
    (rule,) = described("last_part_not_rescaled")
    assert isinstance(rule, NotRescaled)
    steps = rule.rescale.steps
    assert (steps.tile, steps.only, rule.rescale.of, rule.rescale.split) == (
        *(16, LAST),
        *("values", True),
    )


@pytest.mark.parametrize(
    ("name", "kind", "factors"),
    [
        ("gain_of_each_head", HeadGain, {1: 1.25, 2: 1.5, 3: 1.75}),
        ("scale_of_each_head", HeadScore, {1: 1.2, 2: 1.4, 3: 1.6}),
    ],
)
def test_a_constant_of_each_head(name, kind, factors):
    (rule,) = described(name)
    assert isinstance(rule, kind)
    assert {head: one.number for head, one in rule.factors} == pytest.approx(factors, rel=1e-3)


def test_scales_of_keys_and_values_are_stated_separately():
    found = xray_of("keys_and_values_scaled")
    assert found.confirmed
    assert {(type(rule), rule.part) for rule in found.description.rules} == {
        (ScoreFactor, "cache"),
        (Gain, "cache"),
    }
    scales = found.to_dict()["magnitudes"]
    assert scales["explains_all_weights"]
    for name, factor in (("key", 0.8), ("new_key", 1), ("value", 1.7), ("new_value", 1)):
        assert scales[name] == pytest.approx([factor] * 4, rel=2e-3), name
    assert any(sentence.startswith("scales: cached keys × 0.8;") for sentence in found.sentences)


def test_values_of_another_block():
    (rule,) = described("values_of_next_block")
    assert rule == OtherSlots("value", slot_shift=16)


def test_values_of_other_heads_must_predict_a_second_case(monkeypatch):
    found = xray_of("values_of_other_heads")
    assert (found.status, found.confirmed) == ("described", True)
    monkeypatch.setattr("attnlab.weights.conclude.predicts_values", none_predicted)
    assert xray_of("values_of_other_heads").status == "undecided"


def none_predicted(setup, measurement, faults) -> torch.Tensor:
    return torch.zeros(len(setup.rows), dtype=torch.bool)


@pytest.mark.parametrize("name", ["coarse_with_zeros", "zeros_in_row_3"])
def test_rows_of_zeros_are_stated_and_are_no_loss_of_precision(name):
    found = xray_of(name)
    assert found.status == "described"
    assert "0 in every head" in found.sentences[0]


def test_a_large_cache_is_searched_without_its_distant_slots():
    fields = {**FIELDS, "num_blocks": 600, "num_heads": 2, "op": "context_attention_fwd"}
    case = Case(**fields, backend=f"{faulty_attention.__file__}:causal_one_too_many")
    found = attnlab.xray(case, confirm=False)
    assert found.status == "described"
    assert found.weights.shape[2] > 9600
    assert found.wrong.any()
