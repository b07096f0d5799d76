"""Defects in the scores: scale, ALiBi, and a sink that was not passed."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import CPU_ATTENTION, UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.problem import (
    AttentionInputs,
    ChangeInputs,
    Defect,
    Problem,
    RowSlice,
    always,
    changing_inputs,
)


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


# Defects of the soft cap, softcap · tanh(score / softcap) of scaled scores before ALiBi and mask.

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


# Defects of the attention sink, one more logit in each row's softmax that has no value.

_SEGMENTS, _TILE = 16, 16  # of the 3d path of unified_attention, as vLLM calls it (0.11.2, 0.33.0)


def _has_sinks(problem: Problem) -> bool:
    return problem.call.sinks is not None


def _sink(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    logits: Callable[[Problem, RowSlice, torch.Tensor], torch.Tensor | None],
    applies: Callable[[Problem], bool] = always,
) -> Defect:
    """Return the defect of wrong sinks.

    ``logits`` returns the sinks of a RowSlice's heads, or None, given the sinks of all heads
    [num_heads] float64.
    """

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        sinks = problem.call.sinks
        if sinks is None:
            return inputs
        return dataclasses.replace(inputs, sinks=logits(problem, row_slice, sinks.double()))

    return Defect(
        name=name,
        family="sinks",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=lambda problem: _has_sinks(problem) and applies(problem),
    )


def splits(problem: Problem, seq: int) -> int:
    """Return into how many parts a sequence is split, each with its own softmax sum, before the merge.

    unified_attention splits a batch of decodes into segments of whole tiles of 16 tokens. Every other
    kernel is assumed to split its cached tokens as ROCm's does, in partitions of 256.
    """
    call = problem.call
    if call.op != UNIFIED:
        return max(1, -(-problem.cached_len(seq) // PARTITION_SIZE))
    if call.max_query_len > 1:
        return 1
    max_segments = _SEGMENTS if call.num_splits is None else max(1, call.num_splits)
    tiles = -(-problem.seq_len(seq) // _TILE)
    return -(-tiles // -(-tiles // max_segments))


def _per_split(problem: Problem, row_slice: RowSlice, sinks: torch.Tensor) -> torch.Tensor:
    """Return logits that count once per split: n·exp(s) = exp(s + log n)."""
    return sinks[row_slice.heads] + math.log(splits(problem, row_slice.seq))


def _capped(problem: Problem, sinks: torch.Tensor) -> torch.Tensor:
    softcap = problem.call.softcap
    return sinks if softcap is None else softcap * (sinks / softcap).tanh()


def _on_first_key(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    if problem.call.sinks is None:
        return inputs
    sinks = problem.call.sinks[row_slice.heads].double()
    return dataclasses.replace(inputs, sinks=None, first_bias=sinks)


def _from_first_new_token(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return dataclasses.replace(inputs, alibi_shift=row_slice.tokens[:, None])


def _has_several_heads(problem: Problem) -> bool:
    return problem.num_heads > 1


SINKS = (
    _sink(
        "sink_ignored",
        "softmax does not include the attention sink",
        ("vllm-metal #550", "kekzl/imp #1345", "sglang #11634"),
        lambda problem, row_slice, sinks: None,
    ),
    _sink(
        "sink_counted_twice",
        "softmax includes the attention sink twice",
        ("rocm-libraries #12227", "rocm-libraries #12229"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] + math.log(2.0),
    ),
    _sink(
        "sink_per_split",
        "every split of a sequence adds the attention sink, instead of one split only",
        ("rocm-libraries #12227", "vllm-metal #550"),
        _per_split,
        lambda problem: any(splits(problem, seq) > 1 for seq in range(problem.num_seqs)),
    ),
    _sink(
        "sink_first_head",
        "every query head uses the attention sink of head 0",
        ("sglang #35092",),
        lambda problem, row_slice, sinks: sinks[torch.zeros_like(row_slice.heads)],
        _has_several_heads,
    ),
    _sink(
        "sink_next_head",
        "each query head uses the attention sink of the next head",
        ("sglang #35092",),
        lambda problem, row_slice, sinks: sinks[(row_slice.heads + 1) % len(sinks)],
        _has_several_heads,
    ),
    _sink(
        "sink_kv_head",
        "query head h uses the attention sink with the index of its KV head, h // num_queries_per_kv",
        ("Dao-AILab/flash-attention #2752",),
        lambda problem, row_slice, sinks: sinks[problem.kv_heads_of(row_slice.heads)],
        lambda problem: problem.call.num_queries_per_kv > 1,
    ),
    _sink(
        "sink_scaled",
        "the attention sink is multiplied by the scale of the scores",
        ("rocm-libraries #12227", "sglang #38142"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] * problem.sm_scale,
        lambda problem: not math.isclose(problem.sm_scale, 1.0),
    ),
    _sink(
        "sink_base_2",
        "a kernel that computes softmax with exp2 does not convert the attention sink to base 2",
        ("rocm-libraries #12227", "TensorRT-LLM #5521"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] * math.log(2.0),
    ),
    _sink(
        "sink_capped",
        "the soft cap is also applied to the attention sink",
        ("rocm-libraries #12229",),
        lambda problem, row_slice, sinks: _capped(problem, sinks[row_slice.heads]),
        lambda problem: problem.call.softcap is not None,
    ),
    Defect(
        name="sink_beside_alibi",
        family="sinks",
        text="ALiBi distances are counted from the sequence's first new token instead of from each row's "
        "query; softmax cancels the difference, unless there is an attention sink",
        seen_in=("vllm #945",),
        touches="all",
        compute=changing_inputs(_from_first_new_token),
        applies=lambda problem: (
            _has_sinks(problem)
            and problem.call.alibi_slopes is not None
            and any(problem.query_len(seq) > 1 for seq in range(problem.num_seqs))
        ),
    ),
    Defect(
        name="sink_on_first_key",
        family="sinks",
        text="the attention sink is added to the score of the sequence's first key",
        seen_in=("vllm #49815",),
        touches="all",
        compute=changing_inputs(_on_first_key),
        applies=_has_sinks,
    ),
)
