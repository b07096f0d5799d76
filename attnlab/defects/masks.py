"""Defects of the causal mask and of the sliding window."""

import dataclasses

import torch

from attnlab.defects.attention_inputs import AttentionInputs, visible
from attnlab.defects.defect import Defect, always, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice


def hide(inputs: AttentionInputs, hidden: torch.Tensor) -> AttentionInputs:
    """Return the inputs without the keys that are ``hidden``, [keys] or [rows, keys] bool."""
    return dataclasses.replace(inputs, visible=inputs.visible & ~hidden)


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
    """Return the defect of rows that see as if their position were larger by ``shift``."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        window = problem.call.sliding_window
        is_visible = visible(
            inputs.position + shift, inputs.key.shape[0], window + shift if window else 0
        )
        return dataclasses.replace(inputs, visible=is_visible)

    return Defect(
        name=name,
        family="masks",
        text=text,
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=changing_inputs(change),
        applies=always,
    )


def _has_window(problem: Problem) -> bool:
    return problem.call.sliding_window > 0


def _window(name: str, text: str, seen_in: tuple[str, ...], wider: int | None) -> Defect:
    """Return the defect of a window that is ``wider`` by some keys, or without limit for None."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        window = 0 if wider is None else problem.call.sliding_window + wider
        is_visible = visible(inputs.position, inputs.key.shape[0], window)
        if wider is not None and window == 0:  # an empty window, not the lack of one
            is_visible = torch.zeros_like(is_visible)
        return dataclasses.replace(inputs, visible=is_visible)

    return Defect(
        name=name,
        family="masks",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=changing_inputs(change),
        applies=_has_window,
    )


def _window_both_sides(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    distance = (key_positions(inputs) - inputs.position[:, None]).abs()
    return dataclasses.replace(inputs, visible=distance < problem.call.sliding_window)


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
    Defect(
        name="window_both_sides",
        family="masks",
        text="the sliding window extends as far into the future as into the past",
        seen_in=("vllm #51257", "vllm-project/flash-attention #154"),
        touches="all",
        compute=changing_inputs(_window_both_sides),
        applies=_has_window,
    ),
)
