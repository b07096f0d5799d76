"""The picture of a cache: who wrote its slots, and who reads them."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.contracts.slot_use import FOREIGN, UNWRITTEN, USES, SlotUse

_COLOURS = ("#e3e3e3", "#a8c5e2", "#3f6f9f", "#e15759", "#b07aa1")
_HATCHES = {UNWRITTEN: "xx", FOREIGN: "//"}


def plot_cache(use: SlotUse, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw every slot: a column for each block, in the order of the block table, a row for each slot.

    Blocks of a sequence stand together between two lines, those of nobody at the right. What is read but
    does not hold the token is hatched.
    """
    ax = ax or plt.subplots(figsize=(9, 2.6), layout="constrained")[1]
    order = use.order()
    shown = use.use[order].T.numpy()
    colours = ListedColormap(_COLOURS)
    ax.imshow(shown, cmap=colours, vmin=0, vmax=4, aspect="auto", interpolation="none")
    handles = [_entry(state) for state in np.unique(shown)]
    for state in _HATCHES:
        _hatch(ax, shown == state, _HATCHES[state])
        _ring(ax, shown == state, _COLOURS[state])
    _block_ticks(ax, use.provenance.block_table.numpy(), len(order))
    slots = shown.shape[0]
    ax.set_yticks(sorted({0, slots // 2, slots - 1}))
    ax.set(ylabel="slot", title=title or _finding(shown))
    ax.legend(
        handles=handles,
        fontsize="small",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.32),
        ncols=5,
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
    )
    return ax


def _entry(state: int) -> Patch:
    """Return a state's entry of the legend."""
    hatch = _HATCHES.get(int(state))
    return Patch(facecolor=_COLOURS[state], edgecolor="white", hatch=hatch, label=USES[state])


def _hatch(ax: Axes, mask: Any, hatch: str) -> None:
    """Lay a hatch over the columns of a mask, from its first to its last slot."""
    for column in np.flatnonzero(mask.any(0)):
        slots = np.flatnonzero(mask[:, column])
        ax.fill_between(
            [column - 0.5, column + 0.5],
            slots[0] - 0.5,
            slots[-1] + 0.5,
            facecolor="none",
            edgecolor="white",
            hatch=hatch,
            linewidth=0,
        )


def _ring(ax: Axes, mask: Any, colour: str) -> None:
    """Ring the first slot of each run of columns of a mask: among many blocks it is too small to see."""
    columns = np.flatnonzero(mask.any(0))
    firsts = columns[np.diff(columns, prepend=-2) > 1]
    style: dict[str, Any] = {"ms": 11, "mfc": "none", "mec": colour, "mew": 2, "clip_on": False}
    ax.plot(firsts, mask[:, firsts].argmax(0), "o", **style)


def _block_ticks(ax: Axes, block_table: Any, num_blocks: int) -> None:
    """Name each sequence below its blocks, and rule a line between two."""
    seqs, width = block_table.shape
    ax.set_xticks([width * (i + 0.5) - 0.5 for i in range(seqs)], [str(i) for i in range(seqs)])
    for i in range(1, seqs + (num_blocks > seqs * width)):
        ax.axvline(width * i - 0.5, color="black", linewidth=0.8)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel(f"blocks of sequence ({width} each)")


def _finding(shown: Any) -> str:
    missing, foreign = (int((shown == state).sum()) for state in (UNWRITTEN, FOREIGN))
    if not missing and not foreign:
        return "every slot that is read holds its token"
    parts = [(missing, "read that nobody wrote"), (foreign, "read that hold another token")]
    return ", ".join(f"{n} slot{'s' * (n > 1)} {words}" for n, words in parts if n)
