"""Plots of an X-ray: weights by row and key, and log weights against the right ones."""

from typing import TYPE_CHECKING, Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnlab.show.plots.artists import hatch_cells, put_legend
from attnlab.tensors.visibility import SequenceMask

if TYPE_CHECKING:
    from attnlab.weights.xray import KeyColumns, LawPoints

Which = Literal["measured", "expected", "difference"]
_LEAST = 1e-5  # the smallest weight that has a colour
_NAN = "#c9a0dc"
_TITLES = {
    "measured": "measured weights",
    "expected": "expected weights",
    "difference": "measured - expected",
}


def plot_weights(
    columns: "KeyColumns", *, which: Which = "measured", title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the weights of a sequence's rows and one head: a row per token, a column per key.

    Keys are in logical order. :func:`edge_legend` names the lines: edges of blocks and tiles, the end of the
    context and of the sequence, and the begin of the sums over foreign slots. NaN is violet and hatched.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.4), layout="constrained")[1]
    values = getattr(columns, which).numpy()
    drawn = values if which == "difference" else np.maximum(values, _LEAST / 10)
    style, own = _colours(values, which), columns.own
    end = own + len(columns.foreign) * columns.foreign_width
    image = ax.imshow(drawn[:, :own], aspect="auto", interpolation="none", **style)
    ax.imshow(
        drawn[:, own:],
        aspect="auto",
        interpolation="none",
        extent=(own - 0.5, end - 0.5, len(values) - 0.5, -0.5),
        **style,
    )
    ax.set_xlim(-0.5, end - 0.5)
    if np.isnan(values).any():
        widths = [1] * own + [columns.foreign_width] * len(columns.foreign)
        hatch_cells(ax, np.repeat(np.isnan(values), widths, axis=1), "//", "black")
    _edges(ax, columns)
    _ticks(ax, columns)
    label = "measured - expected" if which == "difference" else f"{which} weight"
    ax.figure.colorbar(image, ax=ax, label=label)
    where = f"sequence {columns.seq}, head {columns.head}"
    ax.set(ylabel="output row", title=title or f"{_TITLES[which]}: {where}")
    return ax


def _colours(values: Any, which: str) -> dict[str, Any]:
    """Return the colour map and the norm of an image."""
    if which == "difference":
        # rounding must not look like a fault: the scale is at least 1 % of a weight of 1
        largest = max(float(np.nanmax(np.abs(values), initial=0.0)), 0.01)
        colours = plt.get_cmap("RdBu_r").with_extremes(bad=_NAN)
        return {"cmap": colours, "norm": TwoSlopeNorm(0.0, -largest, largest)}
    colours = plt.get_cmap("viridis").with_extremes(under="#80808030", bad=_NAN)
    return {"cmap": colours, "norm": LogNorm(_LEAST, 1.0)}


_LINES: dict[str, dict[str, Any]] = {
    "block edge": {"color": "#9a9a9a", "linewidth": 0.8},
    "tile edge": {"color": "#e0218a", "linewidth": 0.9, "linestyle": (0, (4, 3))},
    "end of the context": {"color": "tab:orange", "linewidth": 1.6},
    "end of the sequence, begin of foreign slots": {
        "color": "tab:red", "linewidth": 1.0, "linestyle": "--",
    },
}  # fmt: skip


