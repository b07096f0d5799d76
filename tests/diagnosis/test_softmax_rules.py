"""Rules about the softmax and its scratch memory: they predict what a kernel with one wrong step computes."""

import math

import pytest
import torch
from helpers.cases import hostile
from helpers.claims import candidate
from helpers.faulty_labs import FaultyLab
from helpers.split_attention import split_attention

from attnlab.case.case import Case
from attnlab.diagnosis.claims import ConfirmedRule
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.reruns import further_cases
from attnlab.diagnosis.rules.divisions import divisions, with_tiles_to
from attnlab.diagnosis.rules.outputs import scratch_defects
from attnlab.diagnosis.rules.search import rules_of
from attnlab.diagnosis.rules.softmax import SoftmaxLaw, loop_defects, softmax_defects
from attnlab.lab.problem import all_rows, make_problem, scores_of, softmax
from attnlab.tensors.call import KernelCall

OPS = ("unified_attention", "decode_attention_fwd", "context_attention_fwd")
DECODES = hostile(
    op="decode_attention_fwd", platform="sm_90", query_lens=(1, 1, 1), ctx_lens=(20, 66, 140),
    sm_scale=0.3, num_heads=4, head_size=32,
)  # fmt: skip


def small(op: str, **changes: object) -> Case:
    """Return a case with contexts of several tiles of 16."""
    decodes = {"query_lens": (1, 1)} if op == "decode_attention_fwd" else {"query_lens": (1, 40)}
    fields = {"op": op, "platform": "sm_90", "ctx_lens": (70, 90), "sm_scale": 0.3, **decodes}
    return hostile(**{**fields, "empty_slots": "garbage", "head_size": 32, **changes})


@pytest.mark.parametrize("op", OPS)
def test_the_right_law_is_the_softmax_however_keys_are_divided(op):
    problem = make_problem(small(op, sinks=op == "unified_attention"))
    for division in divisions(problem):
        for row_slice in all_rows(problem):
            inputs = problem.attention_inputs(row_slice)
            parts = division.parts(problem, row_slice.seq)
            scores = scores_of(inputs)
            found = SoftmaxLaw().weights(scores, parts, division.merge, inputs.sinks)
            torch.testing.assert_close(found, softmax(scores, inputs.sinks))


@pytest.mark.parametrize("op", OPS)
def test_rules_have_names_of_their_own_and_change_outputs(op):
    """Tiles of 16, several in every sequence; and parts, whatever their tiles."""
    problem = make_problem(small(op))
    rules = rules_of(problem)
    assert len({rule.name for rule in rules}) == len(rules) > 100
    row_slice = list(all_rows(problem))[-1]
    right = problem.correct(row_slice).output
    tried = [one for one in softmax_defects(problem) if _concerns_tiles_of_16_or_parts(one.name)]
    assert len(tried) > 9
    for rule in tried:
        output = rule.compute(problem, row_slice).output
        assert not torch.allclose(output, right, rtol=1e-6, atol=1e-9), rule.name


def _concerns_tiles_of_16_or_parts(name: str) -> bool:
    is_of_parts = "part" in name.split(", ", 1)[1] or "parts" in name
    has_tiles = "tiles of 16," in name or name.startswith("with 4 splits, ")
    return name.startswith("with tiles of 16, ") or (is_of_parts and has_tiles)


def test_a_sound_split_kernel_is_right():
    assert (
        diagnose(DECODES, lab=FaultyLab(kernel=lambda _, call: split_attention(call))).status
        == "nothing wrong"
    )


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            {"new": torch.exp2},
            "exp2 is used instead of exp in the weight of the part that is added",
        ),
        (
            {"new": torch.exp2, "old": torch.exp2},
            "exp2 is used instead of exp in all weights of the parts",
        ),
        ({"tile_pads": 32}, "the slots of a tile after its last key count with score 0"),
        ({"tile_pads": 32, "most_pads": 1}, "the first slot of a tile after its last key counts"),
        ({"head_stride": 33}, "outputs of the parts are read at a wrong address"),
        ({"is_late": True}, "with 4 splits, the accumulator is rescaled after a part is added"),
        ({"log": torch.log2}, "of the parts have the logarithm of the sum to base 2"),
        ({"log": torch.log1p}, None),
        ({"is_late": True, "log": torch.log2}, None),
    ],
    ids=[
        "one exp2 in the merge",
        "exp2 in the merge",
        "padding counts",
        "one slot counts",
        "scratch stride",
        "late rescale",
        "base 2",
        "another logarithm",
        "two faults",
    ],
)
def test_a_fault_of_a_split_is_described(fault, text):
    """Other faults get no rule."""
    lab = FaultyLab(kernel=lambda _, call: split_attention(call, **fault))
    diagnosis = diagnose(DECODES, lab=lab)
    assert diagnosis.status != "nothing wrong"
    if text is None:
        assert diagnosis.rule is None
        return
    assert diagnosis.status == "described"
    assert diagnosis.rule is not None
    assert text in diagnosis.rule.text
    assert diagnosis.rule.only_decodes


