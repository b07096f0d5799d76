"""Random cases, sound outputs of them, and defects planted in those: what the diagnosis is tried on."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import OPS
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.attention_inputs import Predicted
from attnlab.defects.problem import Problem, RowSlice
from attnlab.diagnosis.candidates import scopes
from attnlab.lab.lab import Lab

_FURTHER = ("context_attention_fwd", *(2 * ("unified_attention",)), "merge_attn_states")
Scope = str  # "all", "decode" or "prefill": the rows of which kernel have the defect


def random_case(rng: random.Random) -> Case:
    """Return a small Case that leaves little to luck: ragged lengths around the edges of blocks and
    partitions, shuffled and spare blocks, grouped heads, other formats, scales, windows and ALiBi."""
    while True:
        try:
            return Case(**_fields(rng))
        except InvalidCase:
            continue  # knobs that contradict each other: draw again


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
    op = rng.choice((*_FURTHER, *(6 * ("chunked_prefill_paged_decode",))))
    return {
        "op": op,
        "num_heads": group * rng.choice((1, 2, 3, 4)),
        "num_queries_per_kv": group,
        "head_size": rng.choice((32, 64, 64, 128)),
        "block_size": block_size,
        "dtype": rng.choice(("float16", "float16", "bfloat16", "float32")),
        "kv_cache_dtype": kv_cache_dtype,
        "k_scale": rng.choice((0.5, 0.25, 2.0)) if scaled else 1.0,
        "v_scale": rng.choice((0.3, 1.5, 0.7)) if scaled else 1.0,
        "sliding_window": rng.choice((5, 16, 48, 270)) if variant == "window" else 0,
        "alibi": variant == "alibi",
        "sinks": _has_sinks(op, variant, rng),
        "softcap": rng.choice((None, 0.5, 2.0)) if OPS[op].softcap else None,
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
    """Draw whether a call has attention sinks; beside ALiBi no op is sound: one refuses them, and
    unified_attention counts ALiBi's distances from another token."""
    return OPS[op].sinks is not None and variant != "alibi" and rng.random() < 0.4


def plant(problem: Problem, sound: torch.Tensor, defect: Defect, scope: Scope) -> torch.Tensor:
    """Return a sound output with the defect in the rows of ``scope``, rounded as a kernel rounds.

    Heads of rows that the defect does not change keep their bits.
    """
    planted, like = sound.clone(), problem.as_kernel()
    for row_slice in rows_of(problem, scope):
        wrong, right = defect.compute(like, row_slice), like.right(row_slice)
        same = (wrong.output == right.output).all(2, keepdim=True)
        rows = problem.rows(row_slice)
        planted[rows] = torch.where(same, sound[rows], wrong.output.to(sound.dtype))
    return planted


def rows_of(problem: Problem, scope: Scope) -> Iterator[RowSlice]:
    """Yield all rows and heads of the sequences in a scope."""
    heads = torch.arange(problem.num_heads)
    for seq in range(problem.num_seqs):
        if scope == "all" or problem.is_decode(seq) == (scope == "decode"):
            yield RowSlice(seq=seq, tokens=torch.arange(problem.query_len(seq)), heads=heads)


def scopes_of(problem: Problem, rng: random.Random) -> Scope:
    """Return a scope to plant in: mostly everywhere, else the rows of one kernel that has some."""
    kinds = {"decode" if problem.is_decode(seq) else "prefill" for seq in range(problem.num_seqs)}
    return rng.choice(("all", "all", *sorted(kinds)))


def told_apart(problem: Problem, planted: Predicted, other: Predicted) -> bool:
    """Answer whether two predictions differ by more than rounding may confuse."""
    finite = planted.output.isfinite(), other.output.isfinite()
    if bool((finite[0] != finite[1]).any()):
        return True
    apart = (planted.output - other.output).abs() > planted.noise + other.noise
    return bool((apart & finite[0]).any())


def same_here(
    problem: Problem, one: Defect, seqs: Iterable[int], other: Defect, others: Iterable[int]
) -> bool:
    """Answer whether a defect in some sequences gives the same output as another one in ``others``."""
    seqs, others = set(seqs), set(others)
    for row_slice in rows_of(problem, "all"):
        first = (
            one.compute(problem, row_slice) if row_slice.seq in seqs else problem.right(row_slice)
        )
        second = (
            other.compute(problem, row_slice)
            if row_slice.seq in others
            else problem.right(row_slice)
        )
        if told_apart(problem, first, second):
            return False
    return True


def is_distinguishable(
    problem: Problem, planted: Defect, seqs: set[int], others: list[Defect]
) -> bool:
    """Answer whether no other defect, wherever it is, gives the same output as the planted one."""
    told = {
        row_slice.seq: (
            row_slice,
            planted.compute(problem, row_slice)
            if row_slice.seq in seqs
            else problem.right(row_slice),
        )
        for row_slice in rows_of(problem, "all")
    }
    still = {
        seq
        for seq, (row_slice, one) in told.items()
        if not told_apart(problem, one, problem.right(row_slice))
    }
    for other in others:
        if other is planted:
            continue
        same = {
            seq
            for seq, (row_slice, one) in told.items()
            if not told_apart(problem, one, other.compute(problem, row_slice))
        }
        moved = told.keys() - still
        if any(moved <= members <= same for _, members in scopes(problem, set(moved))):
            return False
    return True


def seqs_of(problem: Problem, scope: Scope) -> set[int]:
    """Return the sequences in a scope."""
    return {row_slice.seq for row_slice in rows_of(problem, scope)}


def is_visible(problem: Problem, defect: Defect, scope: Scope) -> bool:
    """Answer whether a defect in a scope moves any element further than rounding may."""
    return any(
        told_apart(problem, defect.compute(problem, row_slice), problem.right(row_slice))
        for row_slice in rows_of(problem, scope)
    )


def sound_scene(lab: Lab, case: Case) -> tuple[Problem, torch.Tensor]:
    """Return a Case's scene, and the output that the lab's kernels give."""
    call = lab.call(case)
    return Problem.of_case(case, lab.batch(case), call, call.output), lab.output(case)


def applicable(problem: Problem) -> list[Defect]:
    """Return the defects that a scene can have, harmless ones left out."""
    return [one for one in CATALOGUE if not one.harmless and one.applies(problem)]
