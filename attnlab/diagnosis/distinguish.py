"""Finding a Case that tells two defects apart which another Case does not."""

from collections.abc import Iterator
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.contracts.dispatch import decide
from attnlab.defects.defect import Defect
from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.diagnosis import Separation
from attnlab.tensors.batch import make_batch
from attnlab.tensors.cache import make_cache
from attnlab.tensors.call import make_call, make_output

_LARGE = 1 << 20  # elements of query above which a Case is shortened first
_SHORT: dict[str, Any] = {"query_lens": (1, 17, 40), "ctx_lens": (300, 260, 33)}
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"distribution": "normal"},
    {"empty_slots": "garbage"},
    {"distribution": "normal", "empty_slots": "garbage"},
    {"distribution": "normal", "empty_slots": "nan"},
    {"distribution": "normal", "sm_scale": 0.3},
    {"distribution": "normal", "k_scale": 0.5, "v_scale": 0.25},
    {"distribution": "normal", "k_scale": 0.5, "v_scale": 0.25, "empty_slots": "garbage"},
    {"distribution": "normal", **_SHORT},
    {"distribution": "normal", "empty_slots": "garbage", **_SHORT},
    {"distribution": "normal", "num_queries_per_kv": 2},
    {"distribution": "normal", "num_queries_per_kv": 3, "num_heads": 12},
    {"distribution": "normal", "dtype": "float32"},
)
_CAPPED: tuple[dict[str, Any], ...] = (  # of a Case with a soft cap: scores far above it
    {"distribution": "normal", "softcap": 0.5},
    {"distribution": "normal", "softcap": 0.004},
)


def problem_of(case: Case) -> Problem:
    """Return the scene of a Case, made for it alone."""
    batch = make_batch(case)
    output = make_output(case)
    call = make_call(case, batch, make_cache(case, batch), output)
    return Problem.of_case(case, batch, call, output)


def separate(
    case: Case,
    one: Defect,
    other: Defect,
    same_kernels: bool = True,
    scopes: tuple[str, str] = ("all", "all"),
) -> Separation:
    """Return a Case near ``case`` in which the two defects give outputs that no rounding can confuse.

    Changes are tried from the least to the most; those that would bring another kernel are left out
    unless ``same_kernels`` is false, and a large Case is shortened first, so that what is proposed
    runs in no time. ``scopes`` say which rows each is in: "all", "decode" or "prefill".
    """
    tried, names = 0, (one.name, other.name)
    for changes, changed in changed_cases(case, same_kernels):
        problem = problem_of(changed)
        tried += 1
        if not (one.applies(problem) and other.applies(problem)):
            continue
        gap = gap_between(problem, one, other, scopes)
        if gap > 1:
            return Separation(pair=names, case=changed, changes=changes, gap=gap, tried=tried)
    return Separation(pair=names, case=None, changes={}, gap=0.0, tried=tried)


def changed_cases(case: Case, same_kernels: bool = True) -> Iterator[tuple[dict[str, Any], Case]]:
    """Yield the Cases to try, each with what it changes."""
    shorten = _SHORT if case.lengths.num_tokens * case.num_heads * case.head_size > _LARGE else {}
    sized = {"num_blocks": None, "max_blocks_per_seq": None, "block_table": None}
    kernels = decide(case).kernels
    for extra in (*_CHANGES, *(_CAPPED if case.softcap is not None else ())):
        changes = {**shorten, **extra}
        if "query_lens" in changes:
            changes |= {n: v for n, v in sized.items() if getattr(case, n) is not None}
            changes |= {n: None for n in ("max_query_len", "max_seq_len") if getattr(case, n)}
        try:
            changed = case.replace(**changes)
        except InvalidCase:
            continue  # this change does not go with the Case
        if not same_kernels or set(decide(changed).kernels) >= set(kernels):
            told = {n: v for n, v in changes.items() if getattr(case, n) != v}
            yield told, changed


def gap_between(
    problem: Problem, one: Defect, other: Defect, scopes: tuple[str, str] = ("all", "all")
) -> float:
    """Return how far apart the outputs under two defects are, in units of both rounding bounds."""
    gap = 0.0
    for row_slice in row_slices_of(problem):
        kind = "decode" if problem.is_decode(row_slice.seq) else "prefill"
        first, second = (
            defect.compute(problem, row_slice)
            if scope in ("all", kind)
            else problem.right(row_slice)
            for defect, scope in zip((one, other), scopes, strict=True)
        )
        finite = first.output.isfinite(), second.output.isfinite()
        if bool((finite[0] != finite[1]).any()):
            return float("inf")
        apart = (first.output - second.output).abs() / (first.noise + second.noise)
        apart = apart.masked_fill(~finite[0], 0.0).nan_to_num(0.0)  # both not finite, or both exact
        gap = max(gap, float(apart.max()))
    return gap


def row_slices_of(
    problem: Problem, tokens: int = 6, heads: int = 6, most: int = 1 << 30
) -> list[RowSlice]:
    """Return a few rows of each sequence, ends included, and a few heads, the first two and the last
    among them; of more than ``most`` sequences those of the shortest queries and the longest."""
    some = torch.linspace(0, problem.num_heads - 1, min(heads, problem.num_heads)).long()
    if problem.num_heads > 1:
        some = torch.cat([some, torch.tensor([1])]).unique()
    order = sorted(problem.ran(), key=problem.query_len)
    seqs = sorted({*order[: -(-most // 2)], *order[-(most // 2) :]}) if len(order) > most else order
    row_slices = []
    for seq in seqs:
        length = problem.query_len(seq)
        if length:
            at = torch.linspace(0, length - 1, min(tokens, length)).long().unique()
            row_slices.append(RowSlice(seq=seq, tokens=at, heads=some))
    return row_slices
