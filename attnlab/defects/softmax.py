"""Defects of the softmax itself: tiles and parts that are not brought to one maximum, or count twice.

A kernel reads the keys in tiles and keeps a running maximum. When a tile raises it from a to b, the sum and
the accumulator so far are multiplied by exp(a - b). Where the context comes from the cache and new tokens
from the arguments, tiles do not cross the border between them.
"""

import math
from collections.abc import Callable

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.edit import TILES, Rows, family, fault, has_cached, has_partial_block
from attnlab.lab.problem import AttentionInputs, Problem, softmax

_SEGMENTS, _SEGMENT_TILE = 16, 16  # of the 3d path of unified_attention (vLLM 0.11.2, 0.33.0)
_LN_2 = math.log(2)
_Power = float | torch.Tensor


def tile_index(problem: Problem, seq: int, size: int) -> torch.Tensor:
    """Return the tile of each key of a sequence, [seq_len] int64."""
    keys, cached = torch.arange(problem.seq_len(seq)), problem.cached_len(seq)
    return torch.where(keys < cached, keys // size, -(-cached // size) + (keys - cached) // size)


def part_index(problem: Problem, seq: int) -> torch.Tensor:
    """Return the part of each key whose results are merged: segment, partition, or context and new."""
    keys, cached = torch.arange(problem.seq_len(seq)), problem.cached_len(seq)
    if cached < len(keys):
        return (keys >= cached).long()
    if problem.call.op == UNIFIED:
        tiles = -(-len(keys) // _SEGMENT_TILE)
        return keys // (-(-tiles // _SEGMENTS) * _SEGMENT_TILE)
    return keys // PARTITION_SIZE


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

    return at.weigh(weigh)


def _tiles(at: Rows, size: int, values: float, sums: float) -> AttentionInputs:
    return _rescaled(at, tile_index(at.problem, at.slice.seq, size), values, sums)


def _short_part(at: Rows) -> AttentionInputs:
    """Keep the last part at its own maximum if it is shorter than the first."""
    part = part_index(at.problem, at.slice.seq)
    lengths = part.bincount()
    power = torch.ones(len(lengths))
    power[-1] = 0.0 if lengths[-1] < lengths[0] else 1.0
    return _rescaled(at, part, power, power, split=True)


def _partitions(at: Rows) -> AttentionInputs:
    """Merge partitions without the factor exp(maximum of the partition - maximum of all)."""
    if at.cached <= PARTITION_SIZE:
        return at.inputs
    part = at.keys.clamp(max=at.cached - 1) // PARTITION_SIZE
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

    return at.weigh(weigh)


def _has_parts(problem: Problem) -> bool:
    return any(int(part_index(problem, seq).max()) > 0 for seq in range(problem.num_seqs))


def _has_short_part(problem: Problem) -> bool:
    counts = [part_index(problem, seq).bincount() for seq in range(problem.num_seqs)]
    return any(len(count) > 1 and count[-1] < count[0] for count in counts)


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
    return at.weigh(lambda scores: softmax(scores * _LN_2, sinks))


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
        _has_short_part,
    ),
)


# Defects in how the parts of a sequence's cached tokens are combined: partitions, and partial blocks.


def _last_partial_block_dropped(at: Rows) -> AttentionInputs:
    start = at.cached // at.call.block_size * at.call.block_size
    return at.hide((at.keys >= start) & (at.keys < at.cached))


def _partition_dropped(at: Rows, which: str) -> AttentionInputs:
    """Drop the "first" or "last" partition."""
    if at.cached <= PARTITION_SIZE:
        return at.inputs
    last = (at.cached - 1) // PARTITION_SIZE * PARTITION_SIZE
    is_last = (at.keys >= last) & (at.keys < at.cached)
    return at.hide(is_last if which == "last" else at.keys < PARTITION_SIZE)


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
            f"the merge of partitions omits the {which} partition of {PARTITION_SIZE} cached tokens",
            "ROCm/vllm #22, flashinfer #50",
            lambda at, which=which: _partition_dropped(at, which),
            has_cached(PARTITION_SIZE),
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
        has_cached(PARTITION_SIZE),
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
