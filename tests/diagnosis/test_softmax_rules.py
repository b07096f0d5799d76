"""Rules about the softmax and its scratch memory: they predict what a kernel with one wrong step computes."""

import dataclasses
import math

import pytest
import torch
from helpers.cases import hostile
from helpers.claims import candidate
from helpers.faulty_labs import FaultyLab
from helpers.split_attention import split_attention
from helpers.tiled_attention import CONTEXT, NEW, right_hides, tiled_attention

from attnlab.case.case import Case
from attnlab.defects import DEFECTS
from attnlab.diagnosis import confirmation
from attnlab.diagnosis.address_rules import address_defects
from attnlab.diagnosis.claims import ConfirmedRule
from attnlab.diagnosis.confirmation import find_rule, rules_of
from attnlab.diagnosis.diagnose import diagnose
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.divisions import LOOPS, divisions, mask_defects, with_tiles_to
from attnlab.diagnosis.output_rules import scratch_defects
from attnlab.diagnosis.reruns import further_cases
from attnlab.diagnosis.softmax_rules import SoftmaxLaw, loop_defects, softmax_defects
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
    rules = rules_of(problem, problem.correct_output().output)
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
@pytest.mark.quick("one exp2 in the merge", "padding counts", "late rescale", "another logarithm")
def test_a_fault_of_a_split_is_described(fault, text):
    """Other faults get no rule."""
    lab = FaultyLab(kernel=lambda _, call: split_attention(call, **fault))
    diagnosis = diagnose(DECODES, lab=lab, propose=False, limit=None)
    assert diagnosis.status != "nothing wrong"
    if text is None:
        assert diagnosis.rule is None
        return
    assert diagnosis.status == "described"
    assert text in diagnosis.rule.text
    assert not diagnosis.rule.only_decodes  # the op computes nothing else


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
    found = SoftmaxLaw(keep_sum=False, keep_output=False).weights(scores, parts, "", None)
    assert (found[..., :first] == 0).all()
    torch.testing.assert_close(found[..., first:], scores[..., first:].softmax(-1))
    assert (SoftmaxLaw(keep_sum=False).weights(scores, parts, "", None).sum(-1) > 1).all()


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
    problem = make_problem(small("unified_attention", **{"sinks": True, "query_lens": (1, 40)}))
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


def softmax_of(*scores: float) -> torch.Tensor:
    return torch.tensor(scores).double().softmax(0)


FIRST, LAST = softmax_of(1, 0).tolist()
LOG2_E = 1 / math.log(2)


@pytest.mark.parametrize(
    ("merge", "law", "scores", "weights"),
    [
        # the log-sum-exps of both parts are their maxima
        ("running", {"log_of_sum": 0.0}, (0, 0, 1), (LAST / 2, LAST / 2, FIRST)),
        # the log-sum-exps, ln 2 and 0, are 1 and 0 to base 2, and are merged with exp
        (
            "running",
            {"merge_new": LOG2_E, "merge_sum": LOG2_E, "merge_output": LOG2_E},
            (0, 0, 0),
            (FIRST / 2, FIRST / 2, LAST),
        ),
        # maxima 1 and 0 with the scale 0.5 are merged as 2 and 0
        ("running", {"unscaled": True}, (1, 1, 0), softmax_of(2, 2, 0).tolist()),
        ("at once", {"unscaled": True}, (1, 1, 0), softmax_of(2, 2, 0).tolist()),
        # the first part gets the weight 2 × 2 of 5 in place of 2 of 3
        ("at once", {"max_plus_log": 1.0}, (0, 0, 0), (0.4, 0.4, 0.2)),
    ],
)
def test_a_wrong_merge_weighs_two_parts(merge, law, scores, weights):
    """The first part has two keys, the second one."""
    parts = [[(0, 2, 0, 0)], [(2, 3, 0, 0)]]
    given = torch.tensor([[scores]], dtype=torch.float64)
    found = SoftmaxLaw(**law).weights(given, parts, merge, None, None, 0.5)[0, 0]
    torch.testing.assert_close(found, torch.tensor(weights).double())


