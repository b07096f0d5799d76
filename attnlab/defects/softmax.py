"""Defects of the softmax itself: tiles and parts that are not brought to one maximum, or count twice.

A kernel reads the keys in tiles and keeps a running maximum. When a tile raises it from a to b, the sum and
the accumulator so far are multiplied by exp(a - b). Where the context comes from the cache and new tokens
from the arguments, tiles do not cross the border between them.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.masks import hide, key_positions
from attnlab.defects.problem import (
    Applies,
    AttentionInputs,
    Compute,
    Defect,
    Predicted,
    Problem,
    RowSlice,
    always,
    changing_inputs,
    score_error,
    scores_of,
    softmax,
)

TILES = (16, 32, 64, 128)  # tile sizes of vLLM's kernels
_SEGMENTS, _SEGMENT_TILE = 16, 16  # of the 3d path of unified_attention (vLLM 0.11.2, 0.33.0)
# From scores [heads, rows, keys], the index of each key's part [keys] and sinks, the weights of the keys.
Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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
    count = int(part.max()) + 1
    maxima = torch.full((*scores.shape[:2], count), -torch.inf, dtype=scores.dtype)
    maxima.scatter_reduce_(2, part.expand_as(scores), scores, "amax")
    if sinks is not None:
        maxima[..., 0] = torch.maximum(maxima[..., 0], sinks.to(scores.dtype)[:, None])
    return maxima


def _exp(scores: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - maximum), 0 for keys that a row does not see."""
    return (scores - maximum.clamp(min=-1e30)).exp()


def _sink_term(sinks: torch.Tensor | None, maximum: torch.Tensor) -> torch.Tensor | float:
    """Return what the sinks add to the sum; ``maximum``: [heads, rows, 1]."""
    return 0.0 if sinks is None else (sinks.to(maximum.dtype)[:, None, None] - maximum).exp()


