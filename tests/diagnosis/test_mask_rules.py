"""Rules about masks, loops and rescaling: each is found from the outputs of a kernel with that fault."""

import dataclasses

import pytest
import torch
from helpers.cases import hostile
from helpers.faulty_labs import FaultyLab
from helpers.tiled_attention import CONTEXT, NEW, right_hides, tiled_attention

from attnlab.case.case import Case
from attnlab.diagnosis.claims import ConfirmedRule
from attnlab.diagnosis.rules.divisions import LOOPS
from attnlab.diagnosis.rules.masks import mask_defects
from attnlab.diagnosis.rules.search import find_rule
from attnlab.diagnosis.rules.softmax import loop_defects
from attnlab.lab.problem import all_rows, make_problem, scores_of

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
def test_a_fault_is_described_by_its_rule(op, window, faults, parts):
    rule = rule_of(case_of(op, sliding_window=window), **faults)
    assert rule is not None
    assert all(part in rule.text for part in parts), rule.text
    assert rule.cases > 3


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
        ({"loop": None, "as_zero": before_window, "shift": 1.0}, ()),
    ],
    ids=["zero in both", "zero in the context", "new rows", "new keys", "longer window", "shifted"],
)
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
    assert rule is not None
    assert f"count with score {constant:g}: keys before the window" in rule.text


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