def test_weights_of_a_tile_are_relative_to_its_own_maximum():
    """The second tile, whose scores are lower by 2, counts as if its highest score were 0."""
    scores = torch.tensor([[[0.0, -1.0, -2.0, -3.0]]], dtype=torch.float64)
    parts = [[(0, 2, 0, 0), (2, 4, 0, 0)]]
    found = SoftmaxLaw(of_tile=True).weights(scores, parts, "", None)[0, 0]
    torch.testing.assert_close(found, softmax_of(0, -1, 0, -1))


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
            assert (rule.compute(problem, row_slice).bound.nan_to_num(1.0) > 0).all(), rule.text


def test_empty_tiles_have_the_size_of_the_last_tile():
    assert with_tiles_to([[(0, 32, 0, 1), (32, 40, 24, 1)]], 100)[0][2:] == [
        (64, 64, 0, 1),
        (96, 96, 0, 1),
    ]


# A rule is stated only if one of the wrong outputs can show all that it says.


SEGMENTS = 16
CASE = hostile(
    op="unified_attention",
    platform="sm_90",
    empty_slots="garbage",
    sinks=True,
    block_size=16,
    query_lens=(1, 3),
    ctx_lens=(20, 37),
    num_blocks=None,
)
SHORT = CASE.replace(query_lens=(2, 1), ctx_lens=(30, 50), seed=5)
LONG = CASE.replace(query_lens=(1,), ctx_lens=(299,), seed=5)
EARLIER, TERM = (
    "the sum of earlier tiles is lost",
    "the term (p // block_size) × stride 1 is missing",
)


def without_sinks(call: KernelCall) -> dict[str, object]:
    return {"sinks": None}


