"""X-rays of sound and faulty kernels: the weights, the descriptions, and what they predict."""

import dataclasses
import shutil

import pytest
import torch
from helpers import faulty_attention, hooked_attention
from helpers.sources import needs_triton, of_release

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.kernels.cpu import load
from attnlab.weights.conclude import rounding_of
from attnlab.weights.plan import LAST, Constant, right_keys
from attnlab.weights.rules import (
    AlibiFactor,
    Gain,
    HeadGain,
    HeadScore,
    KeyHead,
    KeyTimes,
    LoopBase,
    MaskCapped,
    NotRescaled,
    OtherSlots,
    ScoreFactor,
    TileTimes,
    TopLeftMask,
    ZeroKeys,
)
from attnlab.weights.xray import XRay, predict_case

SPEC = f"{faulty_attention.__file__}:"
FIELDS = {
    "num_heads": 4,
    "num_queries_per_kv": 2,
    "head_size": 32,
    "block_size": 16,
    "query_lens": (5, 1, 20),
    "ctx_lens": (40, 67, 20),
    "distribution": "normal",
    "empty_slots": "nan",
    "output_init": "nan",
    "platform": "sm_90",
}
PREFILL = {"op": "context_attention_fwd", "query_lens": (5, 9, 20), "ctx_lens": (40, 67, 90)}


def has_cpu_op():
    try:
        load()
    except attnlab.Unavailable:
        return False
    return True


SOUND = (
    {},
    {"platform": "gfx942", "head_size": 64},
    {"sliding_window": 10},
    {"alibi": True},
    {"kv_cache_dtype": "fp8", "k_scale": 0.7, "v_scale": 0.37},
    {"kv_cache_dtype": "fp8_e5m2", "v_scale": 1.7},
    {"op": "context_attention_fwd", "dtype": "bfloat16"},
    {"op": "unified_attention", "sinks": True, "softcap": 3.0, "kv_layout": "HND", "pad_batch": 3},
    {"op": "decode_attention_fwd", "query_lens": (1, 1, 1)},
    {"op": "merge_attn_states"},
    {"release": "0.11.2", "dtype": "float32", "sm_scale": 0.2},
    {"interleave_v": True},
)


@pytest.mark.parametrize("changes", SOUND, ids=lambda changes: "-".join(map(str, changes.values())))
def test_the_weights_of_a_model_are_those_of_the_reference(changes):
    found = attnlab.xray(Case(**{**FIELDS, **changes}))
    assert (found.status, found.sentences[0].split()[0]) == ("right", "every")
    assert found.weights.shape == found.expected.shape
    keys = found.expected > 0
    if found.setup.sinks is None:
        assert torch.all((found.weights.sum(-1) - 1).abs() < found.setup.relative[:, None] + 1e-3)
    assert torch.all(found.weights[~keys] == 0)


@pytest.mark.skipif(not has_cpu_op(), reason="vLLM's CPU build is not installed")
def test_the_weights_of_the_cpu_op():
    changes = {"op": "cpu_attention_with_kv_cache", "backend": "vllm-cpu", "platform": "cpu"}
    assert attnlab.xray(Case(**{**FIELDS, **changes}, softcap=2.0, sinks=True)).status == "right"


@pytest.mark.slow
@pytest.mark.releases
@needs_triton
def test_the_weights_of_vllms_prefill_kernel_interpreted(source):
    if source.version != "0.33.0":
        pytest.skip("one release is enough")
    fields = {**FIELDS, **PREFILL, "query_lens": (3,), "ctx_lens": (33,), "num_heads": 2}
    case = Case(**fields, backend="vllm")
    found = attnlab.xray(case, lab=attnlab.Lab(source=source.path, device="cpu"))
    assert found.status == "right"
    assert torch.all((found.weights.sum(-1) - 1).abs() < 1e-3)


