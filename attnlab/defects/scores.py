"""Defects in the scores: scale, ALiBi, and a sink that was not passed."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import ChangeInputs, Defect, always, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice


def _scale(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    sm_scale: Callable[[Problem], float],
    links: tuple[str, ...] = (),
) -> Defect:
    """Return the defect of a wrong scale; ``sm_scale`` returns the wrong one."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        return dataclasses.replace(inputs, sm_scale=sm_scale(problem))

    return Defect(
        name=name,
        family="scores",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=lambda problem: not math.isclose(sm_scale(problem), problem.sm_scale),
        links=links,
    )


def _has_alibi(problem: Problem) -> bool:
    return problem.call.alibi_slopes is not None


def _alibi(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: ChangeInputs,
    applies: Callable[[Problem], bool] = always,
) -> Defect:
    return Defect(
        name=name,
        family="scores",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=lambda problem: _has_alibi(problem) and applies(problem),
    )


def _slopes_of(heads: Callable[[Problem, torch.Tensor], torch.Tensor]) -> ChangeInputs:
    """Return the change that gives each query head the ALiBi slope of another head; ``heads`` maps query
    heads [n] to the heads [n] whose slopes they take."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        slopes = problem.call.alibi_slopes
        if slopes is None:
            return inputs
        wrong = slopes[heads(problem, row_slice.heads)].double()
        return dataclasses.replace(inputs, alibi_slopes=wrong)

    return change


def _negated(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    slopes = inputs.alibi_slopes
    return inputs if slopes is None else dataclasses.replace(inputs, alibi_slopes=-slopes)


def _no_scores(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(inputs, query=torch.zeros_like(inputs.query), alibi_slopes=None)


def _zero_sink(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    sinks = torch.zeros(len(row_slice.heads), dtype=torch.float64)
    return dataclasses.replace(inputs, sinks=sinks)


SCORES = (
    _scale(
        "scale_by_num_heads",
        "the scale is 1 / sqrt(num_heads) instead of 1 / sqrt(head_size)",
        ("vllm #20011",),
        lambda problem: problem.num_heads**-0.5,
        links=("default_scale",),
    ),
    _scale(
        "scale_doubled",
        "the scale is twice the correct value",
        ("vllm #20011",),
        lambda problem: 2 * problem.sm_scale,
    ),
    _scale(
        "scale_missing", "the scores are not scaled", ("flashinfer #4979",), lambda problem: 1.0
    ),
    _scale(
        "log2e_in_scale",
        "the scale includes log2(e), but the softmax uses exp instead of exp2",
        ("sgl-project/sgl-kernel-xpu #491", "sglang #40903"),
        lambda problem: problem.sm_scale * math.log2(math.e),
    ),
    Defect(
        name="scores_ignored",
        family="scores",
        text="every visible key has the same weight; query and key have no effect",
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=changing_inputs(_no_scores),
        applies=always,
    ),
    _alibi(
        "alibi_ignored",
        "the ALiBi bias is not added",
        ("vllm #57614",),
        lambda problem, row_slice, inputs: dataclasses.replace(inputs, alibi_slopes=None),
    ),
    _alibi(
        "alibi_sign",
        "the ALiBi bias has the wrong sign and favours distant keys",
        ("meta-pytorch/attention-gym #29", "meta-pytorch/attention-gym #86"),
        _negated,
    ),
    _alibi(
        "alibi_shifted",
        "all ALiBi distances are too large by 1, which softmax cancels unless there is an attention sink",
        ("vllm #945",),
        lambda problem, row_slice, inputs: dataclasses.replace(inputs, alibi_shift=1),
    ),
    _alibi(
        "alibi_next_head",
        "each query head uses the ALiBi slope of the next head",
        ("vllm #57614",),
        _slopes_of(lambda problem, heads: (heads + 1) % problem.num_heads),
    ),
    _alibi(
        "alibi_kv_head",
        "query head h uses the ALiBi slope with the index of its KV head, h // num_queries_per_kv",
        ("vllm #57614",),
        _slopes_of(lambda problem, heads: problem.kv_heads_of(heads)),
        lambda problem: problem.call.num_queries_per_kv > 1,
    ),
    Defect(
        name="zero_key_counted",
        family="scores",
        text="the sum of the softmax has one more term exp(0), as a padded key of zeros or an attention sink "
        "of 0 gives; the call has no sinks",
        seen_in=("rocm-libraries #12229", "sglang #35092"),
        touches="all",
        compute=changing_inputs(_zero_sink),
        applies=lambda problem: problem.call.sinks is None,
    ),
)
