"""Pictures of what a kernel read and wrote; like those of :mod:`attnlab.show.plots.errors`, on data they are given."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.lab.reads import KINDS
from attnlab.show.plots.errors import legend_beside

_COLOURS = ("#4e79a7", "#9c755f", "#76b7b2", "#e15759", "#f1ce63", "#b07aa1", "#f28e2b")
_READ, _UNREAD, _OUTSIDE = "#4e79a7", "#f2f2f2", "#e15759"


def plot_reads(
    kinds: Any, read: Any, *, blocks: Sequence[int], title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw some blocks' slots by what they are to the sequence that reads; unread ones are pale.

    ``kinds``: [num_blocks, block_size], indices into KINDS; ``read``: the same, bool; ``blocks``: the
    rows to draw.
    """
    shown = np.asarray(kinds)[list(blocks)]
    alpha = np.where(np.asarray(read)[list(blocks)], 1.0, 0.18)
    ax = ax or plt.subplots(figsize=(8, 1.1 + 0.4 * len(blocks)), layout="constrained")[1]
    ax.imshow(
        shown,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=len(KINDS) - 1,
        aspect="auto",
        alpha=alpha,
    )
    ax.set_yticks(range(len(blocks)), [f"block {block}" for block in blocks])
    ax.set_xticks(range(0, shown.shape[1], 4))
    ax.set(xlabel="slot of the block", title=title)
    handles = [Patch(color=_COLOURS[i], label=KINDS[i]) for i in np.unique(shown)]
    legend_beside(ax, handles)
    return ax


def plot_merge(reads: Any, own: Any, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw which entries of the scratch each head's merge reads.

    ``reads``: [heads, entries] bool; ``own``: the same, the entries that are the head's. What is read
    and is another's is marked.
    """
    reads, own = np.asarray(reads), np.asarray(own)
    ax = ax or plt.subplots(figsize=(7, 3.4), layout="constrained")[1]
    state = np.where(reads & ~own, 2, np.where(reads, 1, 0))
    ax.imshow(state, cmap=ListedColormap([_UNREAD, _READ, _OUTSIDE]), vmin=0, vmax=2, aspect="auto")
    for y, x in np.argwhere(state == 2) if state.size <= 1024 else ():
        ax.text(x, y, "!", ha="center", va="center", color="white", weight="bold")
    ax.set_yticks(range(len(state)))
    ax.set(xlabel="entry of exp_sums: head × partition", ylabel="head that merges", title=title)
    names = ["not read", "its own partition", "another head's"]
    colours = [_UNREAD, _READ, _OUTSIDE]
    legend_beside(ax, [Patch(color=colours[i], label=names[i]) for i in np.unique(state)])
    return ax


def plot_fits(errors: Mapping[str, float], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw how far a row is from what each hypothesis says it is, on a logarithmic scale; the nearest
    stands out."""
    names, values = list(errors), np.maximum(np.array(list(errors.values()), dtype=float), 1e-9)
    ax = ax or plt.subplots(figsize=(7, 0.8 + 0.35 * len(names)), layout="constrained")[1]
    colours = [_READ if value == values.min() else "#bab0ac" for value in values]
    ax.barh(range(len(names)), values, color=colours)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel="largest absolute difference", title=title)
    return ax
