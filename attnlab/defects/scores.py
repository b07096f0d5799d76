"""Defects in the scores: scale, ALiBi, soft cap and attention sinks."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import CPU_ATTENTION, UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.edit import Defect, Rows, family, fault, has_head_groups, has_several_heads
from attnlab.kernels.model import capped
from attnlab.lab.problem import AttentionInputs, Problem


def _scale(
    name: str,
    text: str,
    seen_in: str,
    sm_scale: Callable[[Problem], float],
    links: tuple[str, ...] = (),
) -> Defect:
    """Return the defect of a wrong scale; ``sm_scale`` returns the wrong one."""
    return fault(
        *(name, text, seen_in),
        lambda at: at.change(sm_scale=sm_scale(at.problem)),
        lambda problem: not math.isclose(sm_scale(problem), problem.sm_scale),
        links=links,
    )


def _has_alibi(problem: Problem) -> bool:
    return problem.call.alibi_slopes is not None


def _slopes_of(at: Rows, heads: torch.Tensor) -> AttentionInputs:
    """Give the query heads the ALiBi slopes of other heads, [heads]."""
    slopes = at.call.alibi_slopes
    return at.inputs if slopes is None else at.change(alibi_slopes=slopes[heads].double())


def _next_heads(at: Rows) -> torch.Tensor:
    return (at.heads + 1) % at.problem.num_heads


def _negated(at: Rows) -> AttentionInputs:
    slopes = at.inputs.alibi_slopes
    return at.inputs if slopes is None else at.change(alibi_slopes=-slopes)


SCORES = family(
    "scores",
    _scale(
        "scale_by_num_heads",
        "the scale is 1 / sqrt(num_heads) instead of 1 / sqrt(head_size)",
        "vllm #20011",
        lambda problem: problem.num_heads**-0.5,
        links=("default_scale",),
    ),
    _scale(
        "scale_doubled",
        "the scale is twice the correct value",
        "vllm #20011",
        lambda problem: 2 * problem.sm_scale,
    ),
    _scale("scale_missing", "the scores are not scaled", "flashinfer #4979", lambda problem: 1.0),
    _scale(
        "log2e_in_scale",
        "the scale includes log2(e), but the softmax uses exp instead of exp2",
        "sgl-project/sgl-kernel-xpu #491, sglang #40903",
        lambda problem: problem.sm_scale * math.log2(math.e),
    ),
    fault(
        "scores_ignored",
        "every visible key has the same weight; query and key have no effect",
        "mlir-air #1427",
        lambda at: at.change(query=torch.zeros_like(at.inputs.query), alibi_slopes=None),
    ),
    fault(
        "alibi_ignored",
        "the ALiBi bias is not added",
        "vllm #57614",
        lambda at: at.change(alibi_slopes=None),
        _has_alibi,
    ),
    fault(
        "alibi_sign",
        "the ALiBi bias has the wrong sign and favours distant keys",
        "meta-pytorch/attention-gym #29, meta-pytorch/attention-gym #86",
        _negated,
        _has_alibi,
    ),
    fault(
        "alibi_shifted",
        "all ALiBi distances are too large by 1, which softmax cancels unless there is an attention sink",
        "vllm #945",
        lambda at: at.change(alibi_shift=1),
        _has_alibi,
    ),
    fault(
        "alibi_next_head",
        "each query head uses the ALiBi slope of the next head",
        "vllm #57614",
        lambda at: _slopes_of(at, _next_heads(at)),
        _has_alibi,
    ),
    fault(
        "alibi_kv_head",
        "query head h uses the ALiBi slope with the index of its KV head, h // num_queries_per_kv",
        "vllm #57614",
        lambda at: _slopes_of(at, at.kv),
        *(_has_alibi, has_head_groups),
    ),
    fault(
        "zero_key_counted",
        "the sum of the softmax has one more term exp(0), as a padded key of zeros or an attention sink "
        "of 0 gives; the call has no sinks",
        "rocm-libraries #12229, sglang #35092",
        lambda at: at.change(sinks=torch.zeros(len(at.heads), dtype=torch.float64)),
        lambda problem: problem.call.sinks is None,
    ),
)


# Defects of the soft cap, softcap · tanh(score / softcap) of scaled scores before ALiBi and mask.

EXP_LIMIT = 88.72283  # above it, exp(x) overflows float32
# Below it, the exp of vLLM's CPU op is 0 (csrc/cpu/cpu_arch_macros.h, vLLM 0.32.0) and 1 / exp is infinite.
CPU_EXP_LIMIT = -125.5 * math.log(2)


def _has_softcap(problem: Problem) -> bool:
    return problem.call.softcap is not None


def _softcap(at: Rows, wrong: Callable[[torch.Tensor, float], torch.Tensor]) -> AttentionInputs:
    """Return inputs whose scores ``wrong`` caps, from scaled scores and the soft cap."""
    softcap = at.call.softcap
    return at.inputs if softcap is None else at.change(apply_softcap=lambda s: wrong(s, softcap))


def _overflowing(at: Rows) -> AttentionInputs:
    def on_cpu(scores: torch.Tensor, softcap: float) -> torch.Tensor:
        ratio = scores / softcap
        overflows = (ratio > EXP_LIMIT) | (ratio < CPU_EXP_LIMIT)
        return (softcap * ratio.tanh()).masked_fill(overflows, torch.nan)

    def on_gpu(scores: torch.Tensor, softcap: float) -> torch.Tensor:
        """Also compute the infinite scores of a cap above 1, in front of those that are NaN."""
        computed = capped(scores.float(), softcap, overflows=True).to(scores.dtype)
        return torch.where(computed.isfinite(), softcap * (scores / softcap).tanh(), computed)

    return _softcap(at, on_cpu if at.call.op == CPU_ATTENTION else on_gpu)


def _may_overflow(problem: Problem) -> bool:
    """Answer whether a score may be large enough, by the norms of the queries and the known keys: all
    keys of a Case, the new ones of a call."""
    keys = problem.call.key if problem.batch is None else problem.batch.key
    if problem.batch is None and problem.call.new_tokens == "in the cache":
        keys = problem.intended_kv(0, slice(None))[0]
    query, key = (float(tensor.float().norm(dim=2).max()) for tensor in (problem.call.query, keys))
    return query * key * problem.sm_scale > -CPU_EXP_LIMIT * (problem.call.softcap or 0.0)


def _after_alibi(at: Rows) -> AttentionInputs:
    """Add ALiBi to the scores before the cap instead of after it."""
    slopes = at.inputs.alibi_slopes
    if slopes is None:
        return at.inputs
    bias = slopes[:, None, None] * at.after.to(slopes.dtype)
    capped = _softcap(at, lambda scores, softcap: softcap * ((scores + bias) / softcap).tanh())
    return dataclasses.replace(capped, alibi_slopes=None)


def _over_mask(at: Rows) -> AttentionInputs:
    """Cap the scores after the mask: those of hidden keys become -softcap instead of minus infinity."""
    hidden = ~at.visible
    capped = _softcap(
        at, lambda s, softcap: (softcap * (s / softcap).tanh()).masked_fill(hidden, -softcap)
    )
    return dataclasses.replace(capped, visible=torch.ones_like(hidden))


SOFTCAP = family(
    "softcap",
    fault(
        "softcap_ignored",
        "the soft cap is not applied",
        "vllm-metal #665, kekzl/imp #688, vllm #7425",
        lambda at: at.change(apply_softcap=None),
        _has_softcap,
    ),
    fault(
        "softcap_before_scale",
        "the soft cap is applied before the scores are scaled",
        "vllm #7425",
        lambda at: _softcap(
            at, lambda s, cap: cap * (s / at.problem.sm_scale / cap).tanh() * at.problem.sm_scale
        ),
        _has_softcap,
    ),
    fault(
        "softcap_without_factor",
        "a score s becomes s · tanh(s / softcap) instead of softcap · tanh(s / softcap)",
        "unslothai/unsloth-zoo #593",
        lambda at: _softcap(at, lambda scores, softcap: scores * (scores / softcap).tanh()),
        _has_softcap,
    ),
    fault(
        "softcap_clamped",
        "scores are clamped to ±softcap instead of passing through tanh",
        "vllm-metal #665",
        lambda at: _softcap(at, lambda scores, softcap: scores.clamp(-softcap, softcap)),
        _has_softcap,
    ),
    fault(
        "softcap_overflows",
        "a score beyond ±88 times the soft cap becomes NaN or infinite, as exp overflows in float32",
        "vllm #56578, vllm #56579",
        _overflowing,
        *(_has_softcap, _may_overflow),
    ),
    fault(
        "softcap_after_alibi",
        "the soft cap is applied to the sum of score and ALiBi bias instead of to the score",
        "rocm-libraries #12229, tokamax #1121",
        _after_alibi,
        *(_has_softcap, _has_alibi),
    ),
    fault(
        "softcap_over_mask",
        "the soft cap is applied after the mask, so hidden keys of the sequence get the score -softcap",
        "onnx/onnx #7865, flashinfer #350",
        _over_mask,
        _has_softcap,
    ),
)


# Defects of the attention sink, one more logit in each row's softmax that has no value.

_SEGMENTS, _TILE = 16, 16  # of the 3d path of unified_attention, as vLLM calls it (0.11.2, 0.33.0)


def _has_sinks(problem: Problem) -> bool:
    return problem.call.sinks is not None


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


def _capped(at: Rows, sinks: torch.Tensor) -> torch.Tensor:
    softcap = at.call.softcap
    return sinks if softcap is None else softcap * (sinks / softcap).tanh()


SINKS = family(
    "sinks",
    fault(
        "sink_ignored",
        "softmax does not include the attention sink",
        "vllm-metal #550, kekzl/imp #1345, sglang #11634",
        lambda at: at.change(sinks=None),
        _has_sinks,
    ),
    fault(
        "sink_counted_twice",
        "softmax includes the attention sink twice",
        "rocm-libraries #12227, rocm-libraries #12229",
        lambda at: at.sink(lambda sinks: sinks[at.heads] + math.log(2.0)),
        _has_sinks,
    ),
    fault(
        "sink_per_split",
        "every split of a sequence adds the attention sink, instead of one split only",
        "rocm-libraries #12227, vllm-metal #550",
        # n · exp(s) = exp(s + log n)
        lambda at: at.sink(
            lambda sinks: sinks[at.heads] + math.log(splits(at.problem, at.slice.seq))
        ),
        _has_sinks,
        lambda problem: any(splits(problem, seq) > 1 for seq in range(problem.num_seqs)),
    ),
    fault(
        "sink_first_head",
        "every query head uses the attention sink of head 0",
        "sglang #35092",
        lambda at: at.sink(lambda sinks: sinks[torch.zeros_like(at.heads)]),
        *(_has_sinks, has_several_heads),
    ),
    fault(
        "sink_next_head",
        "each query head uses the attention sink of the next head",
        "sglang #35092",
        lambda at: at.sink(lambda sinks: sinks[_next_heads(at)]),
        *(_has_sinks, has_several_heads),
    ),
    fault(
        "sink_kv_head",
        "query head h uses the attention sink with the index of its KV head, h // num_queries_per_kv",
        "Dao-AILab/flash-attention #2752",
        lambda at: at.sink(lambda sinks: sinks[at.kv]),
        *(_has_sinks, has_head_groups),
    ),
    fault(
        "sink_scaled",
        "the attention sink is multiplied by the scale of the scores",
        "rocm-libraries #12227, sglang #38142",
        lambda at: at.sink(lambda sinks: sinks[at.heads] * at.problem.sm_scale),
        _has_sinks,
        lambda problem: not math.isclose(problem.sm_scale, 1.0),
    ),
    fault(
        "sink_base_2",
        "a kernel that computes softmax with exp2 does not convert the attention sink to base 2",
        "rocm-libraries #12227, TensorRT-LLM #5521",
        lambda at: at.sink(lambda sinks: sinks[at.heads] * math.log(2.0)),
        _has_sinks,
    ),
    fault(
        "sink_capped",
        "the soft cap is also applied to the attention sink",
        "rocm-libraries #12229",
        lambda at: at.sink(lambda sinks: _capped(at, sinks[at.heads])),
        *(_has_sinks, _has_softcap),
    ),
    fault(
        "sink_beside_alibi",
        "ALiBi distances are counted from the sequence's first new token instead of from each row's "
        "query; softmax cancels the difference, unless there is an attention sink",
        "vllm #945",
        lambda at: at.change(alibi_shift=at.slice.tokens[:, None]),
        *(_has_sinks, _has_alibi),
        lambda problem: bool((problem.call.query_lens > 1).any()),
    ),
    fault(
        "sink_on_first_key",
        "the attention sink is added to the score of the sequence's first key",
        "vllm #49815",
        lambda at: at.change(sinks=None, first_bias=at.inputs.sinks),
        _has_sinks,
    ),
)