def _running(
    scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each key's running maximum when its tile is added, and the last one, [heads, rows, 1]."""
    running = _maxima(scores, part, sinks).cummax(2).values
    return running.gather(2, part.expand_as(scores)), running[..., -1:]


def _stale_accumulator(
    scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    own, last = _running(scores, part, sinks)
    total = _exp(scores, last).sum(-1, keepdim=True) + _sink_term(sinks, last)
    return _exp(scores, own) / total


def _stale_sum(
    scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    own, last = _running(scores, part, sinks)
    total = _exp(scores, own).sum(-1, keepdim=True)
    total = total + (0.0 if sinks is None else 1.0)  # the sink was the maximum when it was added
    return _exp(scores, last) / total


def _rescaled_in_base_2(
    scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    own, last = _running(scores, part, sinks)
    weights = _exp(scores, own) * (own.clamp(min=-1e30) - last).exp2()
    term: torch.Tensor | float = 0.0
    if sinks is not None:
        term = (sinks.to(scores.dtype)[:, None, None] - last).exp2()
    return weights / (weights.sum(-1, keepdim=True) + term)


def _short_part_not_rescaled(
    scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Keep the last part at its own maximum if it is shorter than the first."""
    maxima = _maxima(scores, part, sinks)
    maximum = maxima.amax(2, keepdim=True)
    lengths = part.bincount()
    if len(lengths) < 2 or lengths[-1] >= lengths[0]:
        return _exp(scores, maximum) / (
            _exp(scores, maximum).sum(-1, keepdim=True) + _sink_term(sinks, maximum)
        )
    is_last = part == part.max()
    weights = torch.where(is_last, _exp(scores, maxima[..., -1:]), _exp(scores, maximum))
    return weights / (weights.sum(-1, keepdim=True) + _sink_term(sinks, maximum))


def _merged(weight: Callable[[torch.Tensor], torch.Tensor]) -> Weigh:
    """Return the weights if the log-sum-exp of the parts, [heads, rows, parts], are turned into weights
    of the parts by ``weight``."""

    def weigh(scores: torch.Tensor, part: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        maxima = _maxima(scores, part, sinks).clamp(min=-1e30)
        own = maxima.gather(2, part.expand_as(scores))
        sums = torch.zeros_like(maxima).scatter_add_(2, part.expand_as(scores), _exp(scores, own))
        if sinks is not None:
            sums[..., 0] += (sinks.to(scores.dtype)[:, None] - maxima[..., 0]).exp()
        of_part = weight(sums.log() + maxima)
        inside = _exp(scores, own) / sums.gather(2, part.expand_as(scores)).clamp(min=1e-300)
        return inside * of_part.gather(2, part.expand_as(scores))

    return weigh


def _exchanged(log_sums: torch.Tensor) -> torch.Tensor:
    """Return the weights of the parts in reverse order."""
    return log_sums.softmax(-1).flip(-1)


def _in_base_2(log_sums: torch.Tensor) -> torch.Tensor:
    """Return the weights of the parts if their logarithms are to base 2 and taken for natural ones."""
    return (log_sums / math.log(2)).softmax(-1)


def _by_tiles(weigh: Weigh, size: int) -> Compute:
    """Return the ``compute`` of other weights, given tiles of ``size``."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        part = tile_index(problem, row_slice.seq, size)
        weights = lambda scores: weigh(scores, part, inputs.sinks)  # noqa: E731
        return dataclasses.replace(inputs, weigh=weights)

    return changing_inputs(change)


def _by_parts(weigh: Weigh) -> Compute:
    """Return the ``compute`` of other weights, given the parts whose results are merged."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        part = part_index(problem, row_slice.seq)
        if int(part.max()) == 0:
            return inputs
        weights = lambda scores: weigh(scores, part, inputs.sinks)  # noqa: E731
        return dataclasses.replace(inputs, weigh=weights)

    return changing_inputs(change)


def _has_parts(problem: Problem) -> bool:
    return any(int(part_index(problem, seq).max()) > 0 for seq in range(problem.num_seqs))


def _has_short_part(problem: Problem) -> bool:
    counts = [part_index(problem, seq).bincount() for seq in range(problem.num_seqs)]
    return any(len(count) > 1 and count[-1] < count[0] for count in counts)


def _tiled(name: str, text: str, seen_in: tuple[str, ...], weigh: Weigh) -> Defect:
    """Return a defect of tiles, with a variant for each tile size."""
    variants = tuple((f"with tiles of {size}", _by_tiles(weigh, size)) for size in TILES)
    return Defect(
        name=name,
        family="softmax",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=variants[0][1],
        applies=lambda problem: any(problem.seq_len(s) > TILES[0] for s in range(problem.num_seqs)),
        variants=variants,
    )


def _parted(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    weigh: Weigh,
    applies: Applies = _has_parts,
) -> Defect:
    return Defect(
        name=name,
        family="softmax",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=_by_parts(weigh),
        applies=applies,
    )


def _twice(size: int, which: str) -> Compute:
    """Return the ``compute`` of the "first" or "last" tile of cached keys counted twice."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        keys, cached = torch.arange(inputs.key.shape[0]), problem.cached_len(row_slice.seq)
        start = (cached - 1) // size * size if which == "last" else 0
        is_twice = (keys >= start) & (keys < min(start + size, cached))
        bias = math.log(2) * is_twice.double()
        return dataclasses.replace(inputs, key_bias=bias)

    return changing_inputs(change)


_TWICE = tuple(
    (f"the {which} tile of {size}", _twice(size, which))
    for which in ("last", "first")
    for size in TILES
)


def _exp2(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    sinks = None if inputs.sinks is None else inputs.sinks * math.log(2)
    return dataclasses.replace(inputs, weigh=lambda scores: softmax(scores * math.log(2), sinks))


SOFTMAX = (
    _tiled(
        "accumulator_not_rescaled",
        "when a tile raises the maximum, the sum is rescaled but the accumulator is not",
        ("Dao-AILab/flash-attention #2082", "Dao-AILab/flash-attention #2083"),
        _stale_accumulator,
    ),
    _tiled(
        "sum_not_rescaled",
        "when a tile raises the maximum, the accumulator is rescaled but the sum is not",
        ("Dao-AILab/flash-attention #2082", "Dao-AILab/flash-attention #2083"),
        _stale_sum,
    ),
    _tiled(
        "rescale_in_base_2",
        "weights are computed with exp, but tiles are rescaled with exp2",
        ("sglang #40903",),
        _rescaled_in_base_2,
    ),
    Defect(
        name="exp2_for_exp",
        family="softmax",
        text="the softmax uses exp2 of scores that were not multiplied by log2(e)",
        seen_in=("sglang #40903", "vllm #52796"),
        touches="all",
        compute=changing_inputs(_exp2),
        applies=always,
    ),
    Defect(
        name="tile_counted_twice",
        family="softmax",
        text="the cached keys of one tile count twice",
        seen_in=("vllm-project/flash-attention #142",),
        touches="cached",
        compute=_TWICE[0][1],
        applies=lambda problem: any(problem.cached_len(seq) > 1 for seq in range(problem.num_seqs)),
        variants=_TWICE,
    ),
    _parted(
        "merge_weights_exchanged",
        "the merge gives each part the weight of the other (of several, in reverse order)",
        ("vllm #52796",),
        _merged(_exchanged),
    ),
    _parted(
        "merge_in_base_2",
        "the merge takes logarithms to base 2 of the parts' sums for natural ones",
        ("vllm #52796", "sglang #40903", "sglang #35045"),
        _merged(_in_base_2),
    ),
    _parted(
        "short_part_not_rescaled",
        "a last part that is shorter than the others keeps its own softmax maximum in the merge",
        ("flashinfer #58", "vllm-project/flash-attention #176"),
        _short_part_not_rescaled,
        _has_short_part,
    ),
)


# Defects in how the parts of a sequence's cached tokens are combined: partitions, and partial blocks.


def has_partial_block(problem: Problem) -> bool:
    """Answer whether the cached tokens of any sequence end within a block."""
    size = problem.call.block_size
    return any(problem.cached_len(seq) % size for seq in range(problem.num_seqs))


def _has_partitions(problem: Problem) -> bool:
    return any(problem.cached_len(seq) > PARTITION_SIZE for seq in range(problem.num_seqs))


def _last_partial_block_dropped(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    cached, size = problem.cached_len(row_slice.seq), problem.call.block_size
    keys = key_positions(inputs)
    return hide(inputs, (keys >= cached // size * size) & (keys < cached))


def _partition_dropped(which: str) -> Defect:
    """Return the defect of the "first" or "last" partition missing."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        cached = problem.cached_len(row_slice.seq)
        if cached <= PARTITION_SIZE:
            return inputs
        keys, last = key_positions(inputs), (cached - 1) // PARTITION_SIZE * PARTITION_SIZE
        in_last, in_first = (keys >= last) & (keys < cached), keys < PARTITION_SIZE
        return hide(inputs, in_last if which == "last" else in_first)

    return Defect(
        name=f"{which}_partition_dropped",
        family="partitions",
        text=f"the merge of partitions omits the {which} partition of {PARTITION_SIZE} cached tokens",
        seen_in=("ROCm/vllm #22", "flashinfer #50"),
        touches="cached",
        compute=changing_inputs(change),
        applies=_has_partitions,
        links=("short_scratch",),
    )


def _partitions_not_rescaled(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Merge partitions without the factor exp(maximum of the partition - maximum of all)."""
    inputs = problem.attention_inputs(row_slice)
    cached = problem.cached_len(row_slice.seq)
    if cached <= PARTITION_SIZE:
        return problem.predict(inputs)
    scores = scores_of(inputs)
    partition = key_positions(inputs).clamp(max=cached - 1) // PARTITION_SIZE
    weights, sink_sum = torch.zeros_like(scores), torch.zeros_like(scores[..., :1])
    sinks = None if inputs.sinks is None else inputs.sinks[:, None, None]
    for index in partition.unique().tolist():
        members = partition == index
        maximum = scores[..., members].amax(-1, keepdim=True).clamp(min=-1e30)
        if index == 0 and sinks is not None:  # the first partition includes the sink
            maximum = torch.maximum(maximum, sinks)
            sink_sum += (sinks - maximum).exp()
        weights[..., members] = (scores[..., members] - maximum).exp()
    weights /= weights.sum(-1, keepdim=True) + sink_sum
    value = inputs.value.transpose(0, 1)
    output = weights @ value
    bound = inputs.rounding.bound(weights, value, output, score_error(inputs))
    if problem.rounds_like_kernel:
        output = output.to(problem.call.query.dtype).double()
    return Predicted(output=output.transpose(0, 1), bound=bound.transpose(0, 1))


def _reversed_order(problem: Problem, row_slice: RowSlice) -> Predicted:
    """Compute the correct output with the keys in reverse order, in float32."""
    inputs = problem.attention_inputs(row_slice)
    if inputs.alibi_slopes is not None:  # ALiBi depends on the order of the keys
        return problem.predict(inputs)
    return problem.predict(
        dataclasses.replace(
            inputs,
            query=inputs.query.float(),
            key=inputs.key.flip(0).float(),
            value=inputs.value.flip(0).float(),
            visible=inputs.visible.flip(1),
            mask_bias=None if inputs.mask_bias is None else inputs.mask_bias.flip(1),
        )
    )


PARTITIONS = (
    Defect(
        name="last_partial_block_dropped",
        family="partitions",
        text="the cached tokens in the sequence's last, partly filled block are not attended to",
        seen_in=("vllm #39810",),
        touches="cached",
        compute=changing_inputs(_last_partial_block_dropped),
        applies=has_partial_block,
    ),
    _partition_dropped("last"),
    _partition_dropped("first"),
    Defect(
        name="partitions_not_rescaled",
        family="partitions",
        text="partial results are merged without rescaling them to a common softmax maximum",
        seen_in=("vllm-project/flash-attention #176", "flashinfer #58"),
        touches="cached",
        compute=_partitions_not_rescaled,
        applies=_has_partitions,
    ),
    Defect(
        name="accumulation_order",
        family="partitions",
        text="keys are accumulated in another order, which changes only the rounding",
        seen_in=("vllm #39146",),
        touches="all",
        compute=_reversed_order,
        applies=always,
        harmless=True,
    ),
)
