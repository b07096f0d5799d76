"""Defects in the mapping of query heads to KV heads and of outputs to heads."""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Defect
from attnlab.defects.problem import Problem
from attnlab.defects.row_slice import RowSlice


def _kv_head(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    kv_heads: Callable[[Problem, torch.Tensor], torch.Tensor],
) -> Defect:
    """Return the defect of wrong KV heads; ``kv_heads`` maps query heads [n] to KV heads [n]."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        wrong = kv_heads(problem, row_slice.heads)
        return problem.predict(problem.attention_inputs(row_slice, wrong))

    def applies(problem: Problem) -> bool:
        heads = torch.arange(problem.num_heads)
        return not kv_heads(problem, heads).equal(problem.kv_heads_of(heads))

    return Defect(
        name=name,
        family="heads",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=compute,
        applies=applies,
    )


def _by_tile(problem: Problem, heads: torch.Tensor) -> torch.Tensor:
    """Return the KV heads if each tile of 16 query heads uses the KV head of its first query head.

    With 20 query heads per KV head, a KV head gets two tiles, so query heads 20 to 31 use KV head 0.
    """
    group = problem.call.num_queries_per_kv
    return heads // min(16, group) // -(-group // 16)


def _next_head(problem: Problem, row_slice: RowSlice) -> Predicted:
    heads = (row_slice.heads + 1) % problem.num_heads
    return problem.correct(dataclasses.replace(row_slice, heads=heads))


HEADS = (
    _kv_head(
        "kv_head_modulo",
        "query head h reads KV head h % num_kv_heads instead of h // num_queries_per_kv",
        ("HipKittens #22", "fla #1029"),
        lambda problem, heads: heads % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_first",
        "every query head reads KV head 0",
        ("aiter #3062",),
        lambda problem, heads: torch.zeros_like(heads),
    ),
    _kv_head(
        "kv_head_next",
        "every query head reads the KV head that follows its own",
        ("fla #1029",),
        lambda problem, heads: (problem.kv_heads_of(heads) + 1) % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_by_tile",
        "query heads are processed in tiles of 16; with more than 16 query heads per KV head, the last "
        "tile also computes query heads of the next KV head",
        ("vllm #40792",),
        _by_tile,
    ),
    Defect(
        name="output_of_next_head",
        family="heads",
        text="each head's output is the output of the next head",
        seen_in=("HipKittens #22",),
        touches="all",
        compute=_next_head,
        applies=lambda problem: problem.num_heads > 1,
    ),
)