def test_an_output_of_nan_shows_no_rule():
    """Rules about scratch memory predict NaN for what was not stored, so each would fit."""

    def spoil(case: Case, call: KernelCall) -> None:
        split_attention(call)
        call.output[:] = torch.nan

    diagnosis = diagnose(DECODES, lab=FaultyLab(kernel=spoil))
    assert diagnosis.status == "described"
    assert diagnosis.rule is None


def test_earlier_tiles_are_lost():
    """Only the last tile of 16 keys has weights, those of its own softmax."""
    problem = make_problem(small("decode_attention_fwd"))
    division = next(one for one in divisions(problem) if one.text == "tiles of 16")
    row_slice = next(iter(all_rows(problem)))
    scores, parts = scores_of(problem.attention_inputs(row_slice)), division.parts(problem, 0)
    first = parts[0][-1][0]
    law = SoftmaxLaw(keep_sum=False, keep_output=False)
    found = law.weights(scores, parts, "", None)
    assert (found[..., :first] == 0).all()
    torch.testing.assert_close(found[..., first:], scores[..., first:].softmax(-1))
    lost = SoftmaxLaw(keep_sum=False).weights(scores, parts, "", None)
    assert (lost.sum(-1) > 1).all()


def test_maxima_and_sums_of_segments_share_an_address():
    """Without the term of the head, each head gets the scales of head 0."""
    problem = make_problem(small("unified_attention", query_lens=(1, 5), ctx_lens=(300, 90)))
    rules = {one.text: one for one in scratch_defects(problem)}
    (text,) = [
        one
        for one in rules
        if one.startswith("maxima and sums") and "term head × stride 1 is missing" in one
        and "are read" in one
    ]  # fmt: skip
    for row_slice in all_rows(problem):
        output = rules[text].compute(problem, row_slice).output
        right = problem.correct(row_slice).output
        torch.testing.assert_close(output[:, 0], right[:, 0])
        assert not torch.allclose(output[:, 1:], right[:, 1:], rtol=0.01)


def test_products_begin_at_another_number_in_one_loop():
    """The scores of the context are larger by the scale: its dot products begin at 1."""
    problem = make_problem(small("context_attention_fwd"))
    text = "in the loop over the context, the products of queries and keys begin at 1 in place of 0"
    rule = next(one for one in loop_defects(problem) if one.text.startswith(text))
    row_slice = next(iter(all_rows(problem)))
    inputs = problem.attention_inputs(row_slice)
    scores = scores_of(inputs)
    scores[..., : problem.cached_len(row_slice.seq)] += problem.sm_scale
    expected = torch.einsum("hqk,khd->qhd", softmax(scores, inputs.sinks), inputs.value)
    torch.testing.assert_close(rule.compute(problem, row_slice).output, expected)
    assert not torch.allclose(problem.correct(row_slice).output, expected, rtol=1e-3)


def test_a_constant_in_one_loop_is_its_opposite_in_the_other():
    """Softmax ignores what is added to all scores of a row, so a shift of ALiBi fits both loops."""
    problem = make_problem(small("context_attention_fwd", alibi=True))
    rules = loop_defects(problem)
    shifted = [one for one in rules if "ALiBi distances are larger by 1" in one.text]
    assert [one.text.count("in the loop over the new tokens") for one in shifted] == [1, 1]
    assert all("in the loop over the context" in one.text for one in shifted)
    row_slice = list(all_rows(problem))[1]
    inputs = problem.attention_inputs(row_slice)
    scores = scores_of(inputs)
    scores[..., problem.cached_len(row_slice.seq) :] += inputs.alibi_slopes[:, None, None]
    expected = torch.einsum("hqk,khd->qhd", softmax(scores, None), inputs.value)
    fitting = [
        one.text
        for one in rules
        if torch.allclose(one.compute(problem, row_slice).output, expected, atol=1e-9)
    ]
    assert len(fitting) == 1
    assert "in the loop over the new tokens, ALiBi distances are smaller by 1" in fitting[0]


