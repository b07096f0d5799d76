"""Defects of the soft cap, softcap · tanh(score / softcap) of scaled scores before ALiBi and mask."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import CPU_ATTENTION
from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice

EXP_LIMIT = 88.72283  # above it, exp(x) overflows float32
# Below it, the exp of vLLM's CPU op is 0 (csrc/cpu/cpu_arch_macros.h, vLLM 0.32.0) and 1 / exp is infinite.
CPU_EXP_LIMIT = -125.5 * math.log(2)
ScoreFunction = Callable[[torch.Tensor], torch.Tensor]


def _has_softcap(problem: Problem) -> bool:
    return problem.call.softcap is not None


def _softcap(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    wrong_cap: Callable[[float, float], ScoreFunction | None],
) -> Defect:
    """Return the defect of a wrong soft cap; ``wrong_cap`` builds it from the cap and the scale."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        if problem.call.softcap is None:
            return inputs
        wrong = wrong_cap(problem.call.softcap, problem.sm_scale)
        return dataclasses.replace(inputs, apply_softcap=wrong)

    return Defect(
        name=name,
        family="softcap",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=_has_softcap,
    )


def _overflowing(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    softcap = problem.call.softcap
    if softcap is None:
        return inputs
    lower = CPU_EXP_LIMIT if problem.call.op == CPU_ATTENTION else -EXP_LIMIT

    def apply_softcap(scores: torch.Tensor) -> torch.Tensor:
        ratio = scores / softcap
        overflows = (ratio > EXP_LIMIT) | (ratio < lower)
        return (softcap * ratio.tanh()).masked_fill(overflows, torch.nan)

    return dataclasses.replace(inputs, apply_softcap=apply_softcap)


def _may_overflow(problem: Problem) -> bool:
    """Answer whether a score may be large enough, by the norms of the queries and the known keys: all
    keys of a Case, the new ones of a call."""
    keys = problem.call.key if problem.batch is None else problem.batch.key
    if problem.batch is None and problem.call.new_tokens == "in the cache":
        keys = problem.intended_kv(0, slice(None))[0]
    query, key = (float(tensor.float().norm(dim=2).max()) for tensor in (problem.call.query, keys))
    return query * key * problem.sm_scale > -CPU_EXP_LIMIT * (problem.call.softcap or 0.0)


def _after_alibi(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    """Add ALiBi to the scores before the cap instead of after it."""
    softcap, slopes = problem.call.softcap, inputs.alibi_slopes
    if softcap is None or slopes is None:
        return inputs
    distance = torch.arange(inputs.key.shape[0]) - inputs.position[:, None]
    bias = slopes[:, None, None] * distance.to(slopes.dtype)

    def apply_softcap(scores: torch.Tensor) -> torch.Tensor:
        return softcap * ((scores + bias) / softcap).tanh()

    return dataclasses.replace(inputs, apply_softcap=apply_softcap, alibi_slopes=None)


def _over_mask(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    """Cap the scores after the mask: those of hidden keys become -softcap instead of minus infinity."""
    softcap, hidden = problem.call.softcap, ~inputs.visible
    if softcap is None:
        return inputs
    return dataclasses.replace(
        inputs,
        visible=torch.ones_like(inputs.visible),
        apply_softcap=lambda scores: (softcap * (scores / softcap).tanh()).masked_fill(
            hidden, -softcap
        ),
    )


SOFTCAP = (
    _softcap(
        "softcap_ignored",
        "the soft cap is not applied",
        ("vllm-metal #665", "kekzl/imp #688", "vllm #7425"),
        lambda softcap, sm_scale: None,
    ),
    _softcap(
        "softcap_before_scale",
        "the soft cap is applied before the scores are scaled",
        ("vllm #7425",),
        lambda softcap, sm_scale: (
            lambda scores: softcap * (scores / sm_scale / softcap).tanh() * sm_scale
        ),
    ),
    _softcap(
        "softcap_without_factor",
        "a score s becomes s · tanh(s / softcap) instead of softcap · tanh(s / softcap)",
        ("unslothai/unsloth-zoo #593",),
        lambda softcap, sm_scale: lambda scores: scores * (scores / softcap).tanh(),
    ),
    _softcap(
        "softcap_clamped",
        "scores are clamped to ±softcap instead of passing through tanh",
        ("vllm-metal #665",),
        lambda softcap, sm_scale: lambda scores: scores.clamp(-softcap, softcap),
    ),
    Defect(
        name="softcap_overflows",
        family="softcap",
        text="a score above about 88 times the soft cap becomes NaN, because exp overflows in float32",
        seen_in=("vllm #56578", "vllm #56579"),
        touches="all",
        compute=changing_inputs(_overflowing),
        applies=lambda problem: _has_softcap(problem) and _may_overflow(problem),
    ),
    Defect(
        name="softcap_after_alibi",
        family="softcap",
        text="the soft cap is applied to the sum of score and ALiBi bias instead of to the score",
        seen_in=("rocm-libraries #12229", "tokamax #1121"),
        touches="all",
        compute=changing_inputs(_after_alibi),
        applies=lambda problem: _has_softcap(problem) and problem.call.alibi_slopes is not None,
    ),
    Defect(
        name="softcap_over_mask",
        family="softcap",
        text="the soft cap is applied after the mask, so hidden keys of the sequence get the score -softcap",
        seen_in=("onnx/onnx #7865", "flashinfer #350"),
        touches="all",
        compute=changing_inputs(_over_mask),
        applies=_has_softcap,
    ),
)