# Of vLLM's prefill kernel: the old text, the new text, the rule, and values of its fields.
SOURCE_FAULTS = {
    "context mask": (
        "            (start_n + offs_bs_n[None, :]) < cur_batch_ctx_len, qk",
        "            (start_n + offs_bs_n[None, :]) <= cur_batch_ctx_len, qk",
        ZeroKeys,
        {"part": "cache"},
    ),
    "exponential": (
        "        p = tl.exp(qk - m_ij[:, None])",
        "        p = tl.exp2(qk - m_ij[:, None])",
        LoopBase,
        {"factor": Constant("ln(2)")},
    ),
    "weighted sum": (
        "        acc = acc * alpha[:, None]\n",
        "        acc = acc * 1.0\n",
        NotRescaled,
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.releases
@needs_triton
@pytest.mark.parametrize("name", SOURCE_FAULTS)
def test_a_fault_in_vllms_source_is_described(name, tmp_path):
    old, new, kind, fields = SOURCE_FAULTS[name]
    shutil.copytree(of_release("0.33.0").root, tmp_path / "vllm-source")
    file = tmp_path / "vllm-source/vllm/v1/attention/ops/prefix_prefill.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    case = Case(**{**FIELDS, **PREFILL, "query_lens": (3, 5), "ctx_lens": (40, 21), "num_heads": 2})
    lab = attnlab.Lab(source=tmp_path / "vllm-source", device="cpu")
    confirm = kind is ZeroKeys  # the other case takes seconds more
    found = attnlab.xray(case.replace(backend="vllm"), lab=lab, limit_s=60, confirm=confirm)
    assert (found.status, found.confirmed) == ("described", confirm or None), found.sentences
    (rule,) = found.description.rules
    assert isinstance(rule, kind)
    assert {field: getattr(rule, field) for field in fields} == fields


def test_the_default_scale_of_the_old_release_is_described():
    """vLLM 0.11.2 takes the number of heads for the head size."""
    found = attnlab.xray(Case(**{**FIELDS, "release": "0.11.2"}))
    assert (found.status, found.confirmed) == ("described", True)
    assert found.description.rules == (ScoreFactor(Constant("sqrt(head_size/num_heads)")),)


def test_small_data_is_replaced_so_that_the_law_is_visible():
    found = attnlab.xray(Case(**{**FIELDS, "distribution": "uniform_1e-3"}))
    assert (found.status, found.drawn) == ("right", True)
    assert found.law.score == pytest.approx(1, abs=0.01)


# Of each faulty kernel: fields of the Case, the class of the rule, and values of its fields.
FAULTS = {
    "context_mask_one_too_many": ({}, ZeroKeys, {}),
    "context_one_too_many": ({}, KeyTimes, {"times": 1.0, "part": "cache"}),
    "causal_one_too_many": ({}, KeyTimes, {"times": 1.0, "part": "new"}),
    "cached_top_left": ({}, TopLeftMask, {}),
    "window_too_wide": ({"sliding_window": 20}, KeyTimes, {"times": 1.0}),
    "window_too_wide_new": ({"sliding_window": 8}, KeyTimes, {"times": 1.0, "part": "new"}),
    "window_too_narrow": ({"sliding_window": 20}, KeyTimes, {"times": 0.0}),
    "last_tile_twice": ({}, KeyTimes, {"times": 2.0, "part": "cache"}),
    "first_tile_twice": ({}, KeyTimes, {"times": 2.0, "part": "cache"}),
    "full_blocks_only": ({}, KeyTimes, {"times": 0.0, "part": "cache"}),
    "values_not_rescaled": ({}, NotRescaled, {}),
    "sum_not_rescaled": ({}, NotRescaled, {}),
    "rescale_base": ({}, NotRescaled, {}),
    "exp2_for_exp": ({}, ScoreFactor, {"part": "all"}),
    "scale_squared": ({}, ScoreFactor, {"part": "all"}),
    "next_sequence": ({}, OtherSlots, {"row": "next", "of": "both"}),
    "page_for_tile": ({"max_blocks_per_seq": 16}, OtherSlots, {"divisor": 8}),
    "alibi_sign": ({"alibi": True}, AlibiFactor, {}),
    "cap_after_mask": ({"softcap": 3.0}, MaskCapped, {"tile": 32}),
    "key_head_remainder": ({"num_heads": 6, "num_queries_per_kv": 3}, KeyHead, {}),
    "halved": ({}, Gain, {"part": "all"}),
    "cached_keys_shifted": ({}, OtherSlots, {"of": "key", "slot_shift": 1}),
}


def faulty(name, **changes):
    fields = {**FIELDS, **PREFILL, "op": getattr(faulty_attention, name).op, **changes}
    return Case(**fields, backend=SPEC + name)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.quick(
    "cached_top_left", "values_not_rescaled", "next_sequence", "cap_after_mask", "halved"
)
def test_a_planted_fault_is_described_and_the_description_predicts_another_case(name):
    changes, kind, fields = FAULTS[name]
    found = attnlab.xray(faulty(name, **changes), limit_s=60)
    assert (found.status, found.confirmed) == ("described", True), found.sentences
    (rule,) = found.description.rules
    assert isinstance(rule, kind), rule
    assert {field: getattr(rule, field) for field in fields} == fields


def test_a_description_that_fits_one_small_call_is_not_stated():
    """One row of two keys: many rules give its weights, and a captured call has no second case."""
    lab = attnlab.Lab()
    for fields, status in (
        ({"query_lens": (1,), "ctx_lens": (1,)}, "undecided"),
        ({}, "described"),
    ):
        case = faulty("cached_top_left", num_heads=2, **fields)
        found = attnlab.xray(lab.call(case), backend=case.backend, platform="sm_90", lab=lab)
        assert (found.status, found.confirmed) == (status, None)


@pytest.mark.parametrize("sm_scale", [None, 32**-0.5, 0.3])
def test_a_missing_scale_is_no_factor_of_the_head_size(sm_scale):
    """The default scale is 1/sqrt(head_size); the other case has another one if the case has one."""
    fields = {"sm_scale": sm_scale, "num_heads": 2, "query_lens": (5,), "ctx_lens": (67,)}
    found = attnlab.xray(faulty("scale_missing", **fields))
    text = "the scores of keys are not multiplied by the scale (confirmed on another case)"
    assert found.sentences[0] == text


@pytest.mark.parametrize("name", ["context_one_too_many", "values_not_rescaled", "next_sequence"])
@pytest.mark.quick("next_sequence")
def test_a_description_predicts_the_output_of_another_case(name):
    lab = attnlab.Lab()
    found = attnlab.xray(faulty(name), lab=lab)
    other = faulty(name, query_lens=(7, 2, 1), ctx_lens=(33, 50, 96), seed=5, empty_slots="garbage")
    output = lab.output(other).double()
    predicted = predict_case(found.description, other, lab)
    assert (predicted - lab.reference(other)).abs().max() > 0.05
    assert (predicted - output).abs().max() < 0.02


@pytest.mark.slow
def test_two_faults_are_described_together():
    case = faulty("scales_swapped", kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.37)
    found = attnlab.xray(case, limit_s=120)
    assert (found.status, found.confirmed) == ("described", True)
    factors = {type(rule): (rule.factor.name, rule.part) for rule in found.description.rules}
    assert factors == {
        ScoreFactor: ("v_scale/k_scale", "cache"),
        Gain: ("k_scale/v_scale", "cache"),
    }


def test_a_map_of_two_kv_heads_must_hold_with_more():
    """With two KV heads, half of the own one is KV head 0."""
    found = attnlab.xray(faulty("key_head_halved", num_heads=4, num_queries_per_kv=2))
    assert found.status == "undecided"
    assert "KV head 0” here, but not in another case" in found.sentences[0]


def test_a_fault_of_one_head_is_described_for_that_head():
    found = attnlab.xray(faulty("head_3_halved"))
    assert (found.status, found.description.scope.heads) == ("described", (3,))


@pytest.mark.parametrize(
    ("name", "words"),
    [("value_head_remainder", "values of other KV heads"), ("elements_rolled", "elements 0–31")],
)
def test_wrong_values_are_described_and_the_weights_are_right(name, words):
    found = attnlab.xray(faulty(name))
    assert found.status == "described"
    assert words in found.sentences[0]
    assert not found.descriptions


@pytest.mark.parametrize(
    "name",
    ["sound", "cached_sound", "tile_16", "bfloat16_sums", "bfloat16_weights", "bfloat16_scores"],
)
@pytest.mark.quick("tile_16", "bfloat16_weights")
def test_a_sound_kernel_is_right_or_imprecise(name):
    found = attnlab.xray(faulty(name))
    assert found.status == ("precision" if "bfloat16" in name else "right"), found.sentences
    assert not found.descriptions


@pytest.mark.parametrize(
    ("name", "is_rounding"), [("sound", True), ("bfloat16_scores", True), ("halved", False)]
)
def test_the_rounding_of_weights_is_measured_without_a_search(name, is_rounding):
    found = rounding_of(faulty(name), attnlab.Lab())
    assert (found is not None) == is_rounding
    assert (found == 0) == (name == "sound")


def test_a_description_that_another_case_refutes_is_withdrawn(monkeypatch):
    """The other case has another block size, as if the rule had held by coincidence."""
    monkeypatch.setattr(
        "attnlab.weights.conclude.other_case", lambda case: case.replace(block_size=32, seed=3)
    )
    found = attnlab.xray(faulty("full_blocks_only"))
    assert (found.status, found.confirmed) == ("undecided", False)
    assert not found.descriptions


def test_unwritten_rows_are_described():
    case = Case(**{**FIELDS, "head_size": 64, "platform": "gfx942", "stage": "int32_before_cumsum"})
    found = attnlab.xray(case)
    assert found.status == "described"
    assert torch.equal(found.setup.rows[found.measurement.unwritten], torch.tensor([5]))


def test_rows_with_a_nan_query_cannot_be_read_and_the_others_can():
    call = attnlab.Lab().call(Case(**{**FIELDS, "op": "unified_attention"}))
    query = call.query.clone()
    query[2] = torch.nan
    call = dataclasses.replace(call, query=query)
    found = attnlab.xray(call, backend="model")
    assert found.status == "undecided"
    assert not found.measurement.finite[2]
    assert any(one.startswith("every other row attends") for one in found.sentences)
    assert not any(one.startswith("every row attends") for one in found.sentences)
    assert int(found.measurement.finite.sum()) == len(query) - 1


def test_a_call_without_a_case_is_measured():
    call = attnlab.Lab().call(Case(**FIELDS))
    assert attnlab.xray(call, backend="model", platform="sm_90").status == "right"


def test_a_call_without_a_kernel_is_not_measured():
    """The lab's model would be measured, whatever kernel the call came from."""
    call = attnlab.Lab().call(Case(**FIELDS))
    with pytest.raises(InvalidCase, match=r"backend must be given .* holds no kernel"):
        attnlab.xray(call)


def test_an_op_without_values_is_refused():
    with pytest.raises(InvalidCase, match="op must be an attention op"):
        attnlab.xray(Case(**{**FIELDS, "op": "reshape_and_cache_flash"}))


def test_the_document_is_strict_json():
    document = attnlab.xray(faulty("halved")).to_dict()
    assert document["status"] == "described"
    assert document["descriptions"][0]["rules"][0]["rule"] == "Gain"
    assert document["rows"][0]["sums"][0] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("scaled_by_maximum", "described", "not linear in the values"),
        ("scaled_by_channel", "unreadable", "with random values they are finite"),
        ("overflows", "unreadable", "their output is not finite"),
    ],
)
def test_a_kernel_that_inspects_the_values_is_stated_in_one_line(name, status, words):
    found = attnlab.xray(faulty(name))
    assert found.status == status, found.sentences
    assert any(words in sentence for sentence in found.sentences)
    assert not found.descriptions


