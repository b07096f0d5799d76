"""Defects of the causal mask and of the sliding window."""

import dataclasses
from typing import Any

import torch

from attnlab.defects.problem import (
    Applies,
    AttentionInputs,
    ChangeInputs,
    Compute,
    Defect,
    Problem,
    RowSlice,
    always,
    changing_inputs,
    softmax,
)
from attnlab.tensors.case_visibility import mask_of
from attnlab.tensors.visibility import Visibility

# Changes of the rules by which rows see keys, from which the defects of masks are made.


def rules(problem: Problem) -> Visibility:
    return problem.call.visibility


def with_rules(
    problem: Problem, seq: int, inputs: AttentionInputs, **changes: Any
) -> AttentionInputs:
    """Return the inputs with what rows see under other rules."""
    mask = mask_of(problem.call, seq, **changes)
    return dataclasses.replace(
        inputs, visible=mask.visible(inputs.position), mask_bias=mask.bias(inputs.position)
    )


def other_rules(**changes: Any) -> Compute:
    """Return the ``compute`` of a defect that uses other rules for all sequences."""
    return changing_inputs(
        lambda problem, rows, inputs: with_rules(problem, rows.seq, inputs, **changes)
    )


def masked_defect(
    family: str,
    name: str,
    text: str,
    applies: Applies,
    *computes: tuple[str, Compute],
    change: ChangeInputs | None = None,
    seen_in: tuple[str, ...],
) -> Defect:
    """Return a defect of a family with one variant for each of ``computes``, or with ``change``."""
    found = computes if change is None else (("", changing_inputs(change)),)
    return Defect(
        name=name,
        family=family,
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=found[0][1],
        applies=applies,
        variants=found if len(found) > 1 else (),
    )


def hide(inputs: AttentionInputs, hidden: torch.Tensor) -> AttentionInputs:
    """Return the inputs without the keys that are ``hidden``, [keys] or [rows, keys] bool."""
    return dataclasses.replace(inputs, visible=inputs.visible & ~hidden)


def show(inputs: AttentionInputs, shown: torch.Tensor) -> AttentionInputs:
    """Return the inputs in which rows also see the keys that are ``shown``, [rows, keys] bool."""
    return dataclasses.replace(inputs, visible=inputs.visible | shown)


def key_positions(inputs: AttentionInputs) -> torch.Tensor:
    """Return the positions of the keys, [keys] int64."""
    return torch.arange(inputs.key.shape[0])


