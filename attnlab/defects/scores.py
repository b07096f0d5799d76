"""Defects in the scores: scale, ALiBi, soft cap and attention sinks."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import CPU_ATTENTION, UNIFIED
from attnlab.defects.edit import (
    TILES,
    Defect,
    Rows,
    any_seq,
    family,
    fault,
    given,
    has_cached,
    has_head_groups,
    has_partial_block,
    has_several_heads,
)
from attnlab.kernels.model import capped
from attnlab.lab.problem import AttentionInputs, Problem, softmax


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


_has_alibi, _has_softcap, _has_sinks = map(given, ("alibi_slopes", "softcap", "sinks"))


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
        lambda at: at.slope(lambda slopes: -slopes[at.heads]),
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
        lambda at: at.slope(lambda slopes: slopes[at.next_heads]),
        _has_alibi,
    ),
    fault(
        "alibi_kv_head",
        "query head h uses the ALiBi slope with the index of its KV head, h // num_queries_per_kv",
        "vllm #57614",
        lambda at: at.slope(lambda slopes: slopes[at.kv]),
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


def equal_parts(length: int, count: int, multiple: int) -> range:
    """Return where the parts of a sequence begin: at most ``count`` parts of equally many keys, a multiple of
    ``multiple``; 0 for parts of so many keys."""
    return range(0, length, -(-length // (count * multiple)) * multiple if count else multiple)


def splits(problem: Problem, seq: int) -> int:
    """Return into how many parts a sequence is split, each with its own softmax sum, before the merge.

    unified_attention splits a batch of decodes into segments of whole tiles of 16 tokens, an op whose record
    has one number of parts into as many. Every other kernel is assumed to split its cached tokens as ROCm's
    does, in partitions, of 256 if its record has none.
    """
    call, op = problem.call, problem.call.spec
    counts = op.split_counts(call.num_splits) if op.splits_decodes else ()
    if len(counts) == 1:
        step = op.split_step or call.block_size
        return len(equal_parts(problem.seq_len(seq), counts[0], step))
    if call.op != UNIFIED:
        return max(1, len(equal_parts(problem.cached_len(seq), 0, problem.partition_size)))
    if call.max_query_len > 1:
        return 1
    most = _SEGMENTS if call.num_splits is None else max(1, call.num_splits)
    return len(equal_parts(problem.seq_len(seq), most, _TILE))


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
        any_seq(lambda problem, seq: splits(problem, seq) > 1),
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
        lambda at: at.sink(lambda sinks: sinks[at.next_heads]),
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
        lambda at: at.sink(lambda sinks: capped(sinks[at.heads], at.call.softcap, False)),
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


# Defects of the softmax itself: tiles and parts that are not brought to one maximum, or count twice.
#
# A kernel reads the keys in tiles and keeps a running maximum. When a tile raises it from a to b, the sum and
# the accumulator so far are multiplied by exp(a - b). Where the context comes from the cache and new tokens
# from the arguments, tiles do not cross the border between them.

_LN_2 = math.log(2)
_Power = float | torch.Tensor


def part_index(problem: Problem, seq: int) -> torch.Tensor:
    """Return the part of each key whose results are merged: segment, partition, or context and new."""
    keys, cached = torch.arange(problem.seq_len(seq)), problem.cached_len(seq)
    if cached < len(keys):
        return (keys >= cached).long()
    if problem.call.op == UNIFIED:
        tiles = -(-len(keys) // _TILE)
        return keys // (-(-tiles // _SEGMENTS) * _TILE)
    return keys // problem.partition_size


def _maxima(scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the maximum of each part, [heads, rows, parts]; the first part includes the sinks."""
    maxima = torch.full((*scores.shape[:2], int(part.max()) + 1), -torch.inf, dtype=scores.dtype)
    maxima.scatter_reduce_(2, part.expand_as(scores), scores, "amax")
    if sinks is not None:
        maxima[..., 0] = torch.maximum(maxima[..., 0], sinks.to(scores.dtype)[:, None])
    return maxima.clamp(min=-1e30)


