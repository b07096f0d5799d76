"""Plots of the stages of a test: as a table, and as a story from the first stage to the last."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.patches import Rectangle

from attnlab.show.plots.artists import COLOURS, STATUS_COLOURS, ErrorScale, hatch_cells, put_legend

if TYPE_CHECKING:
    from attnlab.lab.lab import Cell
    from attnlab.mla.run import MlaResult
    from attnlab.mutation.power import Mutant

# A hatch for each status, so that the colour is not needed to read the plot.
HATCHES = {"match": "", "mismatch": "///", "rejected": "xx"}
_WIDTH, _HEIGHT = 0.94, 0.82  # of a cell


def plot_stages(cells: Sequence["Cell"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the table of stages: a row per stage, a column per platform, and the number of wrong elements."""
    stages, platforms = axes_of(cells)
    if ax is None:
        size = (2.2 + 2.6 * len(platforms), 0.8 + 0.5 * len(stages))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        draw_cell(ax, cell, platforms.index(cell.platform), stages.index(cell.stage))
    ax.set_xlim(0, len(platforms))
    ax.set_ylim(len(stages), 0)
    ax.set_xticks([x + 0.5 for x in range(len(platforms))], platforms)
    ax.set_yticks([y + 0.5 for y in range(len(stages))], stages)
    ax.xaxis.tick_top()
    without_frame(ax)
    ax.set_title(title or finding_of(cells))
    return ax


def axes_of(cells: Sequence["Cell"]) -> tuple[list[str], list[str]]:
    """Return the stages and the platforms of some cells, each once, in order."""
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    return stages, list(dict.fromkeys(cell.platform for cell in cells))


def draw_cell(ax: Axes, cell: "Cell", x: int, y: int) -> None:
    """Draw one cell: its colour, its hatch, and the number of wrong elements."""
    colour, hatch = STATUS_COLOURS[cell.status], HATCHES[cell.status]
    corner = (x + (1 - _WIDTH) / 2, y + (1 - _HEIGHT) / 2)
    box = Rectangle(
        corner, _WIDTH, _HEIGHT, facecolor=colour, edgecolor="#ffffff40", linewidth=0, hatch=hatch
    )
    ax.add_patch(box)
    text = "rejected" if cell.mismatched is None else f"{cell.mismatched}\nwrong"
    words = ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", weight="bold")
    words.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.5})  # hides the hatch


def without_frame(ax: Axes) -> None:
    """Remove tick marks and the frame."""
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def finding_of(cells: Sequence["Cell"]) -> str:
    """Return how many cells match, in words."""
    matches = sum(cell.status == "match" for cell in cells)
    return f"{matches} of {len(cells)} stages and platforms match"


_LOOK = {  # colour and marker by outcome
    "killed": (STATUS_COLOURS["match"], "o"),
    "survived": (STATUS_COLOURS["mismatch"], "X"),
    "equivalent": ("#8c8c8c", "s"),
}
_EDGES = 1e-9, 1e6


def plot_power(mutants: Sequence["Mutant"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the largest effect of each mutant divided by the tolerance: above 1 the test kills it.

    NaN and infinity are at the right edge, no effect at the left edge.
    """
    ax = ax or plt.subplots(figsize=(8, 0.8 + 0.2 * len(mutants)), layout="constrained")[1]
    for outcome, (colour, marker) in _LOOK.items():
        at = [(y, m.margin) for y, m in enumerate(mutants) if m.outcome == outcome]
        ax.plot(
            [min(max(margin, _EDGES[0]), _EDGES[1]) for _, margin in at],
            [y for y, _ in at],
            marker,
            color=colour,
            label=f"{outcome}: {len(at)}",
        )
    ax.axvline(1.0, color="red", linestyle="--", linewidth=1, label="the test's tolerance")
    ax.set_xscale("log")
    ax.set_xlim(_EDGES[0] / 3, _EDGES[1] * 3)
    ax.set_yticks(range(len(mutants)), [mutant.name for mutant in mutants], fontsize="small")
    ax.set_ylim(len(mutants) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    ax.set(
        xlabel="largest effect / tolerance (NaN and infinity: right edge)",
        title=title or _power_finding(mutants),
    )
    put_legend(ax)
    return ax


def _power_finding(mutants: Sequence["Mutant"]) -> str:
    killed = sum(mutant.outcome == "killed" for mutant in mutants)
    fair = sum(mutant.outcome != "equivalent" for mutant in mutants)
    return f"the test kills {killed} of {fair} mutants that its data can show"


_INFINITE = 1e6  # drawn for an error without limit


def plot_mla(result: "MlaResult", *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the largest error over heads of each step and row; hatched cells are not finite.

    Colours change where an error exceeds its bound.
    """
    ratios = mla_ratios(result)
    if ax is None:
        size = (2.6 + 0.32 * ratios.shape[1], 1.3 + 0.36 * ratios.shape[0])
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    scale = ErrorScale.of(1.0, np.minimum(ratios, _INFINITE))
    shown = scale.clip(np.minimum(ratios, scale.most), ratios > 1)
    norm = scale.norm()
    ax.imshow(shown, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
    hatch_cells(ax, ~np.isfinite(ratios), "xxx", "#402020")
    ax.set_yticks(range(len(result.steps)), [one.name for one in result.steps])
    starts = np.cumsum([0, *result.case.query_lens])
    for end in starts[1:-1]:
        ax.axvline(end - 0.5, color="#808080", linewidth=1)
    middles = (starts[:-1] + starts[1:] - 1) / 2
    names = [f"seq {i}\n{c}" for i, c in enumerate(result.case.ctx_lens)]
    ax.set_xticks(middles, names)
    ax.tick_params(length=0)
    ax.set_xlabel("rows, by sequence and its context length")
    ax.set_title(title or mla_finding(result))
    bar = ax.figure.colorbar(ScalarMappable(norm, COLOURS), ax=ax, ticks=scale.ticks(), pad=0.02)
    bar.ax.set_yticklabels([f"{tick:.0e}" if tick != 1 else "bound" for tick in scale.ticks()])
    bar.set_label("error / bound")
    return ax


def mla_ratios(result: "MlaResult") -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Return the largest error over heads as a multiple of its bound, [steps, rows]."""
    return np.stack([one.ratio.amax(1).numpy() for one in result.steps])


def mla_finding(result: "MlaResult") -> str:
    """Return what the picture shows, in one line."""
    if result.status == "match":
        return "every step is within its bound"
    return f"first wrong step: {result.first_wrong}"
