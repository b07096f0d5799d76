"""Random cases, sound outputs of them, and defects planted in those: what the diagnosis is tried on."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from attnlab.case.case import CACHE_ONLY_OPS, Case
from attnlab.case.errors import InvalidCase
from attnlab.case.rules import SINK_OPS
from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.attention_inputs import Mixed
from attnlab.defects.problem import Scene, Spot
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
        "softcap": rng.choice((None, 0.5, 2.0)) if op == "unified_attention" else None,
        "x": rng.choice((None, 8)) if platform == "sm_90" else None,
        "query_lens": tuple(query_lens),
        "ctx_lens": tuple(rng.choice(ctx) for _ in query_lens),
        "data": "normal" if rng.random() < 0.9 else "uniform_1e-3",
        "empty": rng.choice(("zeros", "garbage", "nan")),
        "fill": "all_rows" if op in CACHE_ONLY_OPS else rng.choice(("all_rows", "decode_rows")),
        "platform": platform,
        "num_blocks": 5 * 32 + rng.randint(0, 9),
        "max_blocks_per_seq": rng.choice((None, 36)),
        "seed": rng.randrange(1 << 30),
        "oracle": "float64",
    }


def _has_sinks(op: str, variant: str, rng: random.Random) -> bool:
    """Draw whether a call has attention sinks; beside ALiBi no op is sound: one refuses them, and
    unified_attention counts ALiBi's distances from another token."""
    return op in SINK_OPS and variant != "alibi" and rng.random() < 0.4


def plant(scene: Scene, sound: torch.Tensor, defect: Defect, scope: Scope) -> torch.Tensor:
    """Return a sound output with the defect in the rows of ``scope``, rounded as a kernel rounds.

    Heads of rows that the defect does not change keep their bits.
    """
    planted, like = sound.clone(), scene.as_kernel()
    for spot in rows_of(scene, scope):
        wrong, right = defect.compute(like, spot), like.right(spot)
        same = (wrong.output == right.output).all(2, keepdim=True)
        rows = scene.rows(spot)
        planted[rows] = torch.where(same, sound[rows], wrong.output.to(sound.dtype))
    return planted


def rows_of(scene: Scene, scope: Scope) -> Iterator[Spot]:
    """Yield all rows and heads of the sequences in a scope."""
    heads = torch.arange(scene.num_heads)
    for seq in range(scene.num_seqs):
        if scope == "all" or scene.is_decode(seq) == (scope == "decode"):
            yield Spot(seq=seq, tokens=torch.arange(scene.query_len(seq)), heads=heads)


def scopes_of(scene: Scene, rng: random.Random) -> Scope:
    """Return a scope to plant in: mostly everywhere, else the rows of one kernel that has some."""
    kinds = {"decode" if scene.is_decode(seq) else "prefill" for seq in range(scene.num_seqs)}
    return rng.choice(("all", "all", *sorted(kinds)))


def told_apart(scene: Scene, planted: Mixed, other: Mixed) -> bool:
    """Answer whether two predictions differ by more than rounding may confuse."""
    finite = planted.output.isfinite(), other.output.isfinite()
    if bool((finite[0] != finite[1]).any()):
        return True
    apart = (planted.output - other.output).abs() > planted.noise + other.noise
    return bool((apart & finite[0]).any())


def same_here(
    scene: Scene, one: Defect, seqs: Iterable[int], other: Defect, others: Iterable[int]
) -> bool:
    """Answer whether a defect in some sequences gives the same output as another one in ``others``."""
    seqs, others = set(seqs), set(others)
    for spot in rows_of(scene, "all"):
        first = one.compute(scene, spot) if spot.seq in seqs else scene.right(spot)
        second = other.compute(scene, spot) if spot.seq in others else scene.right(spot)
        if told_apart(scene, first, second):
            return False
    return True


def is_distinguishable(scene: Scene, planted: Defect, seqs: set[int], others: list[Defect]) -> bool:
    """Answer whether no other defect, wherever it is, gives the same output as the planted one."""
    told = {
        spot.seq: (spot, planted.compute(scene, spot) if spot.seq in seqs else scene.right(spot))
        for spot in rows_of(scene, "all")
    }
    still = {
        seq for seq, (spot, one) in told.items() if not told_apart(scene, one, scene.right(spot))
    }
    for other in others:
        if other is planted:
            continue
        same = {
            seq
            for seq, (spot, one) in told.items()
            if not told_apart(scene, one, other.compute(scene, spot))
        }
        moved = told.keys() - still
        if any(moved <= members <= same for _, members in scopes(scene, set(moved))):
            return False
    return True


def seqs_of(scene: Scene, scope: Scope) -> set[int]:
    """Return the sequences in a scope."""
    return {spot.seq for spot in rows_of(scene, scope)}


def is_visible(scene: Scene, defect: Defect, scope: Scope) -> bool:
    """Answer whether a defect in a scope moves any element further than rounding may."""
    return any(
        told_apart(scene, defect.compute(scene, spot), scene.right(spot))
        for spot in rows_of(scene, scope)
    )


def sound_scene(lab: Lab, case: Case) -> tuple[Scene, torch.Tensor]:
    """Return a Case's scene, and the output that the lab's kernels give."""
    call = lab.call(case)
    return Scene.of_case(case, lab.batch(case), call, call.output), lab.output(case)


def applicable(scene: Scene) -> list[Defect]:
    """Return the defects that a scene can have, harmless ones left out."""
    return [one for one in CATALOGUE if not one.harmless and one.applies(scene)]
