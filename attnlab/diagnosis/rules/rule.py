"""Rows that one part of an op computes alone, so that a fault of the part concerns only them."""

import torch

from attnlab.case.ops import MERGE, WRAPPER
from attnlab.lab.problem import Problem

ALL = ""
DECODES = "for decodes"
NO_CONTEXT = "for the last tokens, which have no context"


def parts_of(problem: Problem) -> tuple[str, ...]:
    """Return which rows a rule may concern alone, in words; "" are all.

    chunked_prefill_paged_decode computes decodes in a kernel of its own. merge_attn_states copies the suffix
    of the last tokens if its argument prefill_tokens_with_context says that they have no context.
    """
    names = {WRAPPER: (DECODES,), MERGE: (NO_CONTEXT,)}.get(problem.call.op, ())
    masks = {name: rows_of(problem, name) for name in names}
    return (ALL, *(name for name, rows in masks.items() if rows.any() and not rows.all()))


def rows_of(problem: Problem, part: str) -> torch.Tensor:
    """Return which rows belong to a part, [num_tokens] bool."""
    rows, starts = torch.zeros(len(problem.call.query), dtype=torch.bool), problem.row_starts()
    seqs = range(problem.num_seqs)
    if part == DECODES:
        chosen = [seq for seq in seqs if problem.is_decode(seq)]
    elif part == NO_CONTEXT:
        has_context = [problem.seq_len(seq) > problem.query_len(seq) for seq in seqs]
        chosen = [seq for seq in seqs if not any(has_context[seq:])]
    else:
        chosen = list(seqs)
    for seq in chosen:
        rows[starts[seq] : starts[seq + 1]] = True
    return rows


def text_of(part: str, text: str) -> str:
    """Return the text of a rule that concerns a part."""
    return f"{part}, {text}" if part else text


def is_about_part(name: str) -> bool:
    """Answer whether the name of a rule says that it concerns a part, as :func:`text_of` writes it."""
    return name.startswith((DECODES, NO_CONTEXT))
