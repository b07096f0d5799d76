"""Plots of the study alone: its story, the merge of partitions, FP8 formats, and candidate causes."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from attnlab.lab.lab import Cell
from attnlab.show.plots import (
    HATCHES,
    STATUS_COLOURS,
    axes_of,
    draw_cell,
    finding_of,
    hatch_cells,
    put_legend,
    without_frame,
)

NOT_READ, OWN, OTHER_HEAD = range(3)
_LOOK = (("#f2f2f2", "not read"), ("#4e79a7", "its own partition"), ("#e15759", "another head's"))
_STYLES = ("-", "--", ":", "-.")
FLOOR = 1e-9  # the smallest value on a logarithmic axis; 0 is drawn here


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


def plot_formats(meaning: Mapping[str, Any], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the value of each positive byte in each format.

    ``meaning``: [256] values by the name of the format. Zero, infinity and NaN are gaps.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    for i, (name, values) in enumerate(meaning.items()):
        positive = np.asarray(values)[:128]
        shown = np.where(np.isfinite(positive) & (positive > 0), positive, np.nan)
        ax.plot(shown, _STYLES[i % len(_STYLES)], label=name)
    ax.set_yscale("log")
    ax.set_xticks(range(0, 129, 16), [f"0x{byte:02X}" for byte in range(0, 129, 16)])
    ax.set(
        xlabel="byte",
        ylabel="value (gaps are zero, infinity, NaN)",
        title=title or "value of a byte by format",
    )
    ax.legend(frameon=False)
    return ax


def plot_sizes(
    sizes: Mapping[str, tuple[float, float]],
    observed: float,
    *,
    atol: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the range of errors that each candidate predicts, and the observed error.

    ``sizes``: (smallest, largest) absolute error by candidate. A range that contains ``observed`` is green.
    """
    ax = ax or plt.subplots(figsize=(8, 0.9 + 0.5 * len(sizes)), layout="constrained")[1]
    fits = []
    for y, (name, (least, most)) in enumerate(sizes.items()):
        least, most = max(least, FLOOR), max(most, FLOOR)
        fits += [name] if least <= observed <= most else []
        colour = STATUS_COLOURS["match" if name in fits else "mismatch"]
        ax.plot([least, most], [y, y], color=colour, linewidth=7, solid_capstyle="butt")
        ax.plot([least, most], [y, y], "D" if least == most else "|", color=colour, markersize=9)
    ax.axvline(observed, color="#707070", label=f"observed {observed:.4g}")
    ax.axvline(atol, color="red", linestyle="--", linewidth=1, label=f"atol {atol:g}")
    ax.set_xscale("log")
    ax.set_yticks(range(len(sizes)), list(sizes))
    ax.set_ylim(len(sizes) - 0.5, -0.5)
    finding = f"{len(fits)} of {len(sizes)} candidates predict the observed error"
    ax.set(xlabel="largest absolute error", title=title or finding)
    put_legend(ax)
    return ax


def plot_fits(errors: Mapping[str, float], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw how far a row is from what each candidate predicts; the nearest candidate is coloured.

    ``errors``: largest absolute difference by candidate.
    """
    names, values = list(errors), np.maximum(np.array(list(errors.values()), dtype=float), FLOOR)
    ax = ax or plt.subplots(figsize=(7, 0.8 + 0.35 * len(names)), layout="constrained")[1]
    colours = ["#4e79a7" if value == values.min() else "#bab0ac" for value in values]
    ax.barh(range(len(names)), values, color=colours)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    nearest = names[int(values.argmin())] if names else "no candidate"
    ax.set(xlabel="largest absolute difference", title=title or f"nearest: {nearest}")
    return ax


def plot_story(
    cells: Sequence[Cell], stories: Mapping[str, str], *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the stages from left to right, in the order of the test's history, with a row per platform.

    A cell is green if the output matches; red and hatched, with the number of wrong elements, if it does
    not; purple and cross-hatched if the call was rejected. ``stories``: what each stage changed.
    """
    stages, platforms = axes_of(cells)
    if ax is None:
        size = (1.05 * len(stages) + 1.1, 0.75 * len(platforms) + 3.0)
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        draw_cell(ax, cell, stages.index(cell.stage), platforms.index(cell.platform))
    _describe_stages(ax, stages, stories, len(platforms))
    kernels = {cell.platform: cell.decode_kernel or "" for cell in cells}
    decodes = [kernels[name].replace("_attention", "_\nattention") for name in platforms]
    names = [f"{name}\n{kernel}" for name, kernel in zip(platforms, decodes, strict=True)]
    ax.set_yticks([y + 0.5 for y in range(len(platforms))], names, fontsize="small")
    ax.set_xticks([])
    ax.set_xlim(0, len(stages))
    ax.set_ylim(len(platforms) + 2.5, -0.5)
    without_frame(ax)
    ax.set_title(title or finding_of(cells))
    ax.legend(handles=_entries(cells), loc="lower center", ncols=3, frameon=False)
    return ax


def _describe_stages(
    ax: Axes, stages: Sequence[str], stories: Mapping[str, str], bottom: int
) -> None:
    """Number the stages, connect them with arrows, and describe each below its cells."""
    for x in range(len(stages) - 1):
        arrow = {"arrowstyle": "->", "color": "#707070"}
        ax.annotate("", xy=(x + 1.3, -0.2), xytext=(x + 0.7, -0.2), arrowprops=arrow)
    for x, stage in enumerate(stages):
        ax.text(x + 0.5, -0.2, str(x + 1), ha="center", va="center", weight="bold")
        name = stage.replace("_before_", "_\nbefore_\n").replace("_after_", "_\nafter_\n")
        look: dict[str, Any] = {"ha": "center", "va": "top", "size": "small"}
        words = ax.text(x + 0.5, bottom + 0.04, name, weight="bold", **look)
        ax.annotate(textwrap.fill(stories[stage], 14), (0.5, -0.15), xycoords=words, **look)


def _entries(cells: Sequence[Cell]) -> list[Patch]:
    """Return the legend's entries for the statuses that occur."""
    found = {cell.status for cell in cells}
    return [
        Patch(facecolor=STATUS_COLOURS[status], hatch=hatch, edgecolor="white", label=status)
        for status, hatch in HATCHES.items()
        if status in found
    ]
