"""Defects of what rows see: causal mask, sliding window, ranges, branches, and which tokens count."""

from dataclasses import fields

import torch

from attnlab.defects.edit import (
    TILES,
    Rows,
    any_seq,
    family,
    fault,
    has_causal_rows,
    has_context,
    has_partial_block,
    has_several_seqs,
    has_window,
)
from attnlab.lab.problem import AttentionInputs, Problem
from attnlab.tensors.cache import freed_blocks
from attnlab.tensors.case_call import mask_of
from attnlab.tensors.visibility import Visibility


def _top_left(at: Rows) -> AttentionInputs:
    """Return the inputs of a mask [query_len, seq_len] whose diagonal begins at its first row and column."""
    if not at.is_causal:
        return at.inputs
    # The rows of the bias are new tokens, not positions.
    hidden_by_bias = at.seen_under(qq_bias=None) & ~at.visible
    mask = mask_of(at.call, at.slice.seq, qq_bias=None)
    return at.change(visible=mask.visible(at.slice.tokens) & ~hidden_by_bias)


def _has_two_loops(problem: Problem, seq: int) -> bool:
    """Answer whether a sequence has a context and several new tokens."""
    return 1 < problem.query_len(seq) < problem.seq_len(seq)


_any_has_two_loops = any_seq(_has_two_loops)


def _in_loop(at: Rows, of_context: bool, wider: int | None) -> AttentionInputs:
    """Widen the window in the loop over the context only, or over the new tokens."""
    if not _has_two_loops(at.problem, at.slice.seq):
        return at.inputs
    in_loop = (at.keys < at.ctx_len) == of_context
    return at.change(visible=torch.where(in_loop, at.window(wider), at.visible))


_OFF_BY_ONE = {"by 1 too wide": 1, "by 1 too narrow": -1}

MASKS = family(
    "masks",
    fault(
        "newest_token_dropped",
        "no row attends to the sequence's newest token",
        "vllm #28490",
        lambda at: at.hide(at.keys == at.seq_len - 1),
    ),
    fault(
        "oldest_token_dropped",
        "each row misses the oldest key that it should see, the first of its window or sequence",
        "sglang #32087",
        lambda at: at.hide(at.visible & (at.visible.cumsum(1) == 1)),
    ),
    fault(
        "causal_plus_one",
        "each row also attends to the token after its own",
        "vllm #51257, vllm-project/flash-attention #154",
        lambda at: at.show((at.after == 1) & at.is_causal),
        has_causal_rows,
    ),
    fault(
        "causal_minus_one",
        "the causal mask is strict: a row does not attend to its own token",
        "vllm #51257, vllm-project/flash-attention #154",
        lambda at: at.hide((at.after == 0) & at.is_causal),
        has_causal_rows,
    ),
    fault(
        "causal_top_left",
        "the causal mask is aligned at its top left, as scaled_dot_product_attention aligns it with "
        "is_causal=True: new token i sees the keys at positions 0 to i, not those up to its own",
        "pytorch/pytorch #108108, pytorch/pytorch #103082, onnx/onnx #8068",
        _top_left,
        any_seq(
            lambda problem, seq: problem.call.visibility.is_causal(seq) and problem.ctx_len(seq) > 0
        ),
    ),
    fault(
        "window_plus_one",
        "the sliding window is one key too wide",
        "vllm #3385, transformers #29623",
        lambda at: at.change(visible=at.window(+1)),
        has_window,
    ),
    fault(
        "window_minus_one",
        "the sliding window is one key too narrow",
        "sglang #32087",
        lambda at: at.change(visible=at.window(-1)),
        has_window,
    ),
    fault(
        "window_ignored",
        "the sliding window is not applied",
        "vllm #30887, rocm-libraries #12229",
        lambda at: at.change(visible=at.window(None)),
        has_window,
    ),
    fault(
        "window_ignored_in_context",
        "the sliding window is not applied to the keys of the context",
        "vllm #4405, pytorch/executorch #21857",
        lambda at: _in_loop(at, True, None),
        *(has_window, _any_has_two_loops),
    ),
    fault(
        "window_ignored_in_new_tokens",
        "the sliding window is not applied to the keys of the new tokens",
        "vllm #4405",
        lambda at: _in_loop(at, False, None),
        *(has_window, _any_has_two_loops),
    ),
    fault(
        "window_off_in_context",
        "the sliding window is off by one for the keys of the context only",
        "vllm #4405",
        lambda at, wider: _in_loop(at, True, wider),
        *(has_window, _any_has_two_loops),
        variants=_OFF_BY_ONE,
    ),
    fault(
        "window_off_in_new_tokens",
        "the sliding window is off by one for the keys of the new tokens only",
        "vllm #4405",
        lambda at, wider: _in_loop(at, False, wider),
        *(has_window, _any_has_two_loops),
        variants=_OFF_BY_ONE,
    ),
    fault(
        "window_both_sides",
        "the sliding window extends as far into the future as into the past",
        "vllm #51257, vllm-project/flash-attention #154",
        lambda at: at.show((at.after > 0) & (at.after < at.call.sliding_window) & at.is_causal),
        *(has_window, has_causal_rows),
    ),
)


