"""Plots of errors: of each token and head, and the largest of each sequence."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from attnlab.case.lengths import Lengths
from attnlab.show.plots.artists import hatch_cells, put_legend

if TYPE_CHECKING:
    from attnlab.lab.error_map import ErrorMap

BAND = 16  # rows of the image per sequence
NAN_AT = 30.0  # where plot_seq_error draws NaN
_NAN, _UNWRITTEN, _IDLE = "#d62728", "#ff9da6", "#d0d0d0"


def plot_error(
    errors: "ErrorMap", *, unwritten: Any = None, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the largest error of each token and head; every sequence has the same height.

    NaN is red and hatched. ``unwritten``: [num_tokens] bool, rows that no kernel writes, pink and hatched.
    Heads that did not run are grey and hatched. A line in the colour bar marks the tolerance.
    """
    ax = ax or plt.subplots(figsize=(7.5, 5), layout="constrained")[1]
    shown = errors.bands(errors.error, BAND).numpy()
    cividis = plt.get_cmap("cividis")
    image = ax.imshow(
        np.where((shown == 0) | np.isneginf(shown), 1e-12, shown),
        cmap=cividis.with_extremes(bad=_NAN, under=cividis(0.0)),
        norm=LogNorm(vmin=1e-9, vmax=max(1.0, errors.atol)),
        aspect="auto",
        interpolation="none",
    )
    handles = _cover(ax, errors, shown, unwritten)
    _colour_bar(ax, image, errors.atol)
    _sequence_ticks(ax, errors.lengths)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="query head", title=title or _finding(errors))
    if handles:
        ax.legend(handles=handles, loc="upper right", framealpha=0.9)
    return ax


def _cover(ax: Axes, errors: "ErrorMap", shown: Any, unwritten: Any) -> list[Patch]:
    """Cover NaN, unwritten rows and heads that did not run; return their entries of the legend."""
    entries = []
    if np.isnan(shown).any():
        hatch_cells(ax, np.isnan(shown), "xx", "black")
        entries.append(Patch(facecolor=_NAN, edgecolor="black", hatch="xx", label="NaN"))
    if unwritten is not None and unwritten.any():
        rows = errors.bands(unwritten[:, None].float(), BAND).numpy()[:, 0] > 0
        mask = np.repeat(rows[:, None], shown.shape[1], 1)
        hatch_cells(ax, mask, "///", "black", facecolour=_UNWRITTEN)
        label = "written by no kernel"
        entries.append(Patch(facecolor=_UNWRITTEN, edgecolor="black", hatch="///", label=label))
    if errors.heads is not None:
        style: dict[str, Any] = {"facecolor": _IDLE, "edgecolor": "#707070", "hatch": "\\\\"}
        for first, end in ((0, errors.heads.start), (errors.heads.stop, shown.shape[1])):
            if first < end:
                ax.axvspan(first - 0.5, end - 0.5, **style)
        entries.append(Patch(**style, label="not run"))
    return entries


def _colour_bar(ax: Axes, image: Any, atol: float) -> None:
    """Add the colour bar, with the tolerance marked."""
    bar = ax.figure.colorbar(image, ax=ax, label="largest absolute error", extend="min")
    bar.ax.axhline(atol, color="red", linewidth=2)
    transform = bar.ax.get_yaxis_transform()
    bar.ax.text(1.15, atol, " atol", color="red", va="center", transform=transform)
    bar.ax.yaxis.set_ticks_position("left")
    bar.ax.yaxis.set_label_position("left")


def _sequence_ticks(ax: Axes, lengths: Lengths) -> None:
    """Label each sequence with its number and lengths, and draw a line between two sequences."""
    pairs = list(zip(lengths.query_lens, lengths.ctx_lens, strict=True))
    ax.set_yticks(
        [BAND * (i + 0.5) - 0.5 for i in range(len(pairs))],
        [f"{i}: {query_len} on {ctx_len}" for i, (query_len, ctx_len) in enumerate(pairs)],
        fontsize="small",
    )
    ax.set_ylabel("sequence: new tokens on context")
    for i in range(1, len(pairs)):
        ax.axhline(BAND * i - 0.5, color="white", linewidth=0.6)


def _finding(errors: "ErrorMap") -> str:
    if not errors.mismatched:
        return f"no error above {errors.atol:g}: largest error {errors.greatest_abs.value:.2g}"
    return f"{errors.mismatched} of {errors.total} elements are off by more than {errors.atol:g}"


def plot_seq_error(
    series: Mapping[str, Sequence[float]],
    lengths: Lengths,
    *,
    atol: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the largest error of each sequence.

    ``series``: [num_seqs] errors by name, one marker each. NaN is an empty marker at the top.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    at = np.arange(len(lengths.query_lens))
    for i, (name, errors) in enumerate(series.items()):
        shift = (i - (len(series) - 1) / 2) * 0.16
        _points(ax, at + shift, np.array(errors, dtype=float), "osD^vP*X"[i % 8], name)
    ax.axhline(atol, color="red", linestyle="--", linewidth=1, label=f"atol {atol:g}")
    ax.set_yscale("log")
    ax.set_ylim(5e-10, 300)
    ax.set_xticks(at, [str(i) for i in at])
    one_token = lengths.query_lens[-1] == 1
    ax.set(
        xlabel="sequence (the last has one new token)" if one_token else "sequence",
        ylabel="largest absolute error",
        title=title or _seq_finding(series, atol),
    )
    put_legend(ax)
    return ax


def _points(ax: Axes, x: Any, errors: Any, marker: str, name: str) -> None:
    """Draw one series of points, and its NaN with empty markers."""
    nan = np.isnan(errors)
    (line,) = ax.plot(x[~nan], np.maximum(errors[~nan], 1e-9), marker, ms=6, label=name)
    ax.plot(x[nan], np.full(nan.sum(), NAN_AT), marker, ms=8, mfc="none", mec=line.get_color())
    for place in x[nan]:
        offset: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
        ax.annotate("NaN", (place, NAN_AT), **offset)


def _seq_finding(series: Mapping[str, Sequence[float]], atol: float) -> str:
    columns = np.array(list(series.values()), dtype=float)
    wrong = np.flatnonzero((~(columns <= atol)).any(0))
    if not len(wrong):
        return f"no sequence is off by more than {atol:g}"
    return f"{len(wrong)} of {columns.shape[1]} sequences are off by more than {atol:g}"
