"""Defect: one way to be wrong, as a transformation of what a row sees."""

from collections.abc import Callable
from dataclasses import dataclass

from attnlab.defects.attention_inputs import Mixed, Sight
from attnlab.defects.cache_read import Reading
from attnlab.defects.problem import Scene, Spot

Compute = Callable[[Scene, Spot], Mixed]
Applies = Callable[[Scene], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Defect:
    """One way for a kernel, or what feeds it, to be wrong.

    - ``name``, ``family``: unique, and the file it stands in.
    - ``text``: what happens, in a sentence.
    - ``seen_in``: upstream threads where it was seen.
    - ``touches``: which rows it can change: "all", "cached" (rows whose keys come from the cache, in
      part or whole), "decode" or "unwritten".
    - ``links``: kinds of Breach that would cause it.
    - ``compute``: the output of some rows under the defect; rows that it does not touch come out right.
    - ``applies``: whether a call has what the defect is about, a window say.
    - ``harmless``: it changes nothing but rounding.
    """

    name: str
    family: str
    text: str
    seen_in: tuple[str, ...]
    touches: str
    compute: Compute
    applies: Applies
    links: tuple[str, ...] = ()
    harmless: bool = False


def by_sight(change: Callable[[Scene, Spot, Sight], Sight]) -> Compute:
    """Return the computation of a defect that changes what rows see."""

    def compute(scene: Scene, spot: Spot) -> Mixed:
        return scene.mix(change(scene, spot, scene.sight(spot)))

    return compute


def by_reading(change: Callable[[Scene, int, Reading], Reading]) -> Compute:
    """Return the computation of a defect that changes how the cache is read."""

    def compute(scene: Scene, spot: Spot) -> Mixed:
        reading = change(scene, spot.seq, scene.reading(spot.seq))
        return scene.mix(scene.sight_as_read(spot, reading))

    return compute


def always(scene: Scene) -> bool:
    """Answer yes: the defect needs nothing of a call but that it is one."""
    return True