# Defects of sequences that are not causal, and of bidirectional ranges.

_ROWS = (16, 8, 5, 4, 3, 2, 1)  # rows of a block: 16 // num_queries_per_kv


_has_ranges = any_seq(lambda problem, seq: list(mask_of(problem.call, seq).ranges()))
_is_bidirectional = any_seq(lambda problem, seq: not problem.call.visibility.is_causal(seq))


def _is_masked(problem: Problem) -> bool:
    return not problem.call.visibility.is_plain


def _first_row(at: Rows, rows: int) -> AttentionInputs:
    """Zero the values outside the window of the first of each ``rows`` rows."""
    window = at.call.sliding_window
    first = at.inputs.position - at.slice.tokens % rows
    away = first[:, None] - at.keys
    kept = (away < window) & (at.is_causal | (away > -window))
    return at.change(weigh=lambda scores: at.softmax(scores) * kept.to(scores.dtype))


def _window_lost_in_range(at: Rows) -> AttentionInputs:
    """Drop the window for rows in a range, towards all keys."""
    position = at.inputs.position
    inside = torch.zeros(len(position), dtype=torch.bool)
    for first, last in mask_of(at.call, at.slice.seq).ranges():
        inside |= (position >= first) & (position <= last)
    return at.change(visible=torch.where(inside[:, None], at.window(None), at.visible))


def _clamps_ranges(problem: Problem) -> bool:
    return problem.call.visibility.mm_prefix_clamp_sliding_window


