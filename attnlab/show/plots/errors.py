"""Plots of errors: of each token and head, and the largest of each sequence."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from attnlab.case.case import Lengths
from attnlab.show.plots.artists import (
    AT_LIMIT,
    COLOURS,
    ErrorScale,
    hatch_cells,
    put_legend,
    short,
)

if TYPE_CHECKING:
    from attnlab.lab.result import ErrorMap

BAND = 16  # rows of the image per sequence
NAN_AT = 1e5  # where plot_seq_error draws NaN, above every error that it draws
_LEAST, _MOST = 1e-9, 1e3  # the errors that plot_seq_error draws; others are drawn at the limits
_MAX_LABELS = 16  # of the sequences of a picture
_IN_CORNER: Mapping[str, Any] = {"loc": "upper right", "framealpha": 0.9}
_NAN, _UNWRITTEN, _IDLE = "#111111", "#c9a0dc", "#d0d0d0"


def plot_error(
    errors: "ErrorMap",
    *,
    unwritten: Any = None,
    cache_of: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the largest error of each token and head; every sequence has the same height.

    Errors within the tolerance are grey to blue, larger ones orange to red, both on a logarithmic scale; a
    line in the colour bar marks the tolerance, or the largest of the elements' rounding bounds. NaN is black
    and hatched. ``unwritten``: [num_tokens] bool, rows that no kernel writes, violet and hatched. Heads that
    did not run are grey and hatched.
    ``cache_of``: for an op that writes the cache, the number of sequences. Each row is then a slot; slots
    after those of the last sequence have no owner.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.4), layout="constrained")[1]
    bar = frame_errors(ax, len(errors.lengths.query_lens), errors.error.shape[1], cache_of)
    label_errors(ax, bar, errors, cache_of)
    draw_errors(ax, errors, unwritten=unwritten, title=title)
    return ax


def frame_errors(ax: Axes, num_seqs: int, num_heads: int, cache_of: int | None) -> Axes:
    """Draw what :func:`plot_error` draws of any errors of this size; return the axes of the colour bar."""
    ax.set(xlim=(-0.5, num_heads - 0.5), ylim=(BAND * num_seqs - 0.5, -0.5))
    ax.set_xlabel("query head" if cache_of is None else "KV head")
    ax.set_ylabel("sequence: new tokens on context" if cache_of is None else "slots of sequence")
    step = 1
    while num_heads > 9 * step:
        step *= 2
    ax.set_xticks(range(0, num_heads, step))
    bar = ax.figure.colorbar(ScalarMappable(cmap=COLOURS), ax=ax, label="largest absolute error")
    bar.ax.axhline(AT_LIMIT, color="black", linewidth=2)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    return bar.ax


def label_errors(ax: Axes, bar: Axes, errors: "ErrorMap", cache_of: int | None) -> None:
    """Label the rows and the colour bar of :func:`frame_errors` for some lengths and an error scale."""
    count = len(errors.lengths.query_lens)
    shown = range(0, count, -(-count // _MAX_LABELS))
    labels = [sequence_label(errors.lengths, i, cache_of) for i in shown]
    ax.set_yticks([BAND * (i + 0.5) - 0.5 for i in shown], labels, fontsize="small")
    _bar_ticks(bar, error_scale(errors), errors.is_derived)


def error_scale(errors: "ErrorMap") -> ErrorScale:
    """Return the scale of the colours of :func:`plot_error`."""
    return ErrorScale.of(errors.atol, errors.error.numpy())


def draw_errors(
    ax: Axes,
    errors: "ErrorMap",
    *,
    unwritten: Any = None,
    title: str = "",
    legend: Mapping[str, Any] = _IN_CORNER,
) -> None:
    """Draw errors on the axes of :func:`frame_errors`; see :func:`plot_error`."""
    shown = errors.bands(errors.error, BAND).numpy()
    is_wrong = errors.bands(errors.mismatches, BAND).numpy() > 0
    scale = error_scale(errors)
    ax.imshow(
        scale.clip(shown, is_wrong),
        cmap=COLOURS.with_extremes(bad=_NAN),
        norm=scale.norm(),
        aspect="auto",
        interpolation="none",
        interpolation_stage="rgba",  # a colour per cell, not per pixel
    )
    handles = _cover(ax, errors, shown, unwritten)
    edges = BAND * np.arange(1, len(errors.lengths.query_lens)) - 0.5
    ax.hlines(edges, *ax.get_xlim(), colors="white", linewidths=0.6)
    ax.set_title(title or _finding(errors))
    if handles:
        ax.legend(handles=handles, **legend)


def _cover(ax: Axes, errors: "ErrorMap", shown: Any, unwritten: Any) -> list[Patch]:
    """Cover NaN, unwritten rows and heads that did not run; return their entries of the legend."""
    entries = []
    if np.isnan(shown).any():
        hatch_cells(ax, np.isnan(shown), "xx", "white")
        entries.append(Patch(facecolor=_NAN, edgecolor="white", hatch="xx", label="NaN"))
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


def _bar_ticks(bar: Axes, scale: ErrorScale, is_derived: bool) -> None:
    """Label the colour bar with errors; the line at its middle is the tolerance or the largest bound."""
    ticks = scale.ticks()
    # Two lines: a panel has little space next to the bar.
    limit = f"bound\n{scale.atol:.1e}" if is_derived else f"atol\n{scale.atol:g}"
    labels = [limit if t == scale.atol else short(t) for t in ticks]
    bar.set_yticks(scale.norm()(ticks), labels)


def sequence_label(lengths: Lengths, i: int, cache_of: int | None) -> str:
    """Return the label of sequence ``i`` of a picture; ``cache_of`` as for :func:`plot_error`."""
    if cache_of is None:
        return f"{i}: {lengths.query_lens[i]} on {lengths.ctx_lens[i]}"
    owner = str(i) if i < cache_of else "none"
    return f"{owner}: {lengths.query_lens[i]} slots"


def _finding(errors: "ErrorMap") -> str:
    limit = "rounding" if errors.is_derived else f"{errors.atol:g}"
    if not errors.mismatched:
        return f"no error above {limit}: largest error {errors.greatest_abs.value:.2g}"
    return f"{errors.mismatched} of {errors.total} elements are off by more than {limit}"


def plot_seq_error(
    series: Mapping[str, Sequence[float]],
    lengths: Lengths,
    *,
    atol: float,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the largest error of each sequence.

    ``series``: [num_seqs] errors by name, one marker each. NaN is an empty marker at the top, where the
    axis has the label NaN.
    """
    ax = ax or plt.subplots(figsize=(7.5, 3.6), layout="constrained")[1]
    has_nan = bool(np.isnan(np.array(list(series.values()), dtype=float)).any())
    frame_seq_errors(ax, lengths, has_nan=has_nan)
    draw_seq_errors(ax, series, atol=atol, title=title or _seq_finding(series, atol))
    put_legend(ax)
    return ax


