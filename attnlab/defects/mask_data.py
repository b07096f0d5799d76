"""Defects in masks that are not causal: bidirectional sequences, ranges, prefixes, chunks and trees."""

import dataclasses
from typing import Any

import torch

from attnlab.defects.attention_inputs import AttentionInputs, softmax
from attnlab.defects.defect import Applies, ChangeInputs, Compute, Defect, changing_inputs
from attnlab.defects.masks import has_window, hide, key_positions, with_window
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.visibility import Visibility

TILES = (16, 32, 64, 128)
_ROWS = (16, 8, 4, 2)  # rows of a block: 16 rows and heads, by heads per KV head


def _rules(problem: Problem) -> Visibility:
    return problem.call.visibility


def _has_ranges(problem: Problem) -> bool:
    return any(list(problem.mask(seq).ranges()) for seq in range(problem.num_seqs))


def _is_bidirectional(problem: Problem) -> bool:
    return not all(_rules(problem).is_causal(seq) for seq in range(problem.num_seqs))


def _differ_in_causality(problem: Problem) -> bool:
    return isinstance(_rules(problem).causal, torch.Tensor) and problem.num_seqs > 1


def _has_prefix(problem: Problem) -> bool:
    lens = _rules(problem).rswa_prefix_lens
    return lens is not None and bool((lens > 0).any())


def _has_chunks(problem: Problem) -> bool:
    return _rules(problem).has_chunks


def _has_tree(problem: Problem) -> bool:
    return _rules(problem).qq_bias is not None


def _with_rules(
    problem: Problem, seq: int, inputs: AttentionInputs, **changes: Any
) -> AttentionInputs:
    """Return the inputs with what rows see under other rules."""
    mask = problem.mask(seq, **changes)
    return dataclasses.replace(
        inputs, visible=mask.visible(inputs.position), mask_bias=mask.bias(inputs.position)
    )


def _other_rules(**changes: Any) -> Compute:
    """Return the ``compute`` of a defect that uses other rules for all sequences."""
    return changing_inputs(
        lambda problem, rows, inputs: _with_rules(problem, rows.seq, inputs, **changes)
    )


