"""Defects of which head is computed from which."""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.defect import Defect, always
from attnlab.defects.problem import Problem, RowSlice


def _kv_head(
    name: str,
    text: str,
    seen_in: tuple[str, ...],
    kv_of: Callable[[Problem, RowSlice], torch.Tensor],
) -> Defect:
    """Return the defect of another KV head for each query head."""

    def compute(problem: Problem, row_slice: RowSlice) -> Predicted:
        return problem.mix(problem.sight(row_slice, kv_of(problem, row_slice)))

    def applies(problem: Problem) -> bool:
        heads = torch.arange(problem.num_heads)
        row_slice = RowSlice(seq=0, tokens=torch.arange(0), heads=heads)
        return not kv_of(problem, row_slice).equal(problem.kv_of(heads))

    return Defect(
        name=name,
        family="heads",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=compute,
        applies=applies,
    )


def _by_tile(problem: Problem, row_slice: RowSlice) -> torch.Tensor:
    """Return the KV heads of tiles of 16 query heads, where a KV head has more and its last tile is not
    full: the tile takes the next KV head's query heads along.

    Of 20 query heads a KV head, heads 20 to 31 are computed with KV head 0.
    """
    group = problem.call.num_queries_per_kv
    return row_slice.heads // min(16, group) // -(-group // 16)


def _next_head(problem: Problem, row_slice: RowSlice) -> Predicted:
    heads = (row_slice.heads + 1) % problem.num_heads
    return problem.right(dataclasses.replace(row_slice, heads=heads))


HEADS = (
    _kv_head(
        "kv_head_modulo",
        "query head h reads KV head h % num_kv_heads, not h // num_queries_per_kv",
        ("HipKittens #22", "fla #1029"),
        lambda problem, row_slice: row_slice.heads % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_first",
        "every query head reads KV head 0",
        ("aiter #3062",),
        lambda problem, row_slice: torch.zeros_like(row_slice.heads),
    ),
    _kv_head(
        "kv_head_next",
        "every query head reads the KV head behind its own",
        ("fla #1029",),
        lambda problem, row_slice: (problem.kv_of(row_slice.heads) + 1) % problem.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_by_tile",
        "query heads are taken in tiles of 16, and of more than 16 a KV head the last tile reaches into "
        "the next KV head's",
        ("vllm #40792",),
        _by_tile,
    ),
    Defect(
        name="output_of_next_head",
        family="heads",
        text="a head's output is that of the next head",
        seen_in=("HipKittens #22",),
        touches="all",
        compute=_next_head,
        applies=lambda problem: problem.num_heads > 1 and always(problem),
    ),
)
