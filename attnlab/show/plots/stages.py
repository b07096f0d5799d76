"""Plots of the stages of a test: as a table, and as a story from the first stage to the last."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from attnlab.show.plots.artists import STATUS_COLOURS

if TYPE_CHECKING:
    from attnlab.lab.stage_table import Cell

# A hatch for each status, so that the colour is not needed to read the plot.
_HATCHES = {"match": "", "mismatch": "///", "rejected": "xx"}
_WIDTH, _HEIGHT = 0.94, 0.82  # of a cell


def plot_stages(cells: Sequence["Cell"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the table of stages: a row per stage, a column per platform, and the number of wrong elements."""
    stages, platforms = _axes_of(cells)
    if ax is None:
        size = (2.2 + 2.6 * len(platforms), 0.8 + 0.5 * len(stages))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        _draw(ax, cell, platforms.index(cell.platform), stages.index(cell.stage))
    ax.set_xlim(0, len(platforms))
    ax.set_ylim(len(stages), 0)
    ax.set_xticks([x + 0.5 for x in range(len(platforms))], platforms)
    ax.set_yticks([y + 0.5 for y in range(len(stages))], stages)
    ax.xaxis.tick_top()
    _bare(ax)
    ax.set_title(title or _finding(cells))
    return ax


def plot_story(
    cells: Sequence["Cell"], stories: Mapping[str, str], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the stages from left to right, in the order of the test's history, with a row per platform.

    A cell is green if the output matches; red and hatched, with the number of wrong elements, if it does
    not; purple and cross-hatched if the call was rejected. ``stories``: what each stage changed.
    """
    stages, platforms = _axes_of(cells)
    if ax is None:
        size = (1.5 * len(stages) + 1.5, 0.75 * len(platforms) + 2.1)
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        _draw(ax, cell, stages.index(cell.stage), platforms.index(cell.platform))
    _describe_stages(ax, stages, stories, len(platforms))
    kernels = {cell.platform: cell.decode_kernel or "" for cell in cells}
    decodes = [kernels[name].replace("_attention", "_\nattention") for name in platforms]
    names = [f"{name}\n{kernel}" for name, kernel in zip(platforms, decodes, strict=True)]
    ax.set_yticks([y + 0.5 for y in range(len(platforms))], names, fontsize=9)
    ax.set_xticks([])
    ax.set_xlim(0, len(stages))
    ax.set_ylim(len(platforms) + 1.75, -0.5)
    _bare(ax)
    ax.set_title(title or _finding(cells))
    ax.legend(handles=_entries(cells), loc="lower center", ncols=3, frameon=False)
    return ax


def _axes_of(cells: Sequence["Cell"]) -> tuple[list[str], list[str]]:
    """Return the stages and the platforms of some cells, each once, in order."""
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    return stages, list(dict.fromkeys(cell.platform for cell in cells))


def _draw(ax: Axes, cell: "Cell", x: int, y: int) -> None:
    """Draw one cell: its colour, its hatch, and the number of wrong elements."""
    colour, hatch = STATUS_COLOURS[cell.status], _HATCHES[cell.status]
    corner = (x + (1 - _WIDTH) / 2, y + (1 - _HEIGHT) / 2)
    box = Rectangle(
        corner, _WIDTH, _HEIGHT, facecolor=colour, edgecolor="#ffffff40", linewidth=0, hatch=hatch
    )
    ax.add_patch(box)
    text = "rejected" if cell.mismatched is None else f"{cell.mismatched} wrong"
    words = ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", weight="bold")
    words.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.5})  # hides the hatch


def _describe_stages(
    ax: Axes, stages: Sequence[str], stories: Mapping[str, str], bottom: int
) -> None:
    """Number the stages, connect them with arrows, and describe each below its cells."""
    for x in range(len(stages) - 1):
        arrow = {"arrowstyle": "->", "color": "#707070"}
        ax.annotate("", xy=(x + 1.3, -0.2), xytext=(x + 0.7, -0.2), arrowprops=arrow)
    for x, stage in enumerate(stages):
        ax.text(x + 0.5, -0.2, str(x + 1), ha="center", va="center", weight="bold")
        name = stage.replace("_before_", "_\nbefore_").replace("_after_", "_\nafter_")
        words = ax.text(x + 0.5, bottom + 0.04, name, ha="center", va="top", weight="bold", size=9)
        story = textwrap.fill(stories[stage], 20)
        ax.annotate(story, (0.5, -0.15), xycoords=words, ha="center", va="top", size=8.5)


def _bare(ax: Axes) -> None:
    """Remove tick marks and the frame."""
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def _entries(cells: Sequence["Cell"]) -> list[Patch]:
    """Return the legend's entries for the statuses that occur."""
    found = {cell.status for cell in cells}
    return [
        Patch(facecolor=STATUS_COLOURS[status], hatch=hatch, edgecolor="white", label=status)
        for status, hatch in _HATCHES.items()
        if status in found
    ]


def _finding(cells: Sequence["Cell"]) -> str:
    matches = sum(cell.status == "match" for cell in cells)
    return f"{matches} of {len(cells)} stages and platforms match"