def _cut_at_tile(size: int) -> Compute:
    """Return the ``compute`` of ranges that end with the tile of ``size`` keys which a row is in."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        after_tile = (inputs.position // size + 1) * size
        return hide(inputs, key_positions(inputs) >= after_tile[:, None])

    return changing_inputs(change)


def _flags_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    causal = _rules(problem).causal
    assert isinstance(causal, torch.Tensor)
    return _with_rules(problem, rows.seq, inputs, causal=causal.roll(-1))


def _prefix_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    lens = _rules(problem).rswa_prefix_lens
    assert lens is not None
    return _with_rules(problem, rows.seq, inputs, rswa_prefix_lens=lens.roll(-1))


def _prefix_longer(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    lens = _rules(problem).rswa_prefix_lens
    assert lens is not None
    return _with_rules(problem, rows.seq, inputs, rswa_prefix_lens=lens + 1)


def _ranges_of_next(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    ranges = _rules(problem).mm_prefix_range
    assert ranges is not None
    return _with_rules(problem, rows.seq, inputs, mm_prefix_range=ranges.roll(-1, 0))


def _ranges_shorter(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    ranges = _rules(problem).mm_prefix_range
    assert ranges is not None
    shorter = ranges - torch.tensor([0, 1], device=ranges.device)
    return _with_rules(problem, rows.seq, inputs, mm_prefix_range=shorter)


def _lookback(more: int) -> Compute:
    """Return the ``compute`` of rows that see some chunks more, of the right size."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        rules = _rules(problem)
        size = max(1, rules.sliding_window // (rules.chunk_lookback + 1))
        lookback = rules.chunk_lookback + more
        if lookback < 0:
            return hide(inputs, torch.ones_like(inputs.visible))
        changes = {"chunk_lookback": lookback, "sliding_window": size * (lookback + 1)}
        return _with_rules(problem, row_slice.seq, inputs, **changes)

    return changing_inputs(change)


def _as_window(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return _with_rules(problem, rows.seq, inputs, chunk_lookback=-1)


def _tree_shifted(shift: int) -> Compute:
    """Return the ``compute`` of rows that use the bias of another row of the tree."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        bias = _rules(problem).qq_bias
        assert bias is not None
        return _with_rules(problem, row_slice.seq, inputs, qq_bias=bias.roll(shift, 0))

    return changing_inputs(change)


def _tree_in_context(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Count the keys of the bias from the sequence's begin, not from the end of the context."""
    bias = _rules(problem).qq_bias
    assert bias is not None
    rows, columns = bias[row_slice.tokens], min(bias.shape[1], inputs.key.shape[0])
    added = torch.zeros(len(rows), inputs.key.shape[0])
    added[:, :columns] = rows[:, :columns]
    seen = problem.mask(row_slice.seq, qq_bias=None).visible(inputs.position)
    hidden = added == -torch.inf
    return dataclasses.replace(
        inputs, visible=seen & ~hidden, mask_bias=added.masked_fill(hidden, 0.0)
    )


def _values_of_first_row(rows: int) -> Compute:
    """Return the ``compute`` of values that are 0 outside the window of the first of ``rows`` rows."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        rules, window = _rules(problem), problem.call.sliding_window
        first = inputs.position - row_slice.tokens % rows
        away = first[:, None] - key_positions(inputs)
        kept = away < window
        if not rules.is_causal(row_slice.seq):
            kept &= away > -window
        return dataclasses.replace(
            inputs, weigh=lambda scores: softmax(scores, inputs.sinks) * kept.to(scores.dtype)
        )

    return changing_inputs(change)


def _right_side_open(problem: Problem, rows: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return _with_rules(problem, rows.seq, inputs, window_right=None)


def _window_lost_in_range(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    """Drop the window for rows in a range, towards all keys."""
    everything = with_window(problem, row_slice, inputs, None)
    inside = torch.zeros(len(inputs.position), dtype=torch.bool)
    for first, last in problem.mask(row_slice.seq).ranges():
        inside |= (inputs.position >= first) & (inputs.position <= last)
    return dataclasses.replace(
        inputs, visible=torch.where(inside[:, None], everything, inputs.visible)
    )


def _defect(
    name: str,
    text: str,
    applies: Applies,
    *computes: tuple[str, Compute],
    change: ChangeInputs | None = None,
    seen_in: tuple[str, ...],
) -> Defect:
    """Return a defect of this family with one variant for each of ``computes``, or with ``change``."""
    found = computes if change is None else (("", changing_inputs(change)),)
    return Defect(
        name=name,
        family="mask_data",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=found[0][1],
        applies=applies,
        variants=found if len(found) > 1 else (),
    )


MASK_DATA = (
    _defect(
        "bidirectional_ignored",
        "sequences that are not causal are computed causally",
        _is_bidirectional,
        ("", _other_rules(causal=True)),
        seen_in=("vllm #49202",),
    ),
    _defect(
        "causality_of_next_sequence",
        "each sequence has the causal flag of the next one",
        _differ_in_causality,
        change=_flags_of_next,
        seen_in=("vllm #49202",),
    ),
    _defect(
        "window_right_side_open",
        "the window of rows that are not causal has no limit to the right",
        lambda problem: (
            has_window(problem)
            and _is_bidirectional(problem)
            and _rules(problem).window_right is not None
        ),
        change=_right_side_open,
        seen_in=("vllm #49202",),
    ),
    _defect(
        "window_of_first_row",
        "values outside the window of the first row of a block count as 0 for all its rows",
        lambda problem: has_window(problem) and not _rules(problem).is_plain,
        *((f"blocks of {rows} rows", _values_of_first_row(rows)) for rows in (*_ROWS, 1)),
        seen_in=("vllm #49202",),
    ),
    _defect(
        "ranges_ignored",
        "bidirectional ranges are not applied",
        _has_ranges,
        ("", _other_rules(mm_prefix_range=None)),
        seen_in=("vllm #46754", "vllm #47217"),
    ),
    _defect(
        "range_cut_at_tile",
        "rows see a bidirectional range only up to the end of the tile of keys that they are in",
        _has_ranges,
        *((f"tiles of {size}", _cut_at_tile(size)) for size in TILES),
        seen_in=("vllm #30974",),
    ),
    _defect(
        "range_one_shorter",
        "bidirectional ranges end one token too early",
        _has_ranges,
        change=_ranges_shorter,
        seen_in=("vllm #30974",),
    ),
    _defect(
        "ranges_of_next_sequence",
        "each sequence has the bidirectional ranges of the next one",
        lambda problem: _has_ranges(problem) and problem.num_seqs > 1,
        change=_ranges_of_next,
        seen_in=("vllm #47217",),
    ),
    _defect(
        "window_lost_in_range",
        "the sliding window is not applied to rows in a bidirectional range",
        lambda problem: has_window(problem) and _has_ranges(problem),
        change=_window_lost_in_range,
        seen_in=("vllm #47332",),
    ),
    _defect(
        "range_beyond_window",
        "a bidirectional range extends beyond the window that must limit it",
        lambda problem: (
            has_window(problem)
            and _has_ranges(problem)
            and _rules(problem).mm_prefix_clamp_sliding_window
        ),
        ("", _other_rules(mm_prefix_clamp_sliding_window=False)),
        seen_in=("vllm #47332",),
    ),
    _defect(
        "range_cut_by_window",
        "the sliding window limits a bidirectional range that must extend beyond it",
        lambda problem: (
            has_window(problem)
            and _has_ranges(problem)
            and not _rules(problem).mm_prefix_clamp_sliding_window
        ),
        ("", _other_rules(mm_prefix_clamp_sliding_window=True)),
        seen_in=("vllm #47217",),
    ),
    _defect(
        "prefix_hidden",
        "the prefix that each row must see besides its window is hidden",
        _has_prefix,
        ("", _other_rules(rswa_prefix_lens=None)),
        seen_in=("sglang #39703",),
    ),
    _defect(
        "prefix_one_longer",
        "the prefix that each row sees besides its window is one key too long",
        _has_prefix,
        change=_prefix_longer,
        seen_in=("vllm #3385",),
    ),
    _defect(
        "prefix_of_next_sequence",
        "each sequence has the prefix length of the next one",
        lambda problem: _has_prefix(problem) and problem.num_seqs > 1,
        change=_prefix_of_next,
        seen_in=("vllm #47217",),
    ),
    _defect(
        "chunk_lookback_off_by_one",
        "rows see another number of earlier chunks",
        _has_chunks,
        ("one more", _lookback(1)),
        ("one less", _lookback(-1)),
        seen_in=("transformers #37329",),
    ),
    _defect(
        "chunks_as_window",
        "rows see a sliding window instead of chunks",
        _has_chunks,
        change=_as_window,
        seen_in=("vllm #19904",),
    ),
    _defect(
        "tree_ignored",
        "the bias between new tokens is not added, so rows see tokens of other branches",
        _has_tree,
        ("", _other_rules(qq_bias=None)),
        seen_in=("sglang #39703",),
    ),
    _defect(
        "tree_row_shifted",
        "rows use the bias of a neighbouring row of the tree",
        _has_tree,
        ("the row before", _tree_shifted(1)),
        ("the row after", _tree_shifted(-1)),
        seen_in=("vllm #47332",),
    ),
    _defect(
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
