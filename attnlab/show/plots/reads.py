"""A picture of a cache by who wrote each slot and who read it; like :mod:`attnlab.show.plots.errors`, on data it is
given."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnlab.lab.reads import MemoryReport
from attnlab.show.plots.errors import legend_beside
from attnlab.tensors.cache import NOBODY, Provenance

_NOBODY = "#f2f2f2"
_OWN, _STRANGE = "black", "#c00000"


def plot_cache_map(
    provenance: Provenance,
    memory: MemoryReport,
    *,
    blocks: Sequence[int] | None = None,
    seq: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw blocks × slots, coloured by the sequence that wrote a slot, grey where nobody did.

    A slot that was read as a sequence's own has a dot, one that was read as anything else, another
    sequence's, a future or an empty one, or one outside the window, a red cross. ``blocks``: the rows to
    draw, all where none are given; ``seq``: the sequence whose reads to draw, all where none is.
    """
    rows = list(range(len(provenance.seq))) if blocks is None else list(blocks)
    writers = provenance.seq[rows].numpy()
    count = int(provenance.seq.max()) + 1
    colours: list[Any] = [_NOBODY, *(colormaps["tab20"](i % 20) for i in range(count))]
    ax = ax or plt.subplots(figsize=(8, 1.1 + 0.3 * len(rows)), layout="constrained")[1]
    ax.imshow(
        writers - NOBODY,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=count,
        aspect="auto",
        interpolation="nearest",
    )
    handles: list[Any] = [
        Patch(color=colours[i], label="nobody" if i == 0 else f"sequence {i - 1}")
        for i in np.unique(writers - NOBODY).tolist()
    ]
    at = {block: y for y, block in enumerate(rows)}
    for label, marker, colour, places in _marks(memory, seq):
        shown = [(slot, at[block]) for block, slot in places if block in at]
        if shown:
            x, y = zip(*shown, strict=True)
            ax.plot(x, y, marker, color=colour, markersize=5, label=label)
            handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", label=label))
    ax.set_yticks(range(len(rows)), [f"block {block}" for block in rows])
    ax.set(xlabel="slot of the block", title=title)
    legend_beside(ax, handles)
    return ax


def _marks(
    memory: MemoryReport, seq: int | None
) -> list[tuple[str, str, str, list[tuple[int, int]]]]:
    """Return label, marker, colour and slots of what was read as one's own, and of what was not."""
    own, strange = set[tuple[int, int]](), set[tuple[int, int]]()
    for one in memory.slots:
        if seq in (None, one.seq):
            for kind, slots in one.slots.items():
                (own if kind == "own" else strange).update(slots)
    return [
        ("read by its owner", ".", _OWN, sorted(own)),
        (
            "read by a stranger, too early, empty or outside the window",
            "x",
            _STRANGE,
            sorted(strange),
        ),
    ]
