"""Artists that several plots share: hatched cells, the legend outside the axes, the status colours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

STATUS_COLOURS = {"match": "#4c9a5b", "mismatch": "#c8553d", "rejected": "#8d6a9f"}


def hatch_cells(
    ax: Axes, mask: Any, hatch: str, colour: str, *, facecolour: str = "none"
) -> PolyCollection:
    """Lay a hatch over the cells of an image, and return the artist.

    ``mask``: [rows, columns] bool, in the image's coordinates, where the centre of a cell is an integer.
    """
    boxes = []
    for column in np.flatnonzero(np.asarray(mask).any(0)):
        for first, last in runs(np.asarray(mask)[:, column]):
            left, right, top, bottom = column - 0.5, column + 0.5, first - 0.5, last + 0.5
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    cells = PolyCollection(
        boxes, facecolors=facecolour, edgecolors=colour, hatch=hatch, linewidths=0
    )
    ax.add_collection(cells, autolim=False)
    return cells


def runs(flags: Any) -> list[tuple[int, int]]:
    """Return (first, last) of each run of true values in a one-dimensional array."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(flags).astype(int), [0]))))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def put_legend(ax: Axes, handles: Sequence[Any] | None = None, *, below: bool = False) -> None:
    """Put a legend outside the axes, at the right or below; without ``handles``, of the labelled artists."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    if below:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 5}
        place |= {"columnspacing": 1.2, "handlelength": 1.5}
    if handles is not None:
        place["handles"] = handles
    ax.legend(fontsize="small", frameon=False, **place)