def _rescaled(
    at: Rows, part: torch.Tensor, values: _Power = 1.0, sums: _Power = 1.0, split: bool = False
) -> AttentionInputs:
    """Return inputs whose partial sums of ``values`` and of weights are rescaled by the power of a factor.

    The factor is exp(maximum of the part - last maximum); the power 1 is right, 0 does not rescale.
    ``part``: [keys]; powers are one number, or [parts]. ``split``: each part has its own maximum, else it
    has the running maximum, which begins with the sink.
    """
    sinks = at.inputs.sinks

    def weigh(scores: torch.Tensor) -> torch.Tensor:
        maxima = _maxima(scores, part, sinks)
        last = maxima.amax(2, keepdim=True)
        own = (maxima if split else maxima.cummax(2).values)[..., part]

        def terms(
            power: _Power, of: torch.Tensor, top: torch.Tensor, parts: torch.Tensor
        ) -> torch.Tensor:
            powers = torch.as_tensor(power, dtype=scores.dtype).expand(maxima.shape[2])[parts]
            return (of - top).exp() * (powers * (top - last)).exp()

        total = terms(sums, scores, own, part).sum(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.to(scores.dtype)[:, None, None].expand_as(last)
            total = total + terms(sums, sink, maxima[..., :1] if split else sink, part[:1])
        return terms(values, scores, own, part) / total

    return at.change(weigh=weigh)


def _tiles(at: Rows, size: int, values: float, sums: float) -> AttentionInputs:
    new = -(-at.cached // size) + (at.keys - at.cached) // size
    return _rescaled(at, torch.where(at.keys < at.cached, at.keys // size, new), values, sums)


def _short_part(at: Rows) -> AttentionInputs:
    """Keep the last part at its own maximum if it is shorter than the first."""
    part = part_index(at.problem, at.slice.seq)
    power = torch.ones(int(part.max()) + 1)
    power[-1] = 0.0 if _has_short_part(at.problem, at.slice.seq) else 1.0
    return _rescaled(at, part, power, power, split=True)


def _partitions(at: Rows) -> AttentionInputs:
    """Merge partitions without the factor exp(maximum of the partition - maximum of all)."""
    part = at.keys.clamp(max=at.cached - 1) // at.problem.partition_size
    if at.cached <= at.problem.partition_size:
        return at.inputs
    return _rescaled(at, part, 0.0, 0.0, split=True)


def _merged(at: Rows, weight: Callable[[torch.Tensor], torch.Tensor]) -> AttentionInputs:
    """Return inputs with parts whose log-sum-exp, [heads, rows, parts], ``weight`` turns into weights."""
    part, sinks = part_index(at.problem, at.slice.seq), at.inputs.sinks
    if int(part.max()) == 0:
        return at.inputs

    def weigh(scores: torch.Tensor) -> torch.Tensor:
        maxima = _maxima(scores, part, sinks)
        exps = (scores - maxima[..., part]).exp()
        sums = torch.zeros_like(maxima).scatter_add_(2, part.expand_as(scores), exps)
        if sinks is not None:
            sums[..., 0] += (sinks.to(scores.dtype)[:, None] - maxima[..., 0]).exp()
        of_part = weight(sums.log() + maxima)
        return exps / sums[..., part].clamp(min=1e-300) * of_part[..., part]

    return at.change(weigh=weigh)


def _has_short_part(problem: Problem, seq: int) -> bool:
    lengths = part_index(problem, seq).bincount()
    return len(lengths) > 1 and bool(lengths[-1] < lengths[0])


_has_parts = any_seq(lambda problem, seq: int(part_index(problem, seq).max()) > 0)


def _has_tiles(problem: Problem) -> bool:
    return bool((problem.call.seq_lens > TILES[0]).any())


def _twice(at: Rows, tile: tuple[str, int]) -> AttentionInputs:
    """Count the "first" or "last" tile of cached keys twice."""
    which, size = tile
    start = (at.cached - 1) // size * size if which == "last" else 0
    is_twice = (at.keys >= start) & (at.keys < min(start + size, at.cached))
    return at.change(key_bias=_LN_2 * is_twice.double())


def _exp2(at: Rows) -> AttentionInputs:
    sinks = None if at.inputs.sinks is None else at.inputs.sinks * _LN_2
    return at.change(weigh=lambda scores: softmax(scores * _LN_2, sinks))


_SIZES = {f"with tiles of {size}": size for size in TILES}

SOFTMAX = family(
    "softmax",
    fault(
        "accumulator_not_rescaled",
        "when a tile raises the maximum, the sum is rescaled but the accumulator is not",
        "Dao-AILab/flash-attention #2082, Dao-AILab/flash-attention #2083",
        lambda at, size: _tiles(at, size, values=0.0, sums=1.0),
        _has_tiles,
        variants=_SIZES,
    ),
    fault(
        "sum_not_rescaled",
        "when a tile raises the maximum, the accumulator is rescaled but the sum is not",
        "Dao-AILab/flash-attention #2082, Dao-AILab/flash-attention #2083",
        lambda at, size: _tiles(at, size, values=1.0, sums=0.0),
        _has_tiles,
        variants=_SIZES,
    ),
    fault(
        "rescale_in_base_2",
        "weights are computed with exp, but tiles are rescaled with exp2",
        "sglang #40903",
        lambda at, size: _tiles(at, size, values=_LN_2, sums=_LN_2),
        _has_tiles,
        variants=_SIZES,
    ),
    fault(
        "exp2_for_exp",
        "the softmax uses exp2 of scores that were not multiplied by log2(e)",
        "sglang #40903, vllm #52796",
        _exp2,
    ),
    fault(
        "tile_counted_twice",
        "the cached keys of one tile count twice",
        "vllm-project/flash-attention #142",
        _twice,
        has_cached(1),
        touches="cached",
        variants={
            f"the {which} tile of {size}": (which, size)
            for which in ("last", "first")
            for size in TILES
        },
    ),
    fault(
        "merge_weights_exchanged",
        "the merge gives each part the weight of the other (of several, in reverse order)",
        "vllm #52796",
        lambda at: _merged(at, lambda log_sums: log_sums.softmax(-1).flip(-1)),
        _has_parts,
    ),
    fault(
        "merge_in_base_2",
        "the merge takes logarithms to base 2 of the parts' sums for natural ones",
        "vllm #52796, sglang #40903, sglang #35045",
        lambda at: _merged(at, lambda log_sums: (log_sums / _LN_2).softmax(-1)),
        _has_parts,
    ),
    fault(
        "short_part_not_rescaled",
        "a last part that is shorter than the others keeps its own softmax maximum in the merge",
        "flashinfer #58, vllm-project/flash-attention #176",
        _short_part,
        any_seq(_has_short_part),
    ),
)


# Defects in how the parts of a sequence's cached tokens are combined: partitions, and partial blocks.


def _has_partitions(problem: Problem) -> bool:
    """Answer whether the cached tokens of a sequence fill more than one partition."""
    return has_cached(problem.partition_size)(problem)


def _last_partial_block_dropped(at: Rows) -> AttentionInputs:
    start = at.cached // at.call.block_size * at.call.block_size
    return at.hide((at.keys >= start) & (at.keys < at.cached))


def _partition_dropped(at: Rows, which: str) -> AttentionInputs:
    """Drop the "first" or "last" partition."""
    size = at.problem.partition_size
    if at.cached <= size:
        return at.inputs
    last = (at.cached - 1) // size * size
    is_last = (at.keys >= last) & (at.keys < at.cached)
    return at.hide(is_last if which == "last" else at.keys < size)


def _reversed_order(at: Rows) -> AttentionInputs:
    """Return the keys in reverse order, in float32."""
    inputs = at.inputs
    if inputs.alibi_slopes is not None:  # ALiBi depends on the order of the keys
        return inputs
    return at.change(
        query=inputs.query.float(),
        key=inputs.key.flip(0).float(),
        value=inputs.value.flip(0).float(),
        visible=inputs.visible.flip(1),
        mask_bias=None if inputs.mask_bias is None else inputs.mask_bias.flip(1),
    )


PARTITIONS = family(
    "partitions",
    fault(
        "last_partial_block_dropped",
        "the cached tokens in the sequence's last, partly filled block are not attended to",
        "vllm #39810",
        _last_partial_block_dropped,
        has_partial_block,
        touches="cached",
    ),
    *(
        fault(
            f"{which}_partition_dropped",
            f"the merge of partitions omits the {which} partition of the cached tokens",
            "ROCm/vllm #22, flashinfer #50",
            lambda at, which=which: _partition_dropped(at, which),
            _has_partitions,
            touches="cached",
            links=("short_scratch",),
        )
        for which in ("last", "first")
    ),
    fault(
        "partitions_not_rescaled",
        "partial results are merged without rescaling them to a common softmax maximum",
        "vllm-project/flash-attention #176, flashinfer #58",
        _partitions,
        _has_partitions,
        touches="cached",
    ),
    fault(
        "accumulation_order",
        "keys are accumulated in another order, which changes only the rounding",
        "vllm #39146",
        _reversed_order,
        harmless=True,
    ),
)
