"""Defects in how the parts of a sequence's cached tokens are combined: partitions, and partial blocks."""

import dataclasses

import torch

from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.attention_inputs import AttentionInputs, Predicted, score_error, scores_of
from attnlab.defects.defect import Defect, always, changing_inputs
from attnlab.defects.masks import hide, key_positions
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice


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
