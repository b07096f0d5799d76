"""Defects of how a row weighs the keys that it sees."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, always, by_sight
from attnlab.defects.problem import Problem, RowSlice


def _scale(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    scale: Callable[[Problem], float],
    links: tuple[str, ...] = (),
) -> Defect:
    """Return the defect of another scale of the scores."""

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        return dataclasses.replace(sight, scale=scale(problem))

    return Defect(
        name=name,
        family="scores",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=by_sight(change),
        applies=lambda problem: not math.isclose(scale(problem), problem.scale),
        links=links,
    )


def _alibi(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    change: Callable[[Problem, RowSlice, AttentionInputs], AttentionInputs],
) -> Defect:
    return Defect(
        name=name,
        family="scores",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=by_sight(change),
        applies=lambda problem: problem.call.alibi_slopes is not None,
    )


def _next_heads_slopes(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    slopes = problem.call.alibi_slopes
    if slopes is None:
        return sight
    return dataclasses.replace(sight, slopes=slopes[(row_slice.heads + 1) % len(slopes)].double())


def _kv_heads_slopes(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    slopes = problem.call.alibi_slopes
    if slopes is None:
        return sight
    return dataclasses.replace(sight, slopes=slopes[problem.kv_of(row_slice.heads)].double())


def _no_scores(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(sight, query=torch.zeros_like(sight.query), slopes=None)


def _zero_sink(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(sight, sinks=torch.zeros(len(row_slice.heads), dtype=torch.float64))


SCORES = (
    _scale(
        "scale_by_num_heads",
        "the scale is 1 / sqrt of the number of heads, not of the head size",
        ("vllm #20011",),
        lambda problem: problem.num_heads**-0.5,
        links=("default_scale",),
    ),
    _scale(
        "scale_doubled",
        "the scale is twice what it should be",
        ("vllm #20011",),
        lambda problem: 2 * problem.scale,
    ),
    _scale(
        "scale_missing", "the scores are not scaled", ("flashinfer #4979",), lambda problem: 1.0
    ),
    Defect(
        name="scores_ignored",
        family="scores",
        text="every visible key has the same weight: query and key do not count",
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=by_sight(_no_scores),
        applies=always,
    ),
    _alibi(
        "alibi_ignored",
        "ALiBi is left out",
        ("vllm #57614",),
        lambda problem, row_slice, sight: dataclasses.replace(sight, slopes=None),
    ),
    _alibi(
        "alibi_shifted",
        "ALiBi counts distances from one position further: without a sink softmax does not change",
        ("vllm #945",),
        lambda problem, row_slice, sight: dataclasses.replace(sight, shift=1),
    ),
    _alibi(
        "alibi_next_head",
        "a head takes the ALiBi slope of the next head",
        ("vllm #57614",),
        _next_heads_slopes,
    ),
    dataclasses.replace(
        _alibi(
            "alibi_kv_head",
            "a query head takes the ALiBi slope by the number of its KV head",
            ("vllm #57614",),
            _kv_heads_slopes,
        ),
        applies=lambda problem: (
            problem.call.alibi_slopes is not None and problem.call.num_queries_per_kv > 1
        ),
    ),
    Defect(
        name="sink_counted",
        family="scores",
        text="an attention sink with logit 0 is counted where none was passed",
        seen_in=("rocm-libraries #12229", "sglang #35092"),
        touches="all",
        compute=by_sight(_zero_sink),
        applies=lambda problem: problem.call.sinks is None,
    ),
)
