"""Plot of the scratch memory of the ROCm kernel: which entries the merge of each head reads."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.show.plots.artists import hatch_cells, put_legend

NOT_READ, OWN, OTHER_HEAD = range(3)
_LOOK = (("#f2f2f2", "not read"), ("#4e79a7", "its own partition"), ("#e15759", "another head's"))


def plot_merge(reads: Any, own: Any, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw which entries of exp_sums the merge of each head reads; another head's entries are hatched.

    ``reads``: [heads, entries] bool; ``own``: the same, entries that belong to the head.
    """
    reads, own = np.asarray(reads), np.asarray(own)
    ax = ax or plt.subplots(figsize=(7, 3.4), layout="constrained")[1]
    codes = np.where(reads & ~own, OTHER_HEAD, np.where(reads, OWN, NOT_READ))
    colours = ListedColormap([colour for colour, _ in _LOOK])
    ax.imshow(codes, cmap=colours, vmin=0, vmax=2, aspect="auto")
    if (codes == OTHER_HEAD).any():
        hatch_cells(ax, codes == OTHER_HEAD, "xx", "white")
    ax.set_yticks(range(len(codes)))
    wrong = int((codes == OTHER_HEAD).sum())
    ax.set(
        xlabel="entry of exp_sums: head × partition",
        ylabel="head that merges",
        title=title or f"{wrong} entries of another head are read",
    )
    put_legend(ax, [_entry(code) for code in np.unique(codes)])
    return ax


def _entry(code: int) -> Patch:
    colour, label = _LOOK[code]
    hatch = "xx" if code == OTHER_HEAD else None
    return Patch(facecolor=colour, edgecolor="white", hatch=hatch, label=label)