BIDIRECTIONAL = family(
    "bidirectional",
    fault(
        "bidirectional_ignored",
        "sequences that are not causal are computed causally",
        "vllm #49202",
        lambda at: at.under(causal=True),
        _is_bidirectional,
    ),
    fault(
        "causality_of_next_sequence",
        "each sequence has the causal flag of the next one",
        "vllm #49202",
        lambda at: at.under(causal=at.rules.causal.roll(-1)),
        lambda problem: isinstance(problem.call.visibility.causal, torch.Tensor),
        has_several_seqs,
    ),
    fault(
        "window_right_side_open",
        "the window of rows that are not causal has no limit to the right",
        "vllm #49202",
        lambda at: at.under(window_right=None),
        *(has_window, _is_bidirectional),
        lambda problem: problem.call.visibility.window_right is not None,
    ),
    fault(
        "window_of_first_row",
        "values outside the window of the first row of a block count as 0 for all its rows",
        "vllm #49202",
        _first_row,
        *(has_window, _is_masked),
        variants={f"blocks of {rows} rows": rows for rows in _ROWS},
    ),
    fault(
        "ranges_ignored",
        "bidirectional ranges are not applied",
        "vllm #46754, vllm #47217",
        lambda at: at.under(mm_prefix_range=None),
        _has_ranges,
    ),
    fault(
        "range_cut_at_tile",
        "rows see a bidirectional range only up to the end of the tile of keys that they are in",
        "vllm #30974",
        lambda at, size: at.hide(at.keys >= ((at.inputs.position // size + 1) * size)[:, None]),
        _has_ranges,
        variants={f"tiles of {size}": size for size in TILES},
    ),
    fault(
        "range_one_shorter",
        "bidirectional ranges end one token too early",
        "vllm #30974",
        lambda at: at.under(mm_prefix_range=at.rules.mm_prefix_range - torch.tensor([0, 1])),
        _has_ranges,
    ),
    fault(
        "ranges_of_next_sequence",
        "each sequence has the bidirectional ranges of the next one",
        "vllm #47217",
        lambda at: at.under(mm_prefix_range=at.rules.mm_prefix_range.roll(-1, 0)),
        *(_has_ranges, has_several_seqs),
    ),
    fault(
        "window_lost_in_range",
        "the sliding window is not applied to rows in a bidirectional range",
        "vllm #47332",
        _window_lost_in_range,
        *(has_window, _has_ranges),
    ),
    fault(
        "range_beyond_window",
        "a bidirectional range extends beyond the window that must limit it",
        "vllm #47332",
        lambda at: at.under(mm_prefix_clamp_sliding_window=False),
        *(has_window, _has_ranges, _clamps_ranges),
    ),
    fault(
        "range_cut_by_window",
        "the sliding window limits a bidirectional range that must extend beyond it",
        "vllm #47217",
        lambda at: at.under(mm_prefix_clamp_sliding_window=True),
        *(has_window, _has_ranges),
        lambda problem: not _clamps_ranges(problem),
    ),
)


# Defects of prefixes, chunks and trees of tokens: masks that hide some keys before a row's own.


def _has_prefix(problem: Problem) -> bool:
    lens = problem.call.visibility.rswa_prefix_lens
    return lens is not None and bool((lens > 0).any())


def _has_chunks(problem: Problem) -> bool:
    return problem.call.visibility.has_chunks


def _has_tree(problem: Problem) -> bool:
    bias = problem.call.visibility.qq_bias
    return bias is not None and bias.dim() == 2


def _lookback(at: Rows, more: int) -> AttentionInputs:
    """Show some chunks more, of the right size."""
    rules: Visibility = at.rules
    size = max(1, rules.sliding_window // (rules.chunk_lookback + 1))
    lookback = rules.chunk_lookback + more
    if lookback < 0:
        return at.hide(torch.ones_like(at.visible))
    return at.under(chunk_lookback=lookback, sliding_window=size * (lookback + 1))


def _tree_in_context(at: Rows) -> AttentionInputs:
    """Count the keys of the bias from the sequence's begin, not from the end of the context."""
    rows, columns = at.rules.qq_bias[at.slice.tokens], min(at.rules.qq_bias.shape[1], at.seq_len)
    added = torch.zeros(len(rows), at.seq_len)
    added[:, :columns] = rows[:, :columns]
    hidden = added == -torch.inf
    visible = at.seen_under(qq_bias=None) & ~hidden
    return at.change(visible=visible, mask_bias=added.masked_fill(hidden, 0.0))


BRANCHES = family(
    "branches",
    fault(
        "prefix_hidden",
        "the prefix that each row must see besides its window is hidden",
        "sglang #39703",
        lambda at: at.under(rswa_prefix_lens=None),
        _has_prefix,
    ),
    fault(
        "prefix_one_longer",
        "the prefix that each row sees besides its window is one key too long",
        "vllm #3385",
        lambda at: at.under(rswa_prefix_lens=at.rules.rswa_prefix_lens + 1),
        _has_prefix,
    ),
    fault(
        "prefix_of_next_sequence",
        "each sequence has the prefix length of the next one",
        "vllm #47217",
        lambda at: at.under(rswa_prefix_lens=at.rules.rswa_prefix_lens.roll(-1)),
        *(_has_prefix, has_several_seqs),
    ),
    fault(
        "chunk_lookback_off_by_one",
        "rows see another number of earlier chunks",
        "transformers #37329",
        _lookback,
        _has_chunks,
        variants={"one more": 1, "one less": -1},
    ),
    fault(
        "chunks_as_window",
        "rows see a sliding window instead of chunks",
        "vllm #19904",
        lambda at: at.under(chunk_lookback=-1),
        _has_chunks,
    ),
    fault(
        "tree_ignored",
        "the bias between new tokens is not added, so rows see tokens of other branches",
        "sglang #39703",
        lambda at: at.under(qq_bias=None),
        _has_tree,
    ),
    fault(
        "tree_row_shifted",
        "rows use the bias of a neighbouring row of the tree",
        "vllm #47332",
        lambda at, shift: at.under(qq_bias=at.rules.qq_bias.roll(shift, 0)),
        _has_tree,
        variants={"the row before": 1, "the row after": -1},
    ),
    fault(
        "tree_at_sequence_start",
        "the bias between new tokens is added to the first keys of the sequence",
        "vllm #47332",
        _tree_in_context,
        *(_has_tree, has_context),
    ),
)


# Defects of an op that ignores the whole mask, whatever it is. For each mask, a row above says the same.


_NO_MASK = {one.name: one.default for one in fields(Visibility) if one.name != "sliding_window"}

MASK_IGNORED, MASK_AND_WINDOW_IGNORED = family(
    "op arguments",
    fault(
        "mask_ignored", "the mask is not applied", "", lambda at: at.under(**_NO_MASK), _is_masked
    ),
    fault(
        "mask_and_window_ignored",
        "neither the mask nor the sliding window is applied",
        "",
        lambda at: at.under(**_NO_MASK, sliding_window=0),
        _is_masked,
        lambda problem: problem.call.visibility.sliding_window > 0,
    ),
)


# Defects in which tokens are attended to: context, new tokens, and slots after the last cached token.


def _tail_attended(at: Rows) -> AttentionInputs:
    """Append the slots after the sequence's last cached token, up to the end of the block."""
    size = at.call.block_size
    tail = torch.arange(at.cached, -(-at.cached // size) * size)
    key, value = at.in_cache(tail)
    is_visible = torch.ones(len(at.slice.tokens), len(tail), dtype=torch.bool)
    return at.change(
        key=torch.cat([at.inputs.key, key]),
        value=torch.cat([at.inputs.value, value]),
        visible=torch.cat([at.visible, is_visible], 1),
    )


def _tail_leaked(at: Rows) -> AttentionInputs:
    """Multiply the values after the last cached token by weights of 0; 0 · NaN is NaN."""
    with_tail = _tail_attended(at)
    in_tail = torch.arange(with_tail.key.shape[0]) >= at.seq_len
    return at.change(
        key=with_tail.key.masked_fill(in_tail[:, None, None], 0.0),
        value=with_tail.value,
        visible=with_tail.visible & ~in_tail,
        leak=in_tail.expand_as(with_tail.visible),
    )


def _freed_leaked(at: Rows) -> AttentionInputs:
    """Multiply the values of freed blocks by weights of 0; 0 · NaN is NaN."""
    count = _freed_keys(at.problem, at.slice.seq)
    value = at.inputs.value.clone()
    value[:count] = at.in_cache(torch.arange(count))[1]
    return at.change(value=value, leak=(at.keys < count) & ~at.visible)


def _freed_keys(problem: Problem, seq: int) -> int:
    """Return how many keys of a sequence were in blocks that the window has freed and that are empty."""
    case = problem.case
    if case is None or case.freed != "empty":
        return 0
    return freed_blocks(case)[seq] * case.block_size


TOKENS = family(
    "tokens",
    fault(
        "context_only",
        "rows attend to the context but not to the new tokens",
        "nano-vllm #213",
        lambda at: at.hide(at.keys >= at.ctx_len),
        lambda problem: problem.call.spec.context,
    ),
    fault(
        "new_tokens_only",
        "rows attend to the new tokens but not to the context",
        "nano-vllm #213",
        lambda at: at.hide(at.keys < at.ctx_len),
        has_context,
    ),
    fault(
        "tail_attended",
        "rows attend to the slots after the sequence's last cached token, up to the end of the block",
        "nano-vllm #213, torch-spyre #4517",
        _tail_attended,
        has_partial_block,
        touches="cached",
    ),
    fault(
        "tail_leaked",
        "values after the sequence's last cached token are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        "vllm #641, vllm #53856, Dao-AILab/flash-attention #1745, flashinfer #941",
        _tail_leaked,
        has_partial_block,
        touches="cached",
    ),
    fault(
        "freed_leaked",
        "values in blocks that the window has freed are multiplied by weight 0 instead of being "
        "skipped, so a NaN there reaches the output",
        "vllm #641, vllm #53856",
        _freed_leaked,
        any_seq(_freed_keys),
        touches="cached",
    ),
)
