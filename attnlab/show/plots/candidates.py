"""Plots of candidate causes: the error that each predicts, and how well each fits a row."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from attnlab.show.plots.artists import STATUS_COLOURS, put_legend

FLOOR = 1e-9  # the smallest value on a logarithmic axis; 0 is drawn here


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