def from_the_segment(call: KernelCall) -> dict[str, object]:
    """Blocks are counted from the first one of each segment."""
    table, size = call.block_table.clone(), call.block_size
    for seq, length in enumerate(call.seq_lens.tolist()):
        step = -(-length // (SEGMENTS * size))
        for at in range(table.shape[1]):
            table[seq, at] = call.block_table[seq, at % step]
    return {"block_table": table}


def always_the_first(call: KernelCall) -> dict[str, object]:
    return {"block_table": call.block_table[:, :1].expand_as(call.block_table).contiguous()}


def texts(monkeypatch, change, rules_of, words: str, others: list[Case]) -> list[str]:
    """Return the rules with some words that are stated."""
    lab = FaultyLab(  # wrong in batches that unified_attention divides in segments
        change=lambda case, call: change(call) if max(case.lengths.query_lens) <= 8 else {}
    )
    some = [one for one in rules_of(make_problem(CASE)) if words in one.text]
    assert some
    monkeypatch.setattr(confirmation, "rules_of", lambda problem, output: some)
    monkeypatch.setattr(confirmation, "further_cases", lambda case: others)
    monkeypatch.setattr(confirmation, "whole_tiles_case", lambda case: None)
    rule = confirmation.find_rule(lab, CASE, lambda case: lab.output(case).cpu())
    return [] if rule is None else [rule.text]


def test_lost_sinks_are_no_lost_sum_of_earlier_tiles(monkeypatch):
    """Each segment has one tile of 16, so the lost sum is that of the sink alone."""
    assert texts(monkeypatch, without_sinks, softmax_defects, EARLIER, [SHORT]) == []


@pytest.mark.parametrize("others", [[SHORT], [LONG]], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("change", [from_the_segment, always_the_first])
def test_a_missing_term_is_stated_where_it_has_several_values_in_a_part(
    monkeypatch, change, others
):
    found = texts(monkeypatch, change, address_defects, TERM, others)
    assert len(found) == (others == [LONG] and change is always_the_first)


def in_some_tiles(call: KernelCall) -> dict[str, object]:
    """The newest token is lost if it is one of the last four of 16."""
    return {"seq_lens": call.seq_lens - (call.seq_lens % 16 >= 12).to(call.seq_lens.dtype)}


def in_all_tiles(call: KernelCall) -> dict[str, object]:
    return {"seq_lens": call.seq_lens - 1}


@pytest.mark.parametrize("change", [in_some_tiles, in_all_tiles])
def test_a_rule_must_hold_at_every_place_in_a_tile(monkeypatch, change):
    """The lengths of both cases end at the same places in a tile."""
    lab = FaultyLab(change=lambda case, call: change(call))
    case, other = (CASE.replace(query_lens=(1, 1), ctx_lens=ctx) for ctx in ((29, 44), (78, 61)))
    defect = DEFECTS["newest_token_dropped"]
    monkeypatch.setattr(confirmation, "rules_of", lambda problem, output: [defect])
    monkeypatch.setattr(confirmation, "further_cases", lambda case: [other])
    rule = find_rule(lab, case, lambda case: lab.output(case).cpu())
    assert (rule is None) == (change is in_some_tiles)


# Rules about masks, loops and rescaling: each is found from the outputs of a kernel with that fault.


LENGTHS = {"query_lens": (1, 20, 6), "ctx_lens": (33, 50, 0)}


def case_of(op: str, **changes: object) -> Case:
    fields = {"op": op, "platform": "sm_90", "num_heads": 2, "head_size": 16, "sm_scale": 0.3}
    return hostile(**{**fields, "empty_slots": "garbage", **LENGTHS, **changes})


def rule_of(case: Case, **faults: object) -> ConfirmedRule | None:
    lab = FaultyLab(kernel=lambda _, call: tiled_attention(call, **faults))
    return find_rule(lab, case, lambda one: lab.run(one).output)


def window_of_first(block, at: torch.Tensor) -> torch.Tensor:
    is_seen = at > block.position[0] - block.call.sliding_window
    return ~is_seen | (at > block.position[:, None])


def window_of_last(block, at: torch.Tensor) -> torch.Tensor:
    return right_hides(block, at) | (at < block.end - block.call.sliding_window)


def without_first_tile(block, at: torch.Tensor) -> torch.Tensor:
    """Hide a tile of 16 if part of it is before the window."""
    begins_before = at // 16 * 16 <= block.position[:, None] - block.call.sliding_window
    return right_hides(block, at) | begins_before


def before_window(block, at: torch.Tensor) -> torch.Tensor:
    return at <= block.position[:, None] - block.call.sliding_window


def window_of_new_rows(block, at: torch.Tensor, longer: int = 0) -> torch.Tensor:
    """Hide, in the loop over the context, what a window of new rows that are counted from 0 does not see."""
    row = block.position[:, None] - block.end
    return (at <= row - block.call.sliding_window - longer) | (at >= block.end)


def longer_window_of_new_rows(block, at: torch.Tensor) -> torch.Tensor:
    return window_of_new_rows(block, at, longer=1)


def window_of_new_keys(block, at: torch.Tensor) -> torch.Tensor:
    """Hide, in the loop over the new tokens, what a window that counts these from 0 does not see."""
    starts = block.call.query_start_loc
    first = starts[starts <= block.rows[0]].max()
    context = block.position[0] - (block.rows[0] - first)
    is_before = at - context <= block.position[:, None] - block.call.sliding_window
    return is_before | (at > block.position[:, None])


def only_ends(block, at: torch.Tensor) -> torch.Tensor:
    return (at >= block.length).expand(len(block.rows), -1)


def test_a_soft_cap_makes_its_negative_of_hidden_scores():
    """A kernel that caps the scores after it masks them gives hidden slots the score -cap."""
    names = [
        one.name for one in mask_defects(make_problem(case_of("unified_attention", softcap=2.5)))
    ]
    assert any("score -2.5: later keys and slots past the last key" in name for name in names)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("op", ["context_attention_fwd", "unified_attention"])
def test_a_sound_kernel_has_no_rule(op, window):
    case = case_of(op, sliding_window=window)
    lab = FaultyLab(kernel=lambda _, call: tiled_attention(call))
    output, right = lab.run(case).output, lab.reference(case)
    torch.testing.assert_close(output.double(), right.double(), rtol=2e-3, atol=2e-3)
    assert rule_of(case) is None


@pytest.mark.parametrize(
    ("op", "window", "faults", "parts"),
    [
        ("context_attention_fwd", 0, {"hidden": 0.0}, ("blocks of 64 rows", "score 0: later")),
        ("context_attention_fwd", 0, {"hidden": "own"}, ("blocks of 64 rows", "own scores: later")),
        ("unified_attention", 0, {"hidden": "own"}, ("tiles of 32", "own scores: later keys and")),
        ("unified_attention", 20, {"hidden": 0.0}, ("tiles of 32", "score 0", "before the window")),
        ("unified_attention", 0, {"whole_only": True}, ("tiles of 32", "if the tile is not full")),
        ("unified_attention", 0, {"as_first": True}, ("keys after the first row of a block",)),
        (
            "unified_attention",
            20,
            {"hides": window_of_first},
            ("the window of all rows of a block is that of its first row",),
        ),
        (
            "unified_attention",
            20,
            {"hides": window_of_last},
            ("the window of all rows of a block is that of its last row",),
        ),
        (
            "unified_attention",
            20,
            {"hides": without_first_tile, "tile": 16},
            ("tiles of 16", "keys of the tile in which the window begins do not count"),
        ),
        (
            "unified_attention",
            0,
            {"hides": only_ends},
            ("later keys and slots past the last key of the block, up to the sequence's end",),
        ),
        (
            "unified_attention",
            0,
            {"is_late": True},
            ("tiles of 32", "rescaled after a tile is added, except after the first"),
        ),
        ("context_attention_fwd", 0, {"shift": 1.0}, ("new tokens, 1 is added to the scores",)),
        (
            "context_attention_fwd",
            0,
            {"rescale": lambda old, new: old.exp(), "loop": CONTEXT},
            ("the accumulator of earlier tiles is rescaled by exp(old maximum)",),
        ),
    ],
    ids=[
        "constant",
        "own",
        "unified",
        "window",
        "whole tiles",
        "first row",
        "window of first",
        "window of last",
        "first tile",
        "only ends",
        "late",
        "shift",
        "rescale",
    ],
)
@pytest.mark.quick("constant", "unified", "window of first", "whole tiles", "late", "shift")
def test_a_fault_is_described_by_its_rule(op, window, faults, parts):
    rule = rule_of(case_of(op, sliding_window=window), **faults)
    assert all(part in rule.text for part in parts), rule.text
    assert rule.cases > 3


def test_a_rule_must_hold_with_another_window():
    """A kernel that takes a window of one key for none does not let keys before other windows count."""

    def ignores_one(block, at: torch.Tensor) -> torch.Tensor:
        if block.call.sliding_window > 1:
            return right_hides(block, at)
        return (at > block.position[:, None]) | (at >= block.end)

    assert rule_of(case_of("unified_attention", sliding_window=1), hides=ignores_one) is None


def test_a_window_of_two_tiles_does_not_show_that_earlier_tiles_are_lost():
    """Of two tiles, the first one is the earlier one, and that in which the window begins."""
    lengths = {"query_lens": (1,), "ctx_lens": (16,), "sliding_window": 16}
    case = case_of("lmdeploy_paged_attention", backend="library:lmdeploy", **lengths)
    rule = rule_of(case, hides=without_first_tile, tile=16)
    assert "keys of the tile in which the window begins do not count" in rule.text


@pytest.mark.parametrize(
    ("faults", "parts"),
    [
        ({"loop": None, "as_zero": before_window}, ("in both loops, with tiles of 32", "score 0")),
        ({"loop": CONTEXT, "as_zero": before_window}, (LOOPS[0], "with tiles of 32", "score 0")),
        (
            {"loop": CONTEXT, "hides": window_of_new_rows},
            (LOOPS[0], "the window counts rows without the length of the context"),
        ),
        (
            {"loop": NEW, "hides": window_of_new_keys},
            (LOOPS[1], "the window counts keys without the length of the context"),
        ),
        ({"loop": CONTEXT, "hides": longer_window_of_new_rows}, ()),
        # all other scores are 1 larger, so the constant 0 has the effect of -1
        ({"loop": None, "as_zero": before_window, "shift": 1.0}, ("in both loops", "score -1")),
    ],
    ids=["zero in both", "zero in the context", "new rows", "new keys", "longer window", "shifted"],
)
@pytest.mark.quick("zero in the context", "new keys", "shifted")
def test_a_wrong_window_is_described_by_its_rule(faults, parts):
    """Other faults get no rule."""
    rule = rule_of(case_of("context_attention_fwd", sliding_window=9), **faults)
    assert (rule is not None) == bool(parts)
    assert all(part in rule.text for part in parts), rule.text


@pytest.mark.parametrize("constant", [0.0, -1e4])
def test_the_score_of_hidden_slots_is_that_of_cases_with_normal_values(constant):
    """All scores are near -18432 or 18432, so that either constant gives the same output."""
    values = {"distribution": "large_scores", "sm_scale": 0.125, "head_size": 32}
    case = case_of("context_attention_fwd", sliding_window=3, **values)
    rule = rule_of(case, loop=None, as_zero=before_window, constant=constant)
    assert f"count with score {constant:g}: keys before the window" in rule.text


@pytest.mark.parametrize(
    ("constant", "is_scaled", "text"),
    [
        (-3.0, False, "score -3: "),
        (-2 * math.log(2), False, "score -2 in base 2: "),
        (-4.0, True, "score -4 times the softmax scale: "),
    ],
)
def test_the_score_of_hidden_slots_is_measured(constant, is_scaled, text):
    """It is none of the constants that rules have; further cases have other softmax scales."""

    def attend(_: Case, call: KernelCall) -> None:
        score = constant * (call.sm_scale if is_scaled else 1)
        tiled_attention(call, loop=None, as_zero=before_window, constant=score)

    case, lab = case_of("context_attention_fwd", sliding_window=9), FaultyLab(kernel=attend)
    rule = find_rule(lab, case, lambda one: lab.run(one).output)
    assert f"hidden slots of the tiles count with {text}keys before the window" in rule.text
    assert rule.cases > 3


def test_scores_that_differ_between_rows_are_no_constant():
    """Each of two constants in half of the rows is no rule; one in all rows is."""
    case, outputs = case_of("context_attention_fwd", sliding_window=9), []
    for score in (-1.2, -3.4):
        faults = {"loop": None, "as_zero": before_window, "constant": score}
        lab = FaultyLab(kernel=lambda _, call, faults=faults: tiled_attention(call, **faults))
        outputs.append(lab.run(case).output)
    even = torch.arange(len(outputs[0]))[:, None, None] % 2 == 0
    problem = make_problem(case)
    counts = [
        len(mask_defects(problem, one)) for one in (None, outputs[0], torch.where(even, *outputs))
    ]
    assert counts[0] == counts[2] < counts[1]


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("context_attention_fwd", {"alibi": True}),
        ("context_attention_fwd", {"sliding_window": 5}),
        ("unified_attention", {"sliding_window": 5}),
    ],
    ids=["alibi", "window", "unified"],
)
def test_rules_change_outputs_and_have_names_of_their_own(op, changes):
    """A score of -10000 changes outputs only where other scores are as low."""
    problem = make_problem(case_of(op, **changes))
    low = make_problem(case_of(op, **changes, distribution="large_scores", sm_scale=0.125))
    rules = [*mask_defects(problem), *loop_defects(problem)]
    assert len({rule.name for rule in rules}) == len(rules) > 50
    for rule in rules:
        one = low if "-10000" in rule.name else problem
        row_slice = list(all_rows(one))[1]
        output, right = rule.compute(one, row_slice).output, one.correct(row_slice).output
        assert not torch.allclose(output, right, rtol=1e-6, atol=1e-9), rule.name


