"""Defects of prefixes, chunks and trees of tokens: masks that hide some keys before a row's own."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Compute, changing_inputs
from attnlab.defects.mask_changes import masked_defect, other_rules, rules, with_rules
from attnlab.defects.masks import hide
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.sequence_mask import mask_of


def _has_prefix(problem: Problem) -> bool:
    lens = rules(problem).rswa_prefix_lens
    return lens is not None and bool((lens > 0).any())


def _has_chunks(problem: Problem) -> bool:
    return rules(problem).has_chunks


def _has_tree(problem: Problem) -> bool:
    return rules(problem).qq_bias is not None


def _prefix_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    lens = rules(problem).rswa_prefix_lens
    assert lens is not None
    return with_rules(problem, rows.seq, inputs, rswa_prefix_lens=lens.roll(-1))


def _prefix_longer(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    lens = rules(problem).rswa_prefix_lens
    assert lens is not None
    return with_rules(problem, rows.seq, inputs, rswa_prefix_lens=lens + 1)


def _lookback(more: int) -> Compute:
    """Return the ``compute`` of rows that see some chunks more, of the right size."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        before = rules(problem)
        size = max(1, before.sliding_window // (before.chunk_lookback + 1))
        lookback = before.chunk_lookback + more
        if lookback < 0:
            return hide(inputs, torch.ones_like(inputs.visible))
        changes = {"chunk_lookback": lookback, "sliding_window": size * (lookback + 1)}
        return with_rules(problem, row_slice.seq, inputs, **changes)

    return changing_inputs(change)


def _as_window(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return with_rules(problem, rows.seq, inputs, chunk_lookback=-1)


def _tree_shifted(shift: int) -> Compute:
    """Return the ``compute`` of rows that use the bias of another row of the tree."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        bias = rules(problem).qq_bias
        assert bias is not None
        return with_rules(problem, row_slice.seq, inputs, qq_bias=bias.roll(shift, 0))

    return changing_inputs(change)


def _tree_in_context(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Count the keys of the bias from the sequence's begin, not from the end of the context."""
    bias = rules(problem).qq_bias
    assert bias is not None
    rows, columns = bias[row_slice.tokens], min(bias.shape[1], inputs.key.shape[0])
    added = torch.zeros(len(rows), inputs.key.shape[0])
    added[:, :columns] = rows[:, :columns]
    seen = mask_of(problem.call, row_slice.seq, qq_bias=None).visible(inputs.position)
    hidden = added == -torch.inf
    return dataclasses.replace(
        inputs, visible=seen & ~hidden, mask_bias=added.masked_fill(hidden, 0.0)
    )


BRANCHES = (
    masked_defect(
        "branches",
        "prefix_hidden",
        "the prefix that each row must see besides its window is hidden",
        _has_prefix,
        ("", other_rules(rswa_prefix_lens=None)),
        seen_in=("sglang #39703",),
    ),
    masked_defect(
        "branches",
        "prefix_one_longer",
        "the prefix that each row sees besides its window is one key too long",
        _has_prefix,
        change=_prefix_longer,
        seen_in=("vllm #3385",),
    ),
    masked_defect(
        "branches",
        "prefix_of_next_sequence",
        "each sequence has the prefix length of the next one",
        lambda problem: _has_prefix(problem) and problem.num_seqs > 1,
        change=_prefix_of_next,
        seen_in=("vllm #47217",),
    ),
    masked_defect(
        "branches",
        "chunk_lookback_off_by_one",
        "rows see another number of earlier chunks",
        _has_chunks,
        ("one more", _lookback(1)),
        ("one less", _lookback(-1)),
        seen_in=("transformers #37329",),
    ),
    masked_defect(
        "branches",
        "chunks_as_window",
        "rows see a sliding window instead of chunks",
        _has_chunks,
        change=_as_window,
        seen_in=("vllm #19904",),
    ),
    masked_defect(
        "branches",
        "tree_ignored",
        "the bias between new tokens is not added, so rows see tokens of other branches",
        _has_tree,
        ("", other_rules(qq_bias=None)),
        seen_in=("sglang #39703",),
    ),
    masked_defect(
        "branches",
        "tree_row_shifted",
        "rows use the bias of a neighbouring row of the tree",
        _has_tree,
        ("the row before", _tree_shifted(1)),
        ("the row after", _tree_shifted(-1)),
        seen_in=("vllm #47332",),
    ),
    masked_defect(
        "branches",
        "tree_at_sequence_start",
        "the bias between new tokens is added to the first keys of the sequence",
        lambda problem: (
            _has_tree(problem)
            and any(problem.query_len(s) < problem.seq_len(s) for s in range(problem.num_seqs))
        ),
        change=_tree_in_context,
        seen_in=("vllm #47332",),
    ),
)
