"""Defects in which tokens are attended to: context, new tokens, and slots after the last cached token."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, always, changing_inputs
from attnlab.defects.masks import hide, key_positions
from attnlab.defects.partitions import has_partial_block
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.cache import freed_blocks


def _ctx_len(problem: Problem, seq: int) -> int:
    return problem.seq_len(seq) - problem.query_len(seq)


def _context_only(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return hide(inputs, key_positions(inputs) >= _ctx_len(problem, row_slice.seq))


def _new_tokens_only(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return hide(inputs, key_positions(inputs) < _ctx_len(problem, row_slice.seq))


def _tail_attended(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Append the slots after the sequence's last cached token, up to the end of the block."""
    cached, size = problem.cached_len(row_slice.seq), problem.call.block_size
    tail = torch.arange(cached, -(-cached // size) * size)
    cache_read, kv = problem.cache_read(row_slice.seq), problem.kv_heads_of(row_slice.heads)
    key = cache_read.keys(problem.call, tail, kv)
    value = cache_read.values(problem.call, tail, kv)
    is_visible = torch.ones(len(row_slice.tokens), len(tail), dtype=torch.bool)
    return dataclasses.replace(
        inputs,
        key=torch.cat([inputs.key, key]),
        value=torch.cat([inputs.value, value]),
        visible=torch.cat([inputs.visible, is_visible], 1),
    )


def _tail_leaked(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    """Multiply the values after the last cached token by weights of 0; 0 · NaN is NaN."""
    with_tail = _tail_attended(problem, row_slice, inputs)
    in_tail = torch.arange(with_tail.key.shape[0]) >= inputs.key.shape[0]
    return dataclasses.replace(
        with_tail,
        key=with_tail.key.masked_fill(in_tail[:, None, None], 0.0),
        visible=with_tail.visible & ~in_tail,
        leak=in_tail.expand_as(with_tail.visible),
    )


def _freed_leaked(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Multiply the values of freed blocks by weights of 0; 0 · NaN is NaN."""
    count = _freed_keys(problem, row_slice.seq)
    if not count:
        return inputs
    freed, value = torch.arange(count), inputs.value.clone()
    kv = problem.kv_heads_of(row_slice.heads)
    value[freed] = problem.cache_read(row_slice.seq).values(problem.call, freed, kv)
    is_freed = torch.arange(inputs.key.shape[0]) < count
    return dataclasses.replace(
        inputs, value=value, leak=(is_freed & ~inputs.visible).expand_as(inputs.visible)
    )


def _freed_keys(problem: Problem, seq: int) -> int:
    """Return how many keys of a sequence were in blocks that the window has freed and that are empty."""
    case = problem.case
    if case is None or case.freed != "empty":
        return 0
    return freed_blocks(case)[seq] * case.block_size


TOKENS = (
    Defect(
        name="context_only",
        family="tokens",
        text="rows attend to the context but not to the new tokens",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=changing_inputs(_context_only),
        applies=always,
    ),
    Defect(
        name="new_tokens_only",
        family="tokens",
        text="rows attend to the new tokens but not to the context",
        seen_in=("nano-vllm #213",),
        touches="all",
        compute=changing_inputs(_new_tokens_only),
        applies=lambda problem: any(_ctx_len(problem, seq) > 0 for seq in range(problem.num_seqs)),
    ),
    Defect(
        name="tail_attended",
        family="tokens",
        text="rows attend to the slots after the sequence's last cached token, up to the end of the block",
        seen_in=("nano-vllm #213", "torch-spyre #4517"),
        touches="cached",
        compute=changing_inputs(_tail_attended),
        applies=has_partial_block,
    ),
    Defect(
        name="tail_leaked",
        family="tokens",
        text="values after the sequence's last cached token are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        seen_in=("vllm #641", "vllm #53856", "Dao-AILab/flash-attention #1745", "flashinfer #941"),
        touches="cached",
        compute=changing_inputs(_tail_leaked),
        applies=has_partial_block,
    ),
    Defect(
        name="freed_leaked",
        family="tokens",
        text="values in blocks that the window has freed are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        seen_in=("vllm #641", "vllm #53856"),
        touches="cached",
        compute=changing_inputs(_freed_leaked),
        applies=lambda problem: any(_freed_keys(problem, seq) for seq in range(problem.num_seqs)),
    ),
)