def _edges(ax: Axes, columns: "KeyColumns") -> None:
    """Draw the edges of blocks and tiles, the end of the context, and the begin of tail and foreign slots."""
    own = columns.own
    step = columns.block_size * max(1, own // columns.block_size // 64)
    thin = max(1, len(columns.tiles) // 64)
    edges = (range(step, own, step), columns.tiles[thin - 1 :: thin], (columns.context,))
    for (name, style), found in zip(
        _LINES.items(), (*edges, {columns.positions, own}), strict=True
    ):
        for edge in found:
            ax.axvline(edge - 0.5, gid=name, **style)


def edge_legend(columns: "KeyColumns") -> list[Line2D]:
    """Return the entries of a legend for the lines of a picture of weights."""
    left_out = () if columns.tiles else ("tile edge",)
    return [
        Line2D([], [], label=name, **style)
        for name, style in _LINES.items()
        if name not in left_out
    ]


def _ticks(ax: Axes, columns: "KeyColumns") -> None:
    """Label some positions, the foreign columns, and some rows."""
    own, width = columns.own, columns.foreign_width
    step = max(1, -(-own // 8))
    ticks: list[float] = list(range(0, own, step))
    labels = [f"{tick:.0f}" for tick in ticks]
    ticks += [own + index * width + (width - 1) / 2 for index in range(len(columns.foreign))]
    labels += list(columns.foreign)
    ax.set_xticks(ticks, labels, fontsize="small")
    for label in ax.get_xticklabels()[len(ticks) - len(columns.foreign) :]:
        label.set(rotation=40, ha="right", rotation_mode="anchor")
    ax.set_xlabel("key position (then other slots)")
    rows = columns.rows.tolist()
    every = max(1, -(-len(rows) // 12))
    ax.set_yticks(range(0, len(rows), every), [str(row) for row in rows[::every]], fontsize="small")


def plot_law(points: "LawPoints", *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the logarithm of measured weights against that of the right ones; the line is equality."""
    ax = ax or plt.subplots(figsize=(4.6, 3.8), layout="constrained")[1]
    expected, measured = points.expected.numpy(), points.measured.numpy()
    wrong = points.wrong.numpy()
    for mask, colour, name in (
        (~wrong, "tab:blue", "right rows"),
        (wrong, "tab:red", "wrong rows"),
    ):
        if mask.any():
            ax.plot(expected[mask], measured[mask], ".", ms=3, alpha=0.5, color=colour, label=name)
    if len(expected):
        ends = [float(expected.min()), float(expected.max())]
        ax.plot(ends, ends, color="gray", linewidth=1, label="equal")
    ax.set(
        xlabel="log of the expected weight",
        ylabel="log of the measured weight",
        title=title or "measured against expected",
    )
    ax.legend(loc="upper left", fontsize="small", frameon=False)
    return ax


def plot_xray(
    columns: "KeyColumns", points: "LawPoints", *, figure: Figure | None = None
) -> Figure:
    """Draw an X-ray: measured weights, expected weights, their difference, and the log weights."""
    figure = figure or plt.figure(figsize=(12, 7), layout="constrained")
    (measured, expected), (difference, law) = figure.subplots(2, 2)
    plot_weights(columns, which="measured", ax=measured)
    plot_weights(columns, which="expected", ax=expected)
    plot_weights(columns, which="difference", ax=difference)
    plot_law(points, ax=law)
    figure.legend(
        handles=edge_legend(columns),
        loc="outside lower left",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
    return figure


# What a key is to a row, by its code in the image: colour and text.
HIDDEN, VISIBLE, FUTURE, BIASED = range(4)
_KINDS = {
    HIDDEN: ("#e3e3e3", "hidden"),
    VISIBLE: ("#3f6f9f", "visible"),
    FUTURE: ("#f28e2b", "visible, after the row"),
    BIASED: ("#59a14f", "visible, with a bias"),
}
MOST_ROWS = 512


def mask_codes(mask: SequenceMask) -> Any:
    """Return what each key is to each new token, [rows, seq_len] codes; of at most 512 rows."""
    last = min(mask.seq_len, mask.ctx_len + MOST_ROWS)
    at = torch.arange(mask.ctx_len, last)
    seen, bias = mask.visible(at), mask.bias(at)
    codes = seen.int() * VISIBLE
    codes[seen & (torch.arange(mask.seq_len) > at[:, None])] = FUTURE
    if bias is not None:
        codes[seen & (bias != 0)] = BIASED
    return codes.numpy()


def plot_mask(mask: SequenceMask, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw which keys the rows of a sequence see: a row per new token, a column per key.

    The line is the end of the context.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.4), layout="constrained")[1]
    codes = mask_codes(mask)
    colours = ListedColormap([colour for colour, _ in _KINDS.values()])
    ax.imshow(codes, cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto", interpolation="none")
    ax.axvline(mask.ctx_len - 0.5, color="black", linewidth=1.2)
    found = {int(code) for code in np.unique(codes)}
    entries = [
        Patch(facecolor=c, label=text) for code, (c, text) in _KINDS.items() if code in found
    ]
    put_legend(ax, entries, below=True)
    share = float((codes != HIDDEN).mean()) if codes.size else 0.0
    where = f"sequence {mask.seq}: rows see {share:.0%} of {mask.seq_len} keys"
    ax.set(xlabel="key position", ylabel="new token", title=title or where)
    return ax
