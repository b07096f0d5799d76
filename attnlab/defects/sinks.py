"""Defects of the attention sink, one more logit in each row's softmax that has no value."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, always, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice

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