def test_a_constant_in_one_loop_is_scaled_in_each_case():
    """The constant is in units of the softmax scale, which differs between cases."""
    case = case_of("context_attention_fwd")
    texts = {
        scale: {one.name: one for one in loop_defects(make_problem(case.replace(sm_scale=scale)))}
        for scale in (0.3, 0.1)
    }
    words = "the products of queries and keys begin at 1 in place of 0"
    (text,) = (text for text in texts[0.3] if text.startswith(f"{LOOPS[0]}{words}"))
    problem = make_problem(case.replace(sm_scale=0.1))
    row_slice = next(iter(all_rows(problem)))
    first, second = (texts[scale][text].compute(problem, row_slice) for scale in (0.3, 0.1))
    torch.testing.assert_close(first.output, second.output)


@pytest.mark.parametrize("where", ["in the context", "among the new tokens"])
def test_biases_do_not_grow_in_a_part_of_the_sequence(where):
    problem = make_problem(case_of("unified_attention", alibi=True))
    (rule,) = (one for one in loop_defects(problem) if f"does not grow {where}" in one.text)
    row_slice = list(all_rows(problem))[1]
    inputs = problem.attention_inputs(row_slice)
    at, context = torch.arange(inputs.key.shape[0]), 50
    distance = (at - context).clamp(min=0) if where == "in the context" else at.clamp(max=context)
    plain = dataclasses.replace(inputs, alibi_slopes=None)
    scores = scores_of(plain) + inputs.alibi_slopes[:, None, None] * distance
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), inputs.value)
    torch.testing.assert_close(rule.compute(problem, row_slice).output, expected)
    assert not torch.allclose(problem.correct(row_slice).output, expected, rtol=1e-2)