def frame_seq_errors(ax: Axes, lengths: Lengths, *, has_nan: bool) -> None:
    """Draw what :func:`plot_seq_error` draws of any errors; ``has_nan``: whether one is NaN."""
    count = len(lengths.query_lens)
    ax.set_yscale("log")
    ax.set(xlim=(-0.5, count - 0.5), ylim=(_LEAST / 3, NAN_AT * 10))
    ticks = [1e-9, 1e-6, 1e-3, 1.0, 1e3] + [NAN_AT] * has_nan
    ax.set_yticks(ticks, [*map(short, ticks[:5]), *["NaN"] * has_nan])
    ax.yaxis.set_minor_locator(NullLocator())
    shown = range(0, count, -(-count // _MAX_LABELS))
    ax.set_xticks(shown, [str(i) for i in shown])
    one_token = lengths.query_lens[-1] == 1
    ax.set_xlabel("sequence (the last has one new token)" if one_token else "sequence")
    ax.set_ylabel("largest absolute error")


def draw_seq_errors(
    ax: Axes, series: Mapping[str, Sequence[float]], *, atol: float, title: str
) -> None:
    """Draw errors on the axes of :func:`frame_seq_errors`; see :func:`plot_seq_error`."""
    for i, (name, errors) in enumerate(series.items()):
        at = np.arange(len(errors)) + (i - (len(series) - 1) / 2) * 0.16
        _points(ax, at, np.array(errors, dtype=float), "osD^vP*X"[i % 8], name)
    ax.axhline(atol, color="red", linestyle="--", linewidth=1, label=f"atol {atol:g}")
    ax.set_title(title)


def _points(ax: Axes, x: Any, errors: Any, marker: str, name: str) -> None:
    """Draw one series of points, and its NaN with empty markers."""
    nan = np.isnan(errors)
    drawn = np.clip(errors[~nan], _LEAST, _MOST)
    (line,) = ax.plot(x[~nan], drawn, marker, ms=6, label=name)
    ax.plot(x[nan], np.full(nan.sum(), NAN_AT), marker, ms=8, mfc="none", mec=line.get_color())


def _seq_finding(series: Mapping[str, Sequence[float]], atol: float) -> str:
    columns = np.array(list(series.values()), dtype=float)
    wrong = np.flatnonzero((~(columns <= atol)).any(0))
    if not len(wrong):
        return f"no sequence is off by more than {atol:g}"
    return f"{len(wrong)} of {columns.shape[1]} sequences are off by more than {atol:g}"
