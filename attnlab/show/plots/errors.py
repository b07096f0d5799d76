"""Pictures: each function draws data that it is given on an Axes, and returns the Axes.

Nothing is computed, shown or saved here. Magnitude is cividis on a logarithmic scale; NaN and rows that
nobody writes have a colour and a hatch outside the map, so that they are seen without colour too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from attnlab.case.lengths import Lengths
from attnlab.lab.error_map import ErrorMap
from attnlab.lab.stage_table import Cell
from attnlab.tensors.cache import NOBODY, Provenance

BAND = 16  # picture rows of a sequence
_NAN, _UNWRITTEN, _IDLE = "#d62728", "#ff9da6", "#d0d0d0"
_STATUS = {"match": "#4c9a5b", "mismatch": "#c8553d", "rejected": "#8d6a9f"}


def plot_error(
    errors: ErrorMap,
    *,
    unwritten: Any = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the error of each token and head; every sequence is equally tall.

    ``unwritten``: [num_tokens] bool, rows that nobody writes, hatched; heads that did not run are grey.
    The tolerance is a line in the colour bar.
    """
    ax = ax or plt.subplots(figsize=(7.5, 5), layout="constrained")[1]
    shown = errors.bands(errors.error, BAND).numpy()
    norm = LogNorm(vmin=1e-9, vmax=max(1.0, errors.atol))
    colours = plt.get_cmap("cividis").with_extremes(bad=_NAN, under=plt.get_cmap("cividis")(0.0))
    image = ax.imshow(
        np.where((shown == 0) | np.isneginf(shown), 1e-12, shown),
        cmap=colours,
        norm=norm,
        aspect="auto",
        interpolation="none",
    )
    handles = []
    if np.isnan(shown).any():
        _hatch(ax, np.isnan(shown), "xx")
        handles.append(Patch(facecolor=_NAN, edgecolor="white", hatch="xx", label="NaN"))
    if unwritten is not None and unwritten.any():
        rows = errors.bands(unwritten[:, None].float(), BAND).numpy()[:, 0] > 0
        _hatch(ax, np.repeat(rows[:, None], shown.shape[1], 1), "///")
        label = "written by nobody"
        handles.append(Patch(facecolor=_UNWRITTEN, edgecolor="black", hatch="///", label=label))
    if errors.heads is not None:
        handles.append(_cover_idle(ax, errors.heads, shown.shape[1]))
    bar = ax.figure.colorbar(image, ax=ax, label="largest absolute error", extend="min")
    bar.ax.axhline(errors.atol, color="red", linewidth=2)
    bar.ax.text(
        1.15, errors.atol, " atol", color="red", va="center", transform=bar.ax.get_yaxis_transform()
    )
    bar.ax.yaxis.set_ticks_position("left")
    bar.ax.yaxis.set_label_position("left")
    _sequence_ticks(ax, errors.lengths)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="query head", title=title or _finding(errors))
    if handles:
        ax.legend(handles=handles, loc="upper right", framealpha=0.9)
    return ax


def _hatch(ax: Axes, mask: Any, hatch: str) -> None:
    """Lay a hatch over the cells of a mask."""
    edges_x = np.arange(mask.shape[1] + 1) - 0.5
    edges_y = np.arange(mask.shape[0] + 1) - 0.5
    hidden = np.ma.masked_where(~mask, np.zeros(mask.shape))
    if hatch == "///":
        cover = ListedColormap([_UNWRITTEN])
        ax.pcolormesh(edges_x, edges_y, hidden, cmap=cover)
    for first, last in _runs(mask.any(1)):
        ax.fill_between(
            [-0.5, mask.shape[1] - 0.5],
            first - 0.5,
            last + 0.5,
            facecolor="none",
            edgecolor="black",
            hatch=hatch,
            linewidth=0,
        )


def _cover_idle(ax: Axes, heads: range, num_heads: int) -> Patch:
    """Cover the columns of heads that did not run, and return their entry of the legend."""
    style: dict[str, Any] = {"facecolor": _IDLE, "edgecolor": "#707070", "hatch": "\\\\"}
    for first, last in ((0, heads.start), (heads.stop, num_heads)):
        if first < last:
            ax.axvspan(first - 0.5, last - 0.5, **style)
    return Patch(**style, label="not run")


