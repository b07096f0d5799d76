"""Mutants: the catalogue's defects, and outputs that have nothing to do with the input."""

from collections.abc import Callable

import torch

from attnlab.defects import CATALOGUE, Defect
from attnlab.defects.attention_inputs import Mixed
from attnlab.defects.defect import always
from attnlab.defects.problem import Scene, Spot

NINE = (  # the mutants of a reference that the two figures of this project's first study counted
    "scale_doubled",
    "scale_missing",
    "scores_ignored",
    "causal_plus_one",
    "causal_minus_one",
    "keys_of_next_sequence",
    "new_tokens_only",
    "values_of_next_sequence",
    "random_noise",
)


def _noise(scene: Scene, spot: Spot) -> Mixed:
    """Return random numbers of the size of the right output."""
    right = scene.right(spot)
    generator = torch.Generator().manual_seed(int(spot.seq))
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    size = right.output.square().mean().sqrt()
    return Mixed(output=drawn * size.clamp(min=scene.rounding(spot.seq).step), noise=right.noise)


def _standard_noise(scene: Scene, spot: Spot) -> Mixed:
    generator = torch.Generator().manual_seed(int(spot.seq))
    right = scene.right(spot)
    drawn = torch.randn(right.output.shape, generator=generator, dtype=torch.float64)
    return Mixed(output=drawn, noise=right.noise)


def _garbage(name: str, text: str, compute: Callable[[Scene, Spot], Mixed]) -> Defect:
    return Defect(
        name=name,
        family="rows",
        text=text,
        seen_in=("mlir-air #1427",),
        touches="all",
        compute=compute,
        applies=always,
    )


RIGHT = _garbage("right", "the right output", lambda scene, spot: scene.right(spot))
MUTANTS: tuple[Defect, ...] = (
    *(defect for defect in CATALOGUE if not defect.harmless),
    _garbage("noise_of_its_size", "random numbers, as large as the right output", _noise),
    _garbage("random_noise", "random numbers of N(0, 1)", _standard_noise),
)