def test_with_sinks_the_loops_differ():
    sinks = {"sinks": True, "query_lens": (1, 40)}
    problem = make_problem(small("unified_attention", **sinks))
    assert not any(" or in the loop" in one.text for one in loop_defects(problem))


def test_a_rule_names_the_others_that_nothing_separates():
    """Maxima that are all read from one part are those of parts that are not rescaled."""
    first, second = (
        candidate("scale_doubled", name=name, text=name)
        for name in ("maxima are read at a wrong address", "parts are not rescaled")
    )
    rule = ConfirmedRule(candidate=first, cases=3, others=(second,))
    diagnosis = Diagnosis(status="described", rule=rule)
    assert f"{first.text}, or {second.text}: no case separates them" in diagnosis.conclusion
    assert [one["text"] for one in diagnosis.to_dict()["rule"]["others"]] == [second.text]
    alone = Diagnosis(status="described", rule=ConfirmedRule(candidate=first, cases=3))
    assert "no case separates" not in alone.conclusion
    assert alone.to_dict()["rule"]["others"] == []


def test_further_cases_have_scores_that_differ():
    """With numbers of ±1e-3 all maxima are 0: a missing rescale would be any rule about maxima."""
    case = small("unified_attention", distribution="uniform_1e-3")
    assert {one.distribution for one in further_cases(case)} == {"normal"}


def test_an_accumulator_that_counts_as_1_adds_a_constant():
    """Two tiles of 2 keys: the first is replaced by 1 times its rescaling."""
    scores = torch.tensor([[[0.5, 1.0, 2.0, -1.0]]], dtype=torch.float64)
    parts = [[(0, 2, 0, 0), (2, 4, 0, 0)]]
    found = SoftmaxLaw(output_is_one=True).weights(scores, parts, "", None)[0, 0]
    right, total = scores.softmax(-1)[0, 0], (scores - 2).exp().sum()
    torch.testing.assert_close(found[2:4], right[2:])
    assert found[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found[4], torch.tensor(-1.0).double().exp() / total)


def test_a_tile_without_a_visible_key_loses_earlier_tiles_in_rows_that_visit_it():
    scores = torch.tensor([[[0.5, 1.0, -torch.inf], [0.5, 1.0, -torch.inf]]], dtype=torch.float64)
    parts = [[(0, 2, 0, 0), (2, 3, 0, 0)]]
    law = SoftmaxLaw(keep_sum=False, keep_output=False)
    found = law.weights(scores, parts, "", None, torch.tensor([[2], [4]]))[0]
    torch.testing.assert_close(found[0], scores.softmax(-1)[0, 0])
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_log_sum_exps_without_their_logarithm_weigh_parts_by_maxima():
    scores = torch.tensor([[[0.0, 0.0, 1.0]]], dtype=torch.float64)
    parts = [[(0, 2, 0, 0)], [(2, 3, 0, 0)]]
    found = SoftmaxLaw(log_of_sum=0.0).weights(scores, parts, "running", None)[0, 0]
    last = torch.tensor([0.0, 1.0]).double().softmax(0)[1]
    torch.testing.assert_close(found, torch.stack([(1 - last) / 2, (1 - last) / 2, last]))


def test_weights_of_a_tile_are_relative_to_its_own_maximum():
    """The second tile, whose scores are lower by 2, counts as if its highest score were 0."""
    scores = torch.tensor([[[0.0, -1.0, -2.0, -3.0]]], dtype=torch.float64)
    parts = [[(0, 2, 0, 0), (2, 4, 0, 0)]]
    found = SoftmaxLaw(of_tile=True).weights(scores, parts, "", None)[0, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, -1.0, 0.0, -1.0]).double().softmax(0))


def test_parts_in_base_2_are_merged_with_exp():
    """The log-sum-exps of the parts, ln 2 and 0, are 1 and 0 to base 2."""
    scores = torch.zeros(1, 1, 3, dtype=torch.float64)
    parts = [[(0, 2, 0, 0)], [(2, 3, 0, 0)]]
    factor = 1 / math.log(2)
    law = SoftmaxLaw(merge_new=factor, merge_sum=factor, merge_output=factor)
    found = law.weights(scores, parts, "running", None)[0, 0]
    first, last = torch.tensor([1.0, 0.0]).double().softmax(0)
    torch.testing.assert_close(found, torch.stack([first / 2, first / 2, last]))


