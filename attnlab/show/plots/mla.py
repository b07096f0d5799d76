"""Plot of an MLA path: the error of each row at each step, as a multiple of its bound."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable

from attnlab.show.plots.artists import hatch_cells
from attnlab.show.plots.error_scale import COLOURS, ErrorScale

if TYPE_CHECKING:
    from attnlab.mla.mla_result import MlaResult

_INFINITE = 1e6  # drawn for an error without limit


def plot_mla(
    result: "MlaResult", *, title: str = "", ax: Axes | None = None, colourbar: bool = True
) -> Axes:
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
    ends = [*starts[1:-1], starts[-1]]
    for end in ends[:-1]:
        ax.axvline(end - 0.5, color="#808080", linewidth=1)
    middles = [(a + b - 1) / 2 for a, b in zip(starts, ends, strict=False)]
    names = [f"seq {i}\ncontext {c}" for i, c in enumerate(result.case.ctx_lens)]
    ax.set_xticks(middles, names)
    ax.tick_params(length=0)
    ax.set_xlabel("rows, by sequence")
    ax.set_title(title or mla_finding(result))
    if colourbar:
        bar = ax.figure.colorbar(
            ScalarMappable(norm, COLOURS), ax=ax, ticks=scale.ticks(), pad=0.02
        )
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
