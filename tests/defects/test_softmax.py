"""Defects of the softmax, scales and loops: each equals a kernel written with the fault, and is named."""

import dataclasses
import math

import pytest
import torch
from fault_injection import correct_run, plant
from helpers.cases import hostile

from attnlab.case.case import Case
from attnlab.defects import DEFECTS
from attnlab.diagnosis.diagnose import diagnose
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Problem, RowSlice, make_problem, scores_of

LENS = {"query_lens": (1, 40, 1, 18), "ctx_lens": (75, 50, 300, 0)}
PLAIN = hostile(**LENS, empty_slots="garbage", platform="sm_90")
WINDOW = hostile(**LENS, empty_slots="garbage", platform="sm_90", sliding_window=21)
FP8 = hostile(
    **LENS, empty_slots="garbage", platform="sm_90", kv_cache_dtype="fp8", k_scale=0.7, v_scale=0.3
)
NEW = {
    "accumulator_not_rescaled": PLAIN,
    "sum_not_rescaled": PLAIN,
    "rescale_in_base_2": PLAIN,
    "exp2_for_exp": PLAIN,
    "log2e_in_scale": PLAIN,
    "tile_counted_twice": PLAIN,
    "merge_weights_exchanged": PLAIN,
    "merge_in_base_2": PLAIN,
    "short_part_not_rescaled": PLAIN,
    "page_is_tile": PLAIN,
    "k_scale_is_v_scale": FP8,
    "v_scale_is_k_scale": FP8,
    "window_ignored_in_context": WINDOW,
    "window_ignored_in_new_tokens": WINDOW,
    "window_off_in_context": WINDOW,
    "window_off_in_new_tokens": WINDOW,
    "alibi_sign": hostile(**LENS, empty_slots="garbage", platform="sm_90", alibi=True),
    "softcap_over_mask": hostile(
        **LENS, empty_slots="garbage", platform="sm_90", op="unified_attention", softcap=2.0
    ),
}


def names_of(case: Case, planted: str, without: bool) -> list[str]:
    """Plant a defect and return the explanations, with or without it among the candidates."""
    lab = Lab()
    problem, output = correct_run(lab, case)
    wrong = plant(problem, output, DEFECTS[planted], "all")
    defects = [defect for name, defect in DEFECTS.items() if not (without and name == planted)]
    diagnosis = diagnose(case, wrong, lab=lab, defects=defects, propose=False)
    assert diagnosis.is_wrong
    return [candidate.name for candidate in diagnosis.explanations]


@pytest.mark.parametrize("name", NEW)
def test_a_planted_defect_is_named_and_nothing_else_is(name):
    """Without it among the candidates there is no explanation: no other defect equals it."""
    assert names_of(NEW[name], name, without=False) == [name]
    assert names_of(NEW[name], name, without=True) == []


def test_every_variant_of_a_tile_is_named():
    """The diagnosis finds the size of the tile, too."""
    lab = Lab()
    problem, output = correct_run(lab, PLAIN)
    for variant in DEFECTS["accumulator_not_rescaled"].expand()[:3]:
        wrong = plant(problem, output, variant, "all")
        cause = diagnose(PLAIN, wrong, lab=lab, propose=False).cause
        assert cause is not None
        assert cause.text == variant.text


def tiles_of(problem: Problem, seq: int, size: int) -> list[range]:
    """Return the tiles of a loop over the cached keys, then of a loop over the others."""
    end, cached = problem.seq_len(seq), problem.cached_len(seq)
    tiles = [range(start, min(start + size, cached)) for start in range(0, cached, size)]
    return tiles + [range(start, min(start + size, end)) for start in range(cached, end, size)]


def online(problem: Problem, row_slice: RowSlice, size: int, fault: str) -> torch.Tensor:
    """Compute attention tile by tile, with a running maximum, as kernels do, and with a fault."""
    inputs = problem.attention_inputs(row_slice)
    scores, value = scores_of(inputs), inputs.value.transpose(0, 1)
    maximum = torch.full((*scores.shape[:2], 1), -1e30, dtype=torch.float64)
    total, accumulator = torch.zeros_like(maximum), torch.zeros_like(maximum) * value[:, :1]
    for tile in tiles_of(problem, row_slice.seq, size):
        part = scores[..., tile.start : tile.stop]
        raised = torch.maximum(maximum, part.amax(-1, keepdim=True))
        factor = (maximum - raised).exp2() if fault == "base 2" else (maximum - raised).exp()
        weights = (part - raised).exp()
        if fault != "sum":
            total = total * factor
        if fault != "accumulator":
            accumulator = accumulator * factor
        total = total + weights.sum(-1, keepdim=True)
        accumulator = accumulator + weights @ value[:, tile.start : tile.stop]
        maximum = raised
    return (accumulator / total).transpose(0, 1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("accumulator_not_rescaled", "accumulator"),
        ("sum_not_rescaled", "sum"),
        ("rescale_in_base_2", "base 2"),
    ],
)
def test_the_prediction_is_that_of_a_loop_over_tiles(name, fault):
    problem = make_problem(PLAIN)
    variants = dict(zip((16, 32, 64, 128), DEFECTS[name].variants, strict=True))
    for seq in range(problem.num_seqs):
        tokens = torch.arange(problem.query_len(seq))
        row_slice = RowSlice(seq=seq, tokens=tokens, heads=torch.arange(6))
        assert (
            online(problem, row_slice, 32, "none") - problem.correct(row_slice).output
        ).abs().max() < 1e-9
        for size, (_, compute) in variants.items():
            predicted = compute(problem, row_slice).output
            assert (online(problem, row_slice, size, fault) - predicted).abs().max() < 1e-9


def test_the_merge_in_base_2_weighs_by_misread_logarithms():
    """Context and new tokens of one prefill, merged by hand."""
    problem = make_problem(PLAIN)
    row_slice = RowSlice(seq=1, tokens=torch.arange(40), heads=torch.arange(6))
    inputs = problem.attention_inputs(row_slice)
    scores, value = scores_of(inputs), inputs.value.transpose(0, 1)
    parts = [(scores[..., :50], value[:, :50]), (scores[..., 50:], value[:, 50:])]
    outputs = torch.stack([part.softmax(-1) @ values for part, values in parts])
    logs = torch.stack([part.logsumexp(-1) for part, _ in parts])
    for name, weights in (
        ("merge_in_base_2", (logs * math.log2(math.e)).softmax(0)),
        ("merge_weights_exchanged", logs.softmax(0).flip(0)),
    ):
        merged = (weights[..., None] * outputs).sum(0).transpose(0, 1)
        predicted = DEFECTS[name].compute(problem, row_slice).output
        assert (merged - predicted).abs().max() < 1e-9


def test_a_cap_over_the_mask_leaves_weight_on_later_keys():
    problem = make_problem(NEW["softcap_over_mask"])
    row_slice = RowSlice(seq=3, tokens=torch.tensor([0]), heads=torch.arange(6))
    inputs = problem.attention_inputs(row_slice)
    scores = scores_of(dataclasses.replace(inputs, visible=torch.ones_like(inputs.visible)))
    scores[..., 1:] = -2.0
    expected = (scores.softmax(-1) @ inputs.value.transpose(0, 1)).transpose(0, 1)
    predicted = DEFECTS["softcap_over_mask"].compute(problem, row_slice).output
    assert (expected - predicted).abs().max() < 1e-9
