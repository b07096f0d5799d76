"""Defects of sequences that are not causal, and of bidirectional ranges."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs, softmax
from attnlab.defects.defect import Compute, changing_inputs
from attnlab.defects.mask_changes import masked_defect, other_rules, rules, with_rules
from attnlab.defects.masks import has_window, hide, key_positions, with_window
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.sequence_mask import mask_of

TILES = (16, 32, 64, 128)
_ROWS = (16, 8, 5, 4, 3, 2, 1)  # rows of a block: 16 // num_queries_per_kv


def _has_ranges(problem: Problem) -> bool:
    return any(list(mask_of(problem.call, seq).ranges()) for seq in range(problem.num_seqs))


def _is_bidirectional(problem: Problem) -> bool:
    return not all(rules(problem).is_causal(seq) for seq in range(problem.num_seqs))


def _differ_in_causality(problem: Problem) -> bool:
    return isinstance(rules(problem).causal, torch.Tensor) and problem.num_seqs > 1


def _cut_at_tile(size: int) -> Compute:
    """Return the ``compute`` of ranges that end with the tile of ``size`` keys which a row is in."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        after_tile = (inputs.position // size + 1) * size
        return hide(inputs, key_positions(inputs) >= after_tile[:, None])

    return changing_inputs(change)


def _flags_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    causal = rules(problem).causal
    assert isinstance(causal, torch.Tensor)
    return with_rules(problem, rows.seq, inputs, causal=causal.roll(-1))


def _ranges_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    ranges = rules(problem).mm_prefix_range
    assert ranges is not None
    return with_rules(problem, rows.seq, inputs, mm_prefix_range=ranges.roll(-1, 0))


def _ranges_shorter(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    ranges = rules(problem).mm_prefix_range
    assert ranges is not None
    shorter = ranges - torch.tensor([0, 1], device=ranges.device)
    return with_rules(problem, rows.seq, inputs, mm_prefix_range=shorter)


def _values_of_first_row(rows: int) -> Compute:
    """Return the ``compute`` of values that are 0 outside the window of the first of ``rows`` rows."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        window = problem.call.sliding_window
        first = inputs.position - row_slice.tokens % rows
        away = first[:, None] - key_positions(inputs)
        kept = away < window
        if not rules(problem).is_causal(row_slice.seq):
            kept &= away > -window
        return dataclasses.replace(
            inputs, weigh=lambda scores: softmax(scores, inputs.sinks) * kept.to(scores.dtype)
        )

    return changing_inputs(change)


def _right_side_open(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return with_rules(problem, rows.seq, inputs, window_right=None)


def _window_lost_in_range(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Drop the window for rows in a range, towards all keys."""
    everything = with_window(problem, row_slice, inputs, None)
    inside = torch.zeros(len(inputs.position), dtype=torch.bool)
    for first, last in mask_of(problem.call, row_slice.seq).ranges():
        inside |= (inputs.position >= first) & (inputs.position <= last)
    return dataclasses.replace(
        inputs, visible=torch.where(inside[:, None], everything, inputs.visible)
    )


BIDIRECTIONAL = (
    masked_defect(
        "bidirectional",
        "bidirectional_ignored",
        "sequences that are not causal are computed causally",
        _is_bidirectional,
        ("", other_rules(causal=True)),
        seen_in=("vllm #49202",),
    ),
    masked_defect(
        "bidirectional",
        "causality_of_next_sequence",
        "each sequence has the causal flag of the next one",
        _differ_in_causality,
        change=_flags_of_next,
        seen_in=("vllm #49202",),
    ),
    masked_defect(
        "bidirectional",
        "window_right_side_open",
        "the window of rows that are not causal has no limit to the right",
        lambda problem: (
            has_window(problem)
            and _is_bidirectional(problem)
            and rules(problem).window_right is not None
        ),
        change=_right_side_open,
        seen_in=("vllm #49202",),
    ),
    masked_defect(
        "bidirectional",
        "window_of_first_row",
        "values outside the window of the first row of a block count as 0 for all its rows",
        lambda problem: has_window(problem) and not rules(problem).is_plain,
        *((f"blocks of {rows} rows", _values_of_first_row(rows)) for rows in _ROWS),
        seen_in=("vllm #49202",),
    ),
    masked_defect(
        "bidirectional",
        "ranges_ignored",
        "bidirectional ranges are not applied",
        _has_ranges,
        ("", other_rules(mm_prefix_range=None)),
        seen_in=("vllm #46754", "vllm #47217"),
    ),
    masked_defect(
        "bidirectional",
        "range_cut_at_tile",
        "rows see a bidirectional range only up to the end of the tile of keys that they are in",
        _has_ranges,
        *((f"tiles of {size}", _cut_at_tile(size)) for size in TILES),
        seen_in=("vllm #30974",),
    ),
    masked_defect(
        "bidirectional",
        "range_one_shorter",
        "bidirectional ranges end one token too early",
        _has_ranges,
        change=_ranges_shorter,
        seen_in=("vllm #30974",),
    ),
    masked_defect(
        "bidirectional",
        "ranges_of_next_sequence",
        "each sequence has the bidirectional ranges of the next one",
        lambda problem: _has_ranges(problem) and problem.num_seqs > 1,
        change=_ranges_of_next,
        seen_in=("vllm #47217",),
    ),
    masked_defect(
        "bidirectional",
        "window_lost_in_range",
        "the sliding window is not applied to rows in a bidirectional range",
        lambda problem: has_window(problem) and _has_ranges(problem),
        change=_window_lost_in_range,
        seen_in=("vllm #47332",),
    ),
    masked_defect(
        "bidirectional",
        "range_beyond_window",
        "a bidirectional range extends beyond the window that must limit it",
        lambda problem: (
            has_window(problem)
            and _has_ranges(problem)
            and rules(problem).mm_prefix_clamp_sliding_window
        ),
        ("", other_rules(mm_prefix_clamp_sliding_window=False)),
        seen_in=("vllm #47332",),
    ),
    masked_defect(
        "bidirectional",
        "range_cut_by_window",
        "the sliding window limits a bidirectional range that must extend beyond it",
        lambda problem: (
            has_window(problem)
            and _has_ranges(problem)
            and not rules(problem).mm_prefix_clamp_sliding_window
        ),
        ("", other_rules(mm_prefix_clamp_sliding_window=True)),
        seen_in=("vllm #47217",),
    ),
)
