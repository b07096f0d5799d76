"""Defects of the soft cap: c · tanh(score / c), of scaled scores before ALiBi and mask."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import CPU_ATTENTION
from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, by_sight
from attnlab.defects.problem import Problem, RowSlice

EXP_LIMIT = 88.72283  # above it exp(x) is more than the largest float32
# Below it the exp of the CPU's op is 0 (csrc/cpu/cpu_arch_macros.h, vLLM 0.32.0), and 1 / exp infinite.
CPU_EXP_LIMIT = -125.5 * math.log(2)
Cap = Callable[[torch.Tensor], torch.Tensor]


def _softcap(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    cap: Callable[[float, float], Cap | None],
) -> Defect:
    """Return the defect of another cap, given as a function of the right one and the scale."""

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        if problem.call.softcap is None:
            return sight
        return dataclasses.replace(sight, cap=cap(problem.call.softcap, problem.scale))

    return Defect(
        name=name,
        family="softcap",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=by_sight(change),
        applies=lambda problem: problem.call.softcap is not None,
    )


def _overflowing(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    softcap = problem.call.softcap
    if softcap is None:
        return sight
    least = CPU_EXP_LIMIT if problem.call.op == CPU_ATTENTION else -EXP_LIMIT

    def cap(scores: torch.Tensor) -> torch.Tensor:
        ratio = scores / softcap
        over = (ratio > EXP_LIMIT) | (ratio < least)
        return (softcap * ratio.tanh()).masked_fill(over, torch.nan)

    return dataclasses.replace(sight, cap=cap)


def _may_overflow(problem: Problem) -> bool:
    """Answer whether a score may be as large as that, by the norms of queries and of the keys that are
    known: all of a Case, the new ones of a call alone."""
    keys = problem.call.key if problem.batch is None else problem.batch.key
    norms = [float(tensor.float().norm(dim=2).max()) for tensor in (problem.call.query, keys)]
    return norms[0] * norms[1] * problem.scale > -CPU_EXP_LIMIT * (problem.call.softcap or 0.0)


def _after_alibi(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    """Put ALiBi into the scores that are capped, and not behind them."""
    softcap, slopes = problem.call.softcap, sight.slopes
    if softcap is None or slopes is None:
        return sight
    away = torch.arange(sight.key.shape[0]) - sight.position[:, None]
    bias = slopes[:, None, None] * away.to(slopes.dtype)

    def cap(scores: torch.Tensor) -> torch.Tensor:
        return softcap * ((scores + bias) / softcap).tanh()

    return dataclasses.replace(sight, cap=cap, slopes=None)


SOFTCAP = (
    _softcap(
        "softcap_ignored",
        "the soft cap is left out",
        ("vllm-metal #665", "kekzl/imp #688", "vllm #7425"),
        lambda softcap, scale: None,
    ),
    _softcap(
        "softcap_before_scale",
        "the soft cap is applied to scores that are not scaled yet",
        ("vllm #7425",),
        lambda softcap, scale: lambda scores: softcap * (scores / scale / softcap).tanh() * scale,
    ),
    _softcap(
        "softcap_without_factor",
        "scores are multiplied by tanh(score / cap), not replaced by cap · tanh(score / cap)",
        ("unslothai/unsloth-zoo #593",),
        lambda softcap, scale: lambda scores: scores * (scores / softcap).tanh(),
    ),
    _softcap(
        "softcap_clamped",
        "scores are cut off at the cap, not bent towards it",
        ("vllm-metal #665",),
        lambda softcap, scale: lambda scores: scores.clamp(-softcap, softcap),
    ),
    Defect(
        name="softcap_overflows",
        family="softcap",
        text="a score beyond some 88 times the cap becomes NaN: its exponential overflows",
        seen_in=("vllm #56578", "vllm #56579"),
        touches="all",
        compute=by_sight(_overflowing),
        applies=lambda problem: problem.call.softcap is not None and _may_overflow(problem),
    ),
    Defect(
        name="softcap_after_alibi",
        family="softcap",
        text="the soft cap is applied to scores and ALiBi together",
        seen_in=("rocm-libraries #12229", "tokamax #1121"),
        touches="all",
        compute=by_sight(_after_alibi),
        applies=lambda problem: (
            problem.call.softcap is not None and problem.call.alibi_slopes is not None
        ),
    ),
)
