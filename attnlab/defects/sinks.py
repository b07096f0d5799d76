"""Defects of the attention sink: one more logit of each row's softmax, which counts once and has no
value."""

import dataclasses
import math
from collections.abc import Callable

import torch

from attnlab.case.ops import UNIFIED
from attnlab.contracts.contract import PARTITION_SIZE
from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Defect, by_sight
from attnlab.defects.problem import Problem, RowSlice

_SEGMENTS, _TILE = 16, 16  # of the 3d path of unified_attention, as vLLM calls it (0.11.2, 0.33.0)


def _has_sinks(problem: Problem) -> bool:
    return problem.call.sinks is not None


def _sink(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    logits: Callable[[Problem, RowSlice, torch.Tensor], torch.Tensor | None],
    applies: Callable[[Problem], bool] = lambda problem: True,
) -> Defect:
    """Return the defect of other sinks: ``logits`` gives those of a spot's heads from those of all
    heads, [num_heads] float64, or None."""

    def change(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
        sinks = problem.call.sinks
        if sinks is None:
            return sight
        return dataclasses.replace(sight, sinks=logits(problem, row_slice, sinks.double()))

    return Defect(
        name=name,
        family="sinks",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=by_sight(change),
        applies=lambda problem: _has_sinks(problem) and applies(problem),
    )


def splits(problem: Problem, seq: int) -> int:
    """Return into how many pieces a sequence is cut that are merged afterwards.

    unified_attention cuts a batch of decodes into segments of whole tiles of 16 tokens; any other kernel
    is taken to cut what it reads from the cache as ROCm's does, every 256 tokens.
    """
    call = problem.call
    if call.op != UNIFIED:
        return max(1, -(-problem.cached_len(seq) // PARTITION_SIZE))
    if call.max_query_len > 1:
        return 1
    most = _SEGMENTS if call.num_splits is None else max(1, call.num_splits)
    tiles = -(-problem.seq_len(seq) // _TILE)
    return -(-tiles // -(-tiles // most))


def _per_split(problem: Problem, row_slice: RowSlice, sinks: torch.Tensor) -> torch.Tensor:
    """Return logits that count as often as there are pieces: n·exp(s) is exp(s + log n)."""
    return sinks[row_slice.heads] + math.log(splits(problem, row_slice.seq))


def _capped(problem: Problem, sinks: torch.Tensor) -> torch.Tensor:
    softcap = problem.call.softcap
    return sinks if softcap is None else softcap * (sinks / softcap).tanh()


def _on_first_key(problem: Problem, row_slice: RowSlice, sight: AttentionInputs) -> AttentionInputs:
    if problem.call.sinks is None:
        return sight
    sinks = problem.call.sinks[row_slice.heads].double()
    return dataclasses.replace(sight, sinks=None, first_bias=sinks)


def _from_first_new_token(
    problem: Problem, row_slice: RowSlice, sight: AttentionInputs
) -> AttentionInputs:
    return dataclasses.replace(sight, shift=row_slice.tokens[:, None])


def _several_heads(problem: Problem) -> bool:
    return problem.num_heads > 1


SINKS = (
    _sink(
        "sink_ignored",
        "the attention sink is left out of the sum",
        ("vllm-metal #550", "kekzl/imp #1345", "sglang #11634"),
        lambda problem, row_slice, sinks: None,
    ),
    _sink(
        "sink_counted_twice",
        "the attention sink is counted twice",
        ("rocm-libraries #12227", "rocm-libraries #12229"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] + math.log(2.0),
    ),
    _sink(
        "sink_per_split",
        "every piece of a sequence that is cut counts the attention sink",
        ("rocm-libraries #12227", "vllm-metal #550"),
        _per_split,
        lambda problem: any(splits(problem, seq) > 1 for seq in range(problem.num_seqs)),
    ),
    _sink(
        "sink_first_head",
        "every query head takes the attention sink of head 0",
        ("sglang #35092",),
        lambda problem, row_slice, sinks: sinks[torch.zeros_like(row_slice.heads)],
        _several_heads,
    ),
    _sink(
        "sink_next_head",
        "a query head takes the attention sink of the next head",
        ("sglang #35092",),
        lambda problem, row_slice, sinks: sinks[(row_slice.heads + 1) % len(sinks)],
        _several_heads,
    ),
    _sink(
        "sink_kv_head",
        "a query head takes the attention sink by the number of its KV head",
        ("Dao-AILab/flash-attention #2752",),
        lambda problem, row_slice, sinks: sinks[problem.kv_of(row_slice.heads)],
        lambda problem: problem.call.num_queries_per_kv > 1,
    ),
    _sink(
        "sink_scaled",
        "the attention sink is multiplied by the scale of the scores",
        ("rocm-libraries #12227", "sglang #38142"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] * problem.scale,
        lambda problem: not math.isclose(problem.scale, 1.0),
    ),
    _sink(
        "sink_base_2",
        "the attention sink is taken for a logarithm to base 2, as the scores of a kernel with exp2 are",
        ("rocm-libraries #12227", "TensorRT-LLM #5521"),
        lambda problem, row_slice, sinks: sinks[row_slice.heads] * math.log(2.0),
    ),
    _sink(
        "sink_capped",
        "the attention sink goes through the soft cap, as a score does",
        ("rocm-libraries #12229",),
        lambda problem, row_slice, sinks: _capped(problem, sinks[row_slice.heads]),
        lambda problem: problem.call.softcap is not None,
    ),
    Defect(
        name="sink_beside_alibi",
        family="sinks",
        text="ALiBi counts distances from a sequence's first new token, not from each row's query: the "
        "same to softmax, but not beside an attention sink",
        seen_in=("vllm #945",),
        touches="all",
        compute=by_sight(_from_first_new_token),
        applies=lambda problem: (
            _has_sinks(problem)
            and problem.call.alibi_slopes is not None
            and any(problem.query_len(seq) > 1 for seq in range(problem.num_seqs))
        ),
    ),
    Defect(
        name="sink_on_first_key",
        family="sinks",
        text="the attention sink is added to the score of a sequence's first key",
        seen_in=("vllm #49815",),
        touches="all",
        compute=by_sight(_on_first_key),
        applies=_has_sinks,
    ),
)