@pytest.mark.parametrize("merge", ["running", "at once"])
def test_maxima_without_the_scale_weigh_parts_by_more(merge):
    """Maxima 1 and 0 with the scale 0.5 are merged as 2 and 0."""
    scores = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    parts = [[(0, 1, 0, 0)], [(1, 2, 0, 0)]]
    found = SoftmaxLaw(unscaled=True).weights(scores, parts, merge, None, None, 0.5)[0, 0]
    torch.testing.assert_close(found, torch.tensor([2.0, 0.0]).double().softmax(0))


def test_sinks_of_each_part_count_as_often_as_there_are_parts():
    scores = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=torch.float64)
    parts, sinks = [[(0, 2, 0, 0)], [(2, 3, 0, 0)]], torch.tensor([0.5])
    found = SoftmaxLaw(all_sinks=True).weights(scores, parts, "at once", sinks)[0, 0]
    every = torch.tensor([0.0, 1.0, 2.0, 0.5, 0.5]).double().softmax(0)
    torch.testing.assert_close(found, every[:3])
    names = [[one.name for one in softmax_defects(make_problem(case))] for case in SINKS]
    assert [any("the sinks count in each part" in name for name in some) for some in names] == [
        True,
        False,
    ]


SINKS = [small("unified_attention", sinks=is_on) for is_on in (True, False)]


def test_parts_that_store_a_log_sum_exp_count_more_keys_more():
    """Parts of 2 and 1 equal scores: the first gets the weight 2 × 2 of 5 in place of 2 of 3."""
    scores = torch.zeros(1, 1, 3, dtype=torch.float64)
    parts = [[(0, 2, 0, 0)], [(2, 3, 0, 0)]]
    found = SoftmaxLaw(max_plus_log=1.0).weights(scores, parts, "at once", None)[0, 0]
    torch.testing.assert_close(found, torch.tensor([0.4, 0.4, 0.2]).double())


_F, _G = math.exp(-2), math.exp(-1)  # by which the second and the third tile rescale
_SUM = (_F + 1) * _G + 1


@pytest.mark.parametrize(
    ("law", "output", "total"),
    [
        ({"scaled_output": "both", "spares_first": True}, (_F * _G, _F * _G, _G), _SUM),
        ({"scaled_output": "both"}, (0, _F * _G, _G), _SUM),
        ({"scaled_output": "added"}, (0, _F, _G), _SUM),
        ({"scaled_sum": "both"}, (_F * _G, _G, 1), (_F + 1) * _G),
        ({"scaled_sum": "added"}, (_F * _G, _G, 1), _F + _G),
        (
            {"by_sums": True},
            (_F * _G / _SUM, _G * (_F + 1) / _SUM, 1),
            _SUM,
        ),
    ],
    ids=str,
)
def test_what_a_rescale_multiplies(law, output, total):
    """Three tiles of one key each, with scores 0, 2 and 3; the first tile rescales by exp(-inf) = 0."""
    scores = torch.tensor([[[0.0, 2.0, 3.0]]], dtype=torch.float64)
    parts = [[(0, 1, 0, 0), (1, 2, 0, 0), (2, 3, 0, 0)]]
    found = SoftmaxLaw(**law).weights(scores, parts, "", None)[0, 0]
    torch.testing.assert_close(found, torch.tensor(output).double() / total)
    merged = {f"merged_{name.removeprefix('scaled_')}": scaled for name, scaled in law.items()}
    if merged.keys() <= {"merged_sum", "merged_output"}:
        found = SoftmaxLaw(**merged).weights(scores, [[tile] for tile in parts[0]], "running", None)
        torch.testing.assert_close(found[0, 0], torch.tensor(output).double() / total)


def test_rules_have_positive_bounds():
    """A bound below 0 would fit any output; sums that are subtracted give negative weights."""
    problem = make_problem(small("context_attention_fwd"))
    row_slice = list(all_rows(problem))[-1]
    for rule in softmax_defects(problem):
        if rule.text.startswith("with tiles of 16, "):
            bound = rule.compute(problem, row_slice).bound.nan_to_num(1.0)
            assert (bound > 0).all(), rule.text


def test_empty_tiles_have_the_size_of_the_last_tile():
    assert with_tiles_to([[(0, 32, 0, 1), (32, 40, 24, 1)]], 100)[0][2:] == [
        (64, 64, 0, 1),
        (96, 96, 0, 1),
    ]
