"""The picture of the stages in time, in the manner of :mod:`attnlab.show.plots.errors`."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from attnlab.lab.stage_table import Cell

_LOOK = {  # colour, hatch: the one is enough without the other
    "match": ("#4c9a5b", ""),
    "mismatch": ("#c8553d", "///"),
    "rejected": ("#8d6a9f", "xx"),
}
_WIDTH, _HEIGHT = 0.94, 0.82  # of a cell


def plot_story(
    cells: Sequence[Cell], stories: Mapping[str, str], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the stages from left to right, as the test went through them, and what each platform said.

    A cell is green where the output matches, red and hatched where elements are wrong, with their number,
    purple and crossed where the call was rejected. ``stories`` says what was changed, by stage.
    """
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    platforms = list(dict.fromkeys(cell.platform for cell in cells))
    if ax is None:
        size = (1.5 * len(stages) + 1.5, 0.75 * len(platforms) + 2.1)
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        _draw(ax, cell, stages.index(cell.stage), platforms.index(cell.platform))
    _steps(ax, stages, stories, len(platforms))
    kernels = {cell.platform: cell.decode_kernel or "" for cell in cells}
    decodes = [kernels[name].replace("_attention", "_\nattention") for name in platforms]
    names = [f"{name}\n{kernel}" for name, kernel in zip(platforms, decodes, strict=True)]
    ax.set_yticks([y + 0.5 for y in range(len(platforms))], names, fontsize=9)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.set_xlim(0, len(stages))
    ax.set_ylim(len(platforms) + 1.75, -0.5)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(title)
    ax.legend(handles=_legend(cells), loc="lower center", ncols=3, frameon=False)
    return ax


def _steps(ax: Axes, stages: Sequence[str], stories: Mapping[str, str], bottom: int) -> None:
    """Number the stages and draw an arrow from each to the next; under the cells, tell what changed."""
    for x in range(len(stages) - 1):
        arrow = {"arrowstyle": "->", "color": "#707070"}
        ax.annotate("", xy=(x + 1.3, -0.2), xytext=(x + 0.7, -0.2), arrowprops=arrow)
    for x, stage in enumerate(stages):
        ax.text(x + 0.5, -0.2, str(x + 1), ha="center", va="center", weight="bold")
        name = stage.replace("_before_", "_\nbefore_").replace("_after_", "_\nafter_")
        words = ax.text(x + 0.5, bottom + 0.04, name, ha="center", va="top", weight="bold", size=9)
        told = textwrap.fill(stories[stage], 20)
        ax.annotate(told, (0.5, -0.15), xycoords=words, ha="center", va="top", size=8.5)


def _draw(ax: Axes, cell: Cell, x: int, y: int) -> None:
    """Draw one cell: its colour, its hatch, and what came of it."""
    colour, hatch = _LOOK[cell.status]
    at = (x + (1 - _WIDTH) / 2, y + (1 - _HEIGHT) / 2)
    box = Rectangle(at, _WIDTH, _HEIGHT, facecolor=colour, edgecolor="#ffffff40", linewidth=0)
    box.set_hatch(hatch)
    ax.add_patch(box)
    text = "rejected" if cell.mismatched is None else f"{cell.mismatched} wrong"
    behind = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
    words = ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", weight="bold")
    words.set_bbox(behind)


def _legend(cells: Sequence[Cell]) -> list[Patch]:
    found = {cell.status for cell in cells}
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=status)
        for status, (colour, hatch) in _LOOK.items()
        if status in found
    ]
