"""Fault injection for benchmarking the diagnosis: random cases, their correct outputs, planted defects."""

import random
from collections.abc import Iterable
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS
from attnlab.defects import DEFECTS, Defect
from attnlab.diagnosis.candidates import possible_scopes
from attnlab.lab.lab import Lab
from attnlab.lab.problem import Predicted, Problem, RowSlice, all_rows

_OTHER_OPS = ("context_attention_fwd", *(2 * ("unified_attention",)), "merge_attn_states")


def random_case(rng: random.Random) -> Case:
    """Return a small random Case in which defects are visible.

    Lengths are ragged and near block and partition sizes; blocks are shuffled, with spare ones; heads are
    grouped; formats, scales, windows and ALiBi vary.
    """
    while True:
        try:
            return Case(**_fields(rng))
        except InvalidCase:
            continue  # these fields exclude each other: draw again


def _fields(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice((16, 16, 32))
    edges = (1, 2, block_size - 1, block_size, block_size + 1, 40)
    ctx = (0, 1, block_size - 1, block_size, 37, 100, 255, 256, 257, 300, 530)
    num_seqs = rng.randint(2, 5)
    query_lens = [1, *(rng.choice((1, *edges)) for _ in range(num_seqs - 1))]
    rng.shuffle(query_lens)
    group = rng.choice((1, 1, 2, 3, 4))
    kv_cache_dtype = rng.choice(("auto", "auto", "fp8", "fp8_e5m2"))
    scaled = kv_cache_dtype != "auto" and rng.random() < 0.8
    platform = rng.choice(("gfx942", "gfx950", "sm_90", "gfx1100"))
    variant = rng.choice(("plain", "plain", "window", "alibi"))
    op = rng.choice((*_OTHER_OPS, *(6 * ("chunked_prefill_paged_decode",))))
    return {
        "op": op,
        "num_heads": group * rng.choice((1, 2, 3, 4)),
        "num_queries_per_kv": group,
        "head_size": rng.choice((32, 64, 64, 128)),
        "block_size": block_size,
        "dtype": rng.choice(("float16", "float16", "bfloat16", "float32")),
        "kv_cache_dtype": kv_cache_dtype,
        "k_scale": rng.choice((0.6, 0.35, 1.7)) if scaled else 1.0,
        "v_scale": rng.choice((0.31, 1.4, 0.77)) if scaled else 1.0,
        "sliding_window": rng.choice((5, 16, 48, 270)) if variant == "window" else 0,
        "alibi": variant == "alibi",
        "sinks": _has_sinks(op, variant, rng),
        "softcap": rng.choice((None, 0.5, 2.0)) if op == "unified_attention" else None,
        "x": rng.choice((None, 8)) if platform == "sm_90" else None,
        "query_lens": tuple(query_lens),
        "ctx_lens": tuple(rng.choice(ctx) for _ in query_lens),
        "distribution": "normal" if rng.random() < 0.9 else "uniform_1e-3",
        "empty_slots": rng.choice(("zeros", "garbage", "nan")),
        "fill": "all_rows"
        if OPS[op].fill_read == "all_rows"
        else rng.choice(("all_rows", "decode_rows")),
        "platform": platform,
        "num_blocks": 5 * 32 + rng.randint(0, 9),
        "max_blocks_per_seq": rng.choice((None, 36)),
        "seed": rng.randrange(1 << 30),
        "reference_dtype": "float64",
    }


def _has_sinks(op: str, variant: str, rng: random.Random) -> bool:
    """Draw whether a call has attention sinks.

    Never with ALiBi: one op rejects the combination, and unified_attention computes it wrong.
    """
    return OPS[op].sinks is not None and variant != "alibi" and rng.random() < 0.4


def correct_run(lab: Lab, case: Case) -> tuple[Problem, torch.Tensor]:
    """Return a Case's problem and the output of the lab's kernels."""
    call = lab.call(case)
    return Problem.of_case(case, lab.batch(case), call, call.output), lab.output(case)


def applicable(problem: Problem) -> list[Defect]:
    """Return the defects that a problem can have, without the harmless ones."""
    return [
        defect
        for defect in DEFECTS.values()
        if not defect.harmless and defect.applies(problem) and defect.is_possible(problem)
    ]


def random_rows(problem: Problem, rng: random.Random) -> str:
    """Return the rows to plant a defect in: "all" half of the time or more, else "decode" or "prefill"."""
    kinds = {"decode" if problem.is_decode(seq) else "prefill" for seq in range(problem.num_seqs)}
    return rng.choice(("all", "all", *sorted(kinds)))


def seqs_of(problem: Problem, rows: str) -> set[int]:
    """Return the sequences with these rows: "all", "decode" or "prefill"."""
    return {row_slice.seq for row_slice in all_rows(problem, rows)}


def plant(problem: Problem, output: torch.Tensor, defect: Defect, rows: str) -> torch.Tensor:
    """Return a copy of a correct output with the defect in ``rows``, rounded as a kernel rounds.

    Heads of rows that the defect does not change keep their bits.
    """
    planted, kernel_problem = output.clone(), problem.with_kernel_rounding()
    for row_slice in all_rows(problem, rows):
        wrong = defect.compute(kernel_problem, row_slice)
        correct = kernel_problem.correct(row_slice)
        unchanged = (wrong.output == correct.output).all(2, keepdim=True)
        at = problem.rows(row_slice)
        planted[at] = torch.where(unchanged, output[at], wrong.output.to(output.dtype))
    return planted


def differ(first: Predicted, second: Predicted) -> bool:
    """Answer whether two predictions differ by more than rounding."""
    finite = first.output.isfinite()
    if bool((finite != second.output.isfinite()).any()):
        return True
    differs = (first.output - second.output).abs() > first.bound + second.bound
    return bool((differs & finite).any())


def is_visible(problem: Problem, defect: Defect, rows: str) -> bool:
    """Answer whether a defect in ``rows`` changes any element by more than rounding."""
    return any(
        differ(defect.compute(problem, row_slice), problem.correct(row_slice))
        for row_slice in all_rows(problem, rows)
    )


def _predict(problem: Problem, row_slice: RowSlice, defect: Defect, seqs: set[int]) -> Predicted:
    """Return the output of some rows with a defect in the sequences ``seqs``."""
    if row_slice.seq in seqs:
        return defect.compute(problem, row_slice)
    return problem.correct(row_slice)


def are_equivalent(
    problem: Problem,
    first: Defect,
    first_seqs: Iterable[int],
    second: Defect,
    second_seqs: Iterable[int],
) -> bool:
    """Answer whether two defects, each in its own sequences, give the same output up to rounding."""
    in_first, in_second = set(first_seqs), set(second_seqs)
    return not any(
        differ(
            _predict(problem, row_slice, first, in_first),
            _predict(problem, row_slice, second, in_second),
        )
        for row_slice in all_rows(problem)
    )


def is_distinguishable(
    problem: Problem, planted: Defect, seqs: set[int], others: Iterable[Defect]
) -> bool:
    """Answer whether no other defect, in any possible scope, gives the same output as the planted one."""
    row_slices = list(all_rows(problem))
    predicted = [_predict(problem, row_slice, planted, seqs) for row_slice in row_slices]
    changed = {
        row_slice.seq
        for row_slice, prediction in zip(row_slices, predicted, strict=True)
        if differ(prediction, problem.correct(row_slice))
    }
    scopes = [set(scope.sequences) for scope in possible_scopes(problem, changed)]
    for other in others:
        if other is planted:
            continue
        same = {
            row_slice.seq
            for row_slice, prediction in zip(row_slices, predicted, strict=True)
            if not differ(prediction, other.compute(problem, row_slice))
        }
        if any(changed <= members <= same for members in scopes):
            return False
    return True
