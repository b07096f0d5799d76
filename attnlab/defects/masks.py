"""Defects of the causal mask and of the sliding window."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs
from attnlab.defects.defect import Compute, Defect, always, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.tensors.sequence_mask import mask_of


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
