"""Defects of which head is computed from which."""

import dataclasses
from collections.abc import Callable

import torch

from attnlab.defects.attention_inputs import Mixed
from attnlab.defects.defect import Defect, always
from attnlab.defects.problem import Scene, Spot


def _kv_head(
    name: str, text: str, seen_in: tuple[str, ...], kv_of: Callable[[Scene, Spot], torch.Tensor]
) -> Defect:
    """Return the defect of another KV head for each query head."""

    def compute(scene: Scene, spot: Spot) -> Mixed:
        return scene.mix(scene.sight(spot, kv_of(scene, spot)))

    def applies(scene: Scene) -> bool:
        heads = torch.arange(scene.num_heads)
        spot = Spot(seq=0, tokens=torch.arange(0), heads=heads)
        return not kv_of(scene, spot).equal(scene.kv_of(heads))

    return Defect(
        name=name,
        family="heads",
        text=text,
        seen_in=seen_in,
        touches="all",
        compute=compute,
        applies=applies,
    )


def _by_tile(scene: Scene, spot: Spot) -> torch.Tensor:
    """Return the KV heads of tiles of 16 query heads, where a KV head has more and its last tile is not
    full: the tile takes the next KV head's query heads along.

    Of 20 query heads a KV head, heads 20 to 31 are computed with KV head 0.
    """
    group = scene.call.num_queries_per_kv
    return spot.heads // min(16, group) // -(-group // 16)


def _next_head(scene: Scene, spot: Spot) -> Mixed:
    heads = (spot.heads + 1) % scene.num_heads
    return scene.right(dataclasses.replace(spot, heads=heads))


HEADS = (
    _kv_head(
        "kv_head_modulo",
        "query head h reads KV head h % num_kv_heads, not h // num_queries_per_kv",
        ("HipKittens #22", "fla #1029"),
        lambda scene, spot: spot.heads % scene.call.key.shape[1],
    ),
    _kv_head(
        "kv_head_first",
        "every query head reads KV head 0",
        ("aiter #3062",),
        lambda scene, spot: torch.zeros_like(spot.heads),
    ),
    _kv_head(
        "kv_head_next",
        "every query head reads the KV head behind its own",
        ("fla #1029",),
        lambda scene, spot: (scene.kv_of(spot.heads) + 1) % scene.call.key.shape[1],
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
        applies=lambda scene: scene.num_heads > 1 and always(scene),
    ),
)
