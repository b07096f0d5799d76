"""Rules about scores that are wrong in one of two loops: over the context, or over the new tokens.

A change of all scores, such as a constant added to them, would have no effect if both loops had it.
"""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.case.ops import MERGE
from attnlab.defects.attention_inputs import AttentionInputs, scores_of, softmax
from attnlab.defects.defect import Compute, Defect, changing_inputs
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice
from attnlab.diagnosis.rule_defect import rule_defect
from attnlab.diagnosis.softmax_divisions import LOOPS
from attnlab.tensors.sequence_mask import mask_of

FAMILY = "loops"
_Change = Callable[[Problem, RowSlice, AttentionInputs], AttentionInputs]


def loop_defects(problem: Problem) -> list[Defect]:
    """Return the rules about one loop that a call allows, each as a defect."""
    call, seqs = problem.call, problem.computed_seqs()
    if call.op == MERGE or not call.visibility.is_plain:
        return []
    has_loops = any(0 < problem.cached_len(seq) < problem.seq_len(seq) for seq in seqs)
    changes = _ADDED | _SCALED | _alibi(problem) | _window(problem)
    found: dict[int | None, dict[str, _Change]] = {}
    if call.sinks is not None:
        found[None] = _ADDED
    if has_loops:
        found |= {0: changes, 1: changes}
    return [
        rule_defect(FAMILY, text, text, _in_loop(change, loop))
        for loop, laws in found.items()
        for words, change in laws.items()
        for text in _texts(words, loop, has_sinks=call.sinks is not None)
    ]


def _texts(words: str, loop: int | None, *, has_sinks: bool) -> list[str]:
    """Return the text of a change in a loop, none if the other loop has a rule that is the same.

    The weights of a row do not change with what is added to all of its scores, unless there are sinks. So a
    constant that is added in one loop is the same as its opposite in the other: the text has both.
    """
    if loop is None or has_sinks or words not in _OPPOSITES:
        return [f"{LOOPS[loop]}{words}"]
    if loop == 1:
        return []
    other = f"{LOOPS[1]}{_OPPOSITES[words]}"
    return [f"{LOOPS[0]}{words}, or {other}: both give the same weights"]


def _in_loop(change: _Change, loop: int | None) -> Compute:
    """Return the ``compute`` of a change of the inputs that only the keys of a loop have."""

    def changed(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        other, cached = change(problem, row_slice, inputs), problem.cached_len(row_slice.seq)
        is_new = torch.arange(inputs.key.shape[0]) >= cached
        is_wrong = torch.ones_like(is_new) if loop is None else is_new == bool(loop)
        mixed = torch.where(is_wrong, scores_of(other), scores_of(inputs))
        return dataclasses.replace(
            inputs,
            visible=torch.where(is_wrong, other.visible, inputs.visible),
            weigh=lambda scores: softmax(mixed.to(scores.dtype), inputs.sinks),
        )

    return changing_inputs(changed)


def _added(number: float, scaled: bool) -> _Change:
    """Return the change that adds a number to the scores, or to the products before they are scaled."""

    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        bias = torch.full((inputs.key.shape[0],), number * (inputs.sm_scale if scaled else 1.0))
        return dataclasses.replace(inputs, key_bias=bias.double())

    return change


def _unscaled(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(inputs, sm_scale=1.0)


def _scaled_twice(
    problem: Problem, row_slice: RowSlice, inputs: AttentionInputs
) -> AttentionInputs:
    return dataclasses.replace(inputs, sm_scale=inputs.sm_scale**2)


_ADDED: dict[str, _Change] = {
    "the products of queries and keys begin at 1 in place of 0": _added(1.0, True),
    "1 is added to the scores": _added(1.0, False),
    "the products of queries and keys begin at -1 in place of 0": _added(-1.0, True),
    "1 is subtracted from the scores": _added(-1.0, False),
}
_PAIRS = (
    (
        "the products of queries and keys begin at 1 in place of 0",
        "the products of queries and keys begin at -1 in place of 0",
    ),
    ("1 is added to the scores", "1 is subtracted from the scores"),
    ("ALiBi distances are larger by 1", "ALiBi distances are smaller by 1"),
    (
        "ALiBi distances lack the length of the context",
        "ALiBi distances count the length of the context twice",
    ),
    (
        "ALiBi distances lack the position of the row",
        "ALiBi distances count the position of the row twice",
    ),
)
_OPPOSITES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_SCALED: dict[str, _Change] = {
    "the scores are not scaled": _unscaled,
    "the scores are scaled twice": _scaled_twice,
}


def _alibi(problem: Problem) -> dict[str, _Change]:
    """Return changes of the ALiBi biases."""
    if problem.call.alibi_slopes is None:
        return {}
    moved: dict[str, Callable[[Problem, int, torch.Tensor], torch.Tensor | int]] = {
        "ALiBi distances are larger by 1": lambda problem, seq, at: -1,
        "ALiBi distances are smaller by 1": lambda problem, seq, at: 1,
        "ALiBi distances lack the length of the context": lambda problem, seq, at: _context(
            problem, seq
        ),
        "ALiBi distances count the length of the context twice": lambda problem, seq, at: (
            -_context(problem, seq)
        ),
        "ALiBi distances lack the position of the row": lambda problem, seq, at: at[:, None],
        "ALiBi distances count the position of the row twice": lambda problem, seq, at: (
            -at[:, None]
        ),
    }
    return {text: _moved(shift) for text, shift in moved.items()} | {
        "ALiBi is missing": lambda problem, row_slice, inputs: dataclasses.replace(
            inputs, alibi_slopes=None
        ),
        "ALiBi has the opposite sign": lambda problem, row_slice, inputs: dataclasses.replace(
            inputs, alibi_slopes=None if (one := inputs.alibi_slopes) is None else -one
        ),
    }


def _moved(shift: Callable[[Problem, int, torch.Tensor], torch.Tensor | int]) -> _Change:
    return lambda problem, row_slice, inputs: dataclasses.replace(
        inputs, alibi_shift=shift(problem, row_slice.seq, inputs.position)
    )


def _context(problem: Problem, seq: int) -> int:
    return problem.seq_len(seq) - problem.query_len(seq)


def _window(problem: Problem) -> dict[str, _Change]:
    """Return changes of the window."""
    window = problem.call.sliding_window
    sizes = {"one key longer": window + 1, "one key shorter": window - 1} if window > 1 else {}
    return {f"the window is {text}": _of_window(size) for text, size in sizes.items()}


def _of_window(size: int) -> _Change:
    def change(problem: Problem, row_slice: RowSlice, inputs: AttentionInputs) -> AttentionInputs:
        mask = mask_of(problem.call, row_slice.seq, sliding_window=size)
        return dataclasses.replace(inputs, visible=mask.visible(inputs.position))

    return change