def test_weights_that_are_not_known_are_not_right(monkeypatch):
    """A bound of more than a share of the largest weights hides what is wrong with them."""
    case = Case(**FIELDS, op="unified_attention")
    assert attnlab.xray(case).status == "right"
    monkeypatch.setattr("attnlab.weights.fit.MOST_LEFT", 1e-9)
    found = attnlab.xray(case)
    assert (found.status, found.is_wrong) == ("undecided", True)
    assert found.sentences[0].startswith("not decided: precision")


def test_a_rule_for_errors_near_the_bound_is_not_stated(monkeypatch):
    """There, another rule fits as well; the weights that are wrong are named."""
    assert attnlab.xray(faulty("head_3_halved")).status == "described"
    monkeypatch.setattr("attnlab.weights.conclude._CLEAR", 1e9)
    found = attnlab.xray(faulty("head_3_halved"))
    assert found.status == "undecided"
    assert "where other rules fit, too" in found.sentences[0]


# Laws of weights: constants of tiles, parts and heads, scales of keys and values, rows of zeros.


OF_LAWS = {
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
    case = Case(**OF_LAWS, op=op, backend=f"{hooked_attention.__file__}:{name}")
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
        **OF_LAWS,
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
    fields = {**OF_LAWS, "num_blocks": 600, "num_heads": 2, "op": "context_attention_fwd"}
    case = Case(**fields, backend=f"{faulty_attention.__file__}:causal_one_too_many")
    found = attnlab.xray(case, confirm=False)
    assert found.status == "described"
    assert found.weights.shape[2] > 9600
    assert found.wrong.any()


# The X-ray of a Case with a mask expects the keys of the mask, and the models have them.


def masked(mask: str, **changes: object) -> XRay:
    """Return the X-ray of a small Case with a mask."""
    case = Case(
        op="unified_attention",
        mask=mask,
        query_lens=(5,),
        ctx_lens=(12,),
        num_heads=1,
        head_size=16,
        block_size=16,
        distribution="normal",
        platform="sm_90",
        fill="all_rows",
    )
    return attnlab.xray(case.replace(**changes), confirm=False)


@pytest.mark.parametrize("mask", ["bidirectional", "ranges", "tree"])
def test_the_models_are_right(mask):
    """And the expected keys are those of the mask, not those of causal attention."""
    found, causal = masked(mask), masked("causal")
    assert found.status == "right"
    assert not right_keys(found.setup).equal(right_keys(causal.setup))