def _newest_dropped(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return hide(inputs, key_positions(inputs) == inputs.key.shape[0] - 1)


def _oldest_dropped(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    is_oldest = inputs.visible & (inputs.visible.cumsum(1) == 1)
    return hide(inputs, is_oldest)


def _causal(name: str, text: str, shift: int) -> Defect:
    """Return the defect of causal rows that see the next key, too (1), or not their own (-1)."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        if not problem.call.visibility.is_causal(row_slice.seq):
            return inputs
        edge = key_positions(inputs) == inputs.position[:, None] + (shift > 0)
        return hide(inputs, edge) if shift < 0 else show(inputs, edge)

    return Defect(
        name=name,
        family="masks",
        text=text,
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=changing_inputs(change),
        applies=has_causal_rows,
    )


def _top_left(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs of a mask [query_len, seq_len] whose diagonal begins at its first row and column."""
    if not problem.call.visibility.is_causal(row_slice.seq):
        return inputs
    mask = mask_of(
        problem.call, row_slice.seq, qq_bias=None
    )  # its rows are new tokens, not positions
    hidden_by_bias = mask.visible(inputs.position) & ~inputs.visible
    return dataclasses.replace(inputs, visible=mask.visible(row_slice.tokens) & ~hidden_by_bias)


def _has_causal_context(problem: Problem) -> bool:
    """Answer whether a causal sequence has a context."""
    return any(
        problem.call.visibility.is_causal(seq) and problem.query_len(seq) < problem.seq_len(seq)
        for seq in range(problem.num_seqs)
    )


def has_causal_rows(problem: Problem) -> bool:
    """Answer whether any sequence is causal."""
    visibility = problem.call.visibility
    return any(visibility.is_causal(seq) for seq in range(problem.num_seqs))


def has_window(problem: Problem) -> bool:
    """Answer whether the call has a sliding window; chunks are none."""
    visibility = problem.call.visibility
    return visibility.sliding_window > 0 and not visibility.has_chunks


def with_window(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs, wider: int | None
) -> torch.Tensor:
    """Return what rows see through a window that is ``wider`` on each side, or without limit for None."""
    rules = problem.call.visibility
    window = 0 if wider is None else rules.sliding_window + wider
    is_empty, right = wider is not None and window == 0, rules.window_right
    changes = {
        "sliding_window": 1 if is_empty else window,
        "window_right": None if right is None else max(0, right + (wider or 0)),
    }
    seen = mask_of(problem.call, row_slice.seq, **changes).visible(inputs.position)
    return seen & (key_positions(inputs) != inputs.position[:, None]) if is_empty else seen


def _window(name: str, text: str, seen_in: tuple[str, ...], wider: int | None) -> Defect:
    """Return the defect of a window that is ``wider`` by some keys, or without limit for None."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        return dataclasses.replace(inputs, visible=with_window(problem, row_slice, inputs, wider))

    return Defect(
        name=name,
        family="masks",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=has_window,
    )


def _window_both_sides(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    if not problem.call.visibility.is_causal(row_slice.seq):
        return inputs
    after = key_positions(inputs) - inputs.position[:, None]
    return show(inputs, (after > 0) & (after < problem.call.sliding_window))


def _window_in_loop(
    name: str, text: str, seen_in: tuple[str, ...], of_context: bool, wider: tuple[int | None, ...]
) -> Defect:
    """Return the defect of a window that is wrong in the loop over the context only, or over new tokens.

    ``wider``: by how many keys, one variant each; None is a window without limit.
    """

    def compute_of(keys_more: int | None) -> Compute:
        def change(
            problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
        ) -> AttentionInputs:
            ctx_len = problem.seq_len(row_slice.seq) - problem.query_len(row_slice.seq)
            if not _has_two_loops(problem, row_slice.seq):
                return inputs
            keys = key_positions(inputs)
            wrong = with_window(problem, row_slice, inputs, keys_more)
            in_loop = (keys < ctx_len) if of_context else (keys >= ctx_len)
            return dataclasses.replace(inputs, visible=torch.where(in_loop, wrong, inputs.visible))

        return changing_inputs(change)

    variants = tuple(
        (
            "without limit"
            if more is None
            else f"by {abs(more)} too {'wide' if more > 0 else 'narrow'}",
            compute_of(more),
        )
        for more in wider
    )
    return Defect(
        name=name,
        family="masks",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=variants[0][1],
        applies=lambda problem: (
            has_window(problem)
            and any(_has_two_loops(problem, seq) for seq in range(problem.num_seqs))
        ),
        variants=variants if len(variants) > 1 else (),
    )


def _has_two_loops(problem: Problem, seq: int) -> bool:
    """Answer whether a sequence has a context and several new tokens."""
    return 1 < problem.query_len(seq) < problem.seq_len(seq)


MASKS = (
    Defect(
        name="newest_token_dropped",
        family="masks",
        text="no row attends to the sequence's newest token",
        seen_in=("vllm #28490",),
        touches="all",
        compute=changing_inputs(_newest_dropped),
        applies=always,
    ),
    Defect(
        name="oldest_token_dropped",
        family="masks",
        text="each row misses the oldest key that it should see, the first of its window or sequence",
        seen_in=("sglang #32087",),
        touches="all",
        compute=changing_inputs(_oldest_dropped),
        applies=always,
    ),
    _causal("causal_plus_one", "each row also attends to the token after its own", +1),
    _causal(
        "causal_minus_one",
        "the causal mask is strict: a row does not attend to its own token",
        -1,
    ),
    Defect(
        name="causal_top_left",
        family="masks",
        text="the causal mask is aligned at its top left, as scaled_dot_product_attention aligns it with "
        "is_causal=True: new token i sees the keys at positions 0 to i, not those up to its own",
        seen_in=("pytorch/pytorch #108108", "pytorch/pytorch #103082", "onnx/onnx #8068"),
        touches="all",
        compute=changing_inputs(_top_left),
        applies=_has_causal_context,
    ),
    _window(
        "window_plus_one",
        "the sliding window is one key too wide",
        ("vllm #3385", "transformers #29623"),
        +1,
    ),
    _window("window_minus_one", "the sliding window is one key too narrow", ("sglang #32087",), -1),
    _window(
        "window_ignored",
        "the sliding window is not applied",
        ("vllm #30887", "rocm-libraries #12229"),
        None,
    ),
    _window_in_loop(
        "window_ignored_in_context",
        "the sliding window is not applied to the keys of the context",
        ("vllm #4405", "pytorch/executorch #21857"),
        True,
        (None,),
    ),
    _window_in_loop(
        "window_ignored_in_new_tokens",
        "the sliding window is not applied to the keys of the new tokens",
        ("vllm #4405",),
        False,
        (None,),
    ),
    _window_in_loop(
        "window_off_in_context",
        "the sliding window is off by one for the keys of the context only",
        ("vllm #4405",),
        True,
        (+1, -1),
    ),
    _window_in_loop(
        "window_off_in_new_tokens",
        "the sliding window is off by one for the keys of the new tokens only",
        ("vllm #4405",),
        False,
        (+1, -1),
    ),
    Defect(
        name="window_both_sides",
        family="masks",
        text="the sliding window extends as far into the future as into the past",
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=changing_inputs(_window_both_sides),
        applies=lambda problem: has_window(problem) and has_causal_rows(problem),
    ),
)


# Defects of sequences that are not causal, and of bidirectional ranges.

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


# Defects of prefixes, chunks and trees of tokens: masks that hide some keys before a row's own.


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