def _runs(flags: Any) -> list[tuple[int, int]]:
    """Return (first, last) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(int), [0]))))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _sequence_ticks(ax: Axes, lengths: Lengths) -> None:
    """Label each sequence with its number and lengths, and rule a line between two."""
    count = len(lengths.query_lens)
    ax.set_yticks(
        [BAND * (i + 0.5) - 0.5 for i in range(count)],
        [
            f"{i}: {query_len} on {ctx_len}"
            for i, (query_len, ctx_len) in enumerate(
                zip(lengths.query_lens, lengths.ctx_lens, strict=True)
            )
        ],
        fontsize="small",
    )
    ax.set_ylabel("sequence: new tokens on context")
    for i in range(1, count):
        ax.axhline(BAND * i - 0.5, color="white", linewidth=0.6)


def _finding(errors: ErrorMap) -> str:
    if not errors.mismatched:
        return f"nothing over {errors.atol:g}: largest error {errors.greatest_abs.value:.2g}"
    return f"{errors.mismatched} of {errors.total} elements are off by more than {errors.atol:g}"


def plot_seq_error(
    series: Mapping[str, Sequence[float]],
    lengths: Lengths,
    *,
    atol: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the largest error of each sequence, one series of points a name; NaN sits at the top."""
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    at = np.arange(len(lengths.query_lens))
    for i, (name, errors) in enumerate(series.items()):
        values = np.array(errors, dtype=float)
        shift = (i - (len(series) - 1) / 2) * 0.16
        marker = "osD^vP*X"[i % 8]
        nan = np.isnan(values)
        (line,) = ax.plot(
            at[~nan] + shift, np.maximum(values[~nan], 1e-9), marker, ms=6, label=name
        )
        ax.plot(
            at[nan] + shift,
            np.full(nan.sum(), 30.0),
            marker,
            ms=8,
            mfc="none",
            mec=line.get_color(),
        )
        for x in at[nan]:
            ax.annotate(
                "NaN", (x + shift, 30.0), xytext=(0, 7), textcoords="offset points", ha="center"
            )
    ax.axhline(atol, color="red", linestyle="--", linewidth=1, label=f"atol {atol:g}")
    ax.set_yscale("log")
    ax.set_ylim(5e-10, 300)
    ax.set_xticks(at, [str(i) for i in at])
    ax.set(
        xlabel="sequence (the last has one new token)"
        if lengths.query_lens[-1] == 1
        else "sequence"
    )
    ax.set(ylabel="largest absolute error", title=title)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def plot_stages(cells: Sequence[Cell], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the table of stages: a coloured cell for each stage and platform, with what came of it."""
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    platforms = list(dict.fromkeys(cell.platform for cell in cells))
    if ax is None:
        size = (2.2 + 2.6 * len(platforms), 0.8 + 0.5 * len(stages))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for cell in cells:
        x, y = platforms.index(cell.platform), stages.index(cell.stage)
        ax.add_patch(
            Rectangle((x, y), 0.98, 0.92, color=_STATUS[cell.status], alpha=0.85, linewidth=0)
        )
        text = "rejected" if cell.mismatched is None else f"{cell.mismatched} wrong"
        ax.text(x + 0.49, y + 0.46, text, ha="center", va="center", color="white", weight="bold")
    ax.set_xlim(0, len(platforms))
    ax.set_ylim(len(stages), 0)
    ax.set_xticks(np.arange(len(platforms)) + 0.49, platforms)
    ax.set_yticks(np.arange(len(stages)) + 0.46, stages)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(title)
    return ax


def plot_slots(
    provenance: Provenance,
    seq: int,
    first: int,
    length: int,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw who wrote the slots of some blocks of a sequence: columns ``first`` up to those that hold
    position ``length`` - 1 of its row of the block table."""
    block_size = provenance.seq.shape[1]
    last = -(-length // block_size)
    blocks = provenance.block_table[seq, first:last]
    ax = ax or plt.subplots(figsize=(8, 0.9 + 0.45 * len(blocks)), layout="constrained")[1]
    owner = provenance.seq[blocks].numpy()
    needed = (first * block_size + np.arange(owner.size)).reshape(owner.shape) < length
    state = np.where(owner == seq, 2, np.where(owner == NOBODY, 0, 1))
    state = np.where((owner == NOBODY) & needed, 3, state)
    names = [
        "nobody wrote, nobody reads",
        "another sequence",
        "own token",
        "read, but nobody wrote",
    ]
    colours = ["#d9d9d9", "#b07aa1", "#4e79a7", "#e15759"]
    ax.imshow(state, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto")
    for y, x in np.argwhere(state == 3):
        ax.text(x, y, "!", ha="center", va="center", color="white", weight="bold")
    ax.set_yticks(range(len(blocks)), [f"block {int(b)}" for b in blocks])
    ax.set_xticks(range(0, block_size, 4))
    ax.set(xlabel="slot of the block", title=title)
    handles = [Patch(color=colours[i], label=names[i]) for i in np.unique(state)]
    legend_beside(ax, handles)
    return ax


def legend_beside(ax: Axes, handles: Sequence[Any]) -> None:
    """Put a legend at the right of a picture, outside it."""
    ax.legend(
        handles=handles,
        fontsize="small",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )


def plot_sizes(
    sizes: Mapping[str, tuple[float, float]],
    observed: float,
    *,
    atol: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the range of error that each hypothesis predicts, and the one that was observed."""
    ax = ax or plt.subplots(figsize=(8, 0.9 + 0.5 * len(sizes)), layout="constrained")[1]
    for y, (least, most) in enumerate(sizes.values()):
        least, most = max(least, 1e-9), max(most, 1e-9)
        holds = least <= observed <= most
        colour = _STATUS["match" if holds else "mismatch"]
        marker = "D" if least == most else "|"
        ax.plot([least, most], [y, y], color=colour, linewidth=7, solid_capstyle="butt")
        ax.plot([least, most], [y, y], marker, color=colour, markersize=9)
    ax.axvline(observed, color="black", label=f"observed {observed:.4g}")
    ax.axvline(atol, color="red", linestyle="--", linewidth=1, label=f"atol {atol:g}")
    ax.set_xscale("log")
    ax.set_yticks(range(len(sizes)), list(sizes))
    ax.set_ylim(len(sizes) - 0.5, -0.5)
    ax.set(xlabel="largest absolute error", title=title)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def plot_formats(meaning: Mapping[str, Any], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw what each byte means in each format, the positive ones: [256] numbers a name."""
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    for (name, values), style in zip(meaning.items(), ("-", "--", ":"), strict=False):
        numbers = np.asarray(values)[:128]
        ax.plot(np.where(np.isfinite(numbers) & (numbers > 0), numbers, np.nan), style, label=name)
    ax.set_yscale("log")
    ax.set_xticks(range(0, 129, 16), [f"0x{byte:02X}" for byte in range(0, 129, 16)])
    ax.set(xlabel="byte", ylabel="value (gaps are zero, infinity, NaN)", title=title)
    ax.legend(frameon=False)
    return ax
