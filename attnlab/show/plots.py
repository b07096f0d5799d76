"""Plot functions: each draws the data that it receives on an Axes, and returns the Axes.

None of them computes results, shows a figure or saves one. Magnitudes use cividis on a logarithmic scale. NaN
and unwritten elements have a colour outside the colour map and a hatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import (
    FuncNorm,
    LinearSegmentedColormap,
    ListedColormap,
    LogNorm,
    TwoSlopeNorm,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from attnlab.case.case import Lengths
from attnlab.contracts.slot_states import EMPTY, FOREIGN, NOT_READ, STATES, SlotMap, SlotState
from attnlab.tensors.cache import NOBODY
from attnlab.tensors.visibility import SequenceMask

if TYPE_CHECKING:
    from attnlab.lab.lab import Cell
    from attnlab.lab.result import ErrorMap
    from attnlab.mla.run import MlaResult
    from attnlab.mutation.power import Mutant
    from attnlab.weights.xray import KeyColumns, LawPoints

# White text on them has a contrast of at least 4.5 to 1.
STATUS_COLOURS = {"match": "#3d8049", "mismatch": "#bf4f37", "rejected": "#86639a"}


def hatch_cells(
    ax: Axes, mask: Any, hatch: str, colour: str, *, facecolour: str = "none"
) -> PolyCollection:
    """Lay a hatch over the cells of an image, and return the artist.

    ``mask``: [rows, columns] bool, in the image's coordinates, where the centre of a cell is an integer.
    """
    boxes = []
    for column in np.flatnonzero(np.asarray(mask).any(0)):
        for first, last in runs(np.asarray(mask)[:, column]):
            left, right, top, bottom = column - 0.5, column + 0.5, first - 0.5, last + 0.5
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    cells = PolyCollection(
        boxes, facecolors=facecolour, edgecolors=colour, hatch=hatch, linewidths=0
    )
    ax.add_collection(cells, autolim=False)
    return cells


def runs(flags: Any) -> list[tuple[int, int]]:
    """Return (first, last) of each run of true values in a one-dimensional array."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(flags).astype(int), [0]))))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def put_legend(ax: Axes, handles: Sequence[Any] | None = None, *, below: bool = False) -> None:
    """Put a legend outside the axes, at the right or below; without ``handles``, of the labelled artists."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    if below:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "ncols": 5}
        place |= {"columnspacing": 1.2, "handlelength": 1.5}
    if handles is not None:
        place["handles"] = handles
    ax.legend(fontsize="small", frameon=False, **place)


_HALF = 128  # colours on each side of the tolerance
_DECADES_WITHIN = 3  # decades from the least error to the tolerance
AT_LIMIT = 0.499  # the place of the tolerance in the colours, from 0 to 1
_LEAST_ATOL = 1e-12  # takes the place of the tolerance 0
_WITHIN = LinearSegmentedColormap.from_list("within", ["#f3f5f8", "#87a0bd"])
_ABOVE = mpl.colormaps["YlOrRd"]
COLOURS = ListedColormap(
    [*_WITHIN(np.linspace(0, 1, _HALF)), *_ABOVE(np.linspace(0.4, 1, _HALF))], name="errors"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScale:
    """A logarithmic scale in two halves: errors within the tolerance, and larger ones up to ``most``."""

    atol: float
    most: float

    @classmethod
    def of(cls, atol: float, errors: Any) -> "ErrorScale":
        """Return the scale of some errors; its upper limit is a power of 10.

        The largest error takes the place of an infinite tolerance.
        """
        finite = errors[np.isfinite(errors)]
        largest = float(finite.max(initial=0.0))
        atol = max(atol if np.isfinite(atol) else largest, _LEAST_ATOL)
        largest = max(largest, 10 * atol)
        return cls(atol=atol, most=10.0 ** np.ceil(np.log10(largest) - 1e-6))

    @property
    def least(self) -> float:
        """Return the lower limit; smaller errors have the colour of this one."""
        return self.atol * 0.1**_DECADES_WITHIN

    def clip(self, errors: Any, is_wrong: Any) -> Any:
        """Return errors for an image: above the tolerance exactly where elements mismatch; NaN is kept.

        They differ if there is a relative tolerance.
        """
        right = np.clip(errors, self.least, self.atol)
        wrong = np.clip(errors, self.atol * 1.001, self.most)
        return np.where(is_wrong, wrong, right)

    def norm(self) -> FuncNorm:
        """Return the norm: the tolerance is at the middle of the colours."""
        return FuncNorm((self._to_share, self._to_error), vmin=self.least, vmax=self.most)

    def ticks(self) -> list[float]:
        """Return the errors to label: both limits, the tolerance, and some decades above it."""
        decades = round(np.log10(self.most / self.atol))
        step = max(1, -(-decades // 3))
        above = [self.most / 10**i for i in range(0, decades, step)]
        return [self.least, self.atol, *sorted(t for t in above if t > 3 * self.atol)]

    def _to_share(self, errors: Any) -> Any:
        """Return the place of errors in the colours, from 0 to 1."""
        errors = np.clip(np.asarray(errors, dtype=float), self.least, self.most)
        within = np.log10(errors / self.least) / _DECADES_WITHIN
        above = np.log10(errors / self.atol) / np.log10(self.most / self.atol)
        return np.where(errors <= self.atol, AT_LIMIT * within, 0.501 + 0.499 * above)

    def _to_error(self, shares: Any) -> Any:
        """Return the errors at some places in the colours."""
        shares = np.asarray(shares, dtype=float)
        within = self.least * 10 ** (np.minimum(shares, AT_LIMIT) / AT_LIMIT * _DECADES_WITHIN)
        rest = np.clip((shares - 0.501) / 0.499, 0, 1)
        return np.where(shares < 0.5, within, self.atol * (self.most / self.atol) ** rest)


def short(value: float) -> str:
    """Return a power of 10 as text: 1, 0.1, 1e-3."""
    if 0.1 <= value < 100:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


# A cache: the state of each slot that is read, for the whole cache or for some blocks.

UNUSED = -2  # a slot that is neither written nor read, in the image; a written one is NOT_READ
_SLOT_COLOURS = {
    SlotState.OWN: "#3f6f9f",
    SlotState.OWN_FUTURE: "#9c755f",
    SlotState.OUTSIDE_WINDOW: "#76b7b2",
    SlotState.FREED: "#59a14f",
    SlotState.UNWRITTEN: "#e15759",
    SlotState.UNWRITTEN_TAIL: "#f1ce63",
    SlotState.OTHER_POSITION: "#ff9da7",
    SlotState.OTHER_SEQUENCE: "#b07aa1",
    SlotState.NEVER_MAPPED: "#f28e2b",
    SlotState.UNKNOWN: "#79706e",
}
_NOT_READ = {UNUSED: ("#e3e3e3", "not used"), NOT_READ: ("#a8c5e2", "written, not read")}
_HATCHES = dict.fromkeys(EMPTY, "xx") | dict.fromkeys(FOREIGN, "//")


def plot_cache(slot_map: SlotMap, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw every slot of a cache: a column per block, a row per slot.

    Columns are in the order of the block table, with a line between sequences; blocks in no row of the
    table are at the right. A circle marks the first of adjacent blocks that have slots of a hatched state.
    """
    ax = ax or plt.subplots(figsize=(9, 2.6), layout="constrained")[1]
    frame_cache(ax, slot_map)
    draw_cache(ax, slot_map, title=title)
    return ax


def frame_cache(ax: Axes, slot_map: SlotMap) -> None:
    """Draw what :func:`plot_cache` draws of any cache with as many blocks, slots and rows of the table."""
    blocks, slots = slot_map.states.shape
    table = slot_map.provenance.block_table
    ax.set(xlim=(-0.5, blocks - 0.5), ylim=(slots - 0.5, -0.5))
    seqs, width = table.shape  # each sequence is labelled below its blocks
    ax.set_xticks([width * (i + 0.5) - 0.5 for i in range(seqs)], [str(i) for i in range(seqs)])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel(f"blocks of sequence ({width} each)")
    ax.set_yticks(sorted({0, slots // 2, slots - 1}))
    ax.set_ylabel("slot")


def draw_cache(ax: Axes, slot_map: SlotMap, *, title: str = "") -> None:
    """Draw the slots on the axes of :func:`frame_cache`; see :func:`plot_cache`."""
    codes = _slot_codes(slot_map)[slot_map.order().numpy()].T
    _draw_slots(ax, codes)
    for state in _HATCHES:
        _circle(ax, codes == state.code, _SLOT_COLOURS[state])
    seqs, width = slot_map.provenance.block_table.shape
    for i in range(1, seqs + (codes.shape[1] > seqs * width)):
        ax.axvline(width * i - 0.5, color="black", linewidth=0.8)
    ax.set_title(title or _slot_finding(slot_map))
    put_legend(ax, _slot_entries(codes), below=True)


def plot_blocks(
    slot_map: SlotMap,
    *,
    blocks: Sequence[int] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw some blocks of a cache, or all: a row per block, a column per slot."""
    rows = list(range(len(slot_map.states))) if blocks is None else list(blocks)
    ax = ax or plt.subplots(figsize=(8, 1.1 + 0.35 * len(rows)), layout="constrained")[1]
    codes = _slot_codes(slot_map)[rows]
    _draw_slots(ax, codes)
    ax.set_yticks(range(len(rows)), [_block_label(slot_map, block) for block in rows])
    ax.set_xticks(range(0, codes.shape[1], 4))
    ax.set(xlabel="slot of the block", title=title or _slot_finding(slot_map))
    put_legend(ax, _slot_entries(codes))
    return ax


def _slot_codes(slot_map: SlotMap) -> Any:
    """Return what the image shows, [num_blocks, block_size]: an index into STATES, NOT_READ or UNUSED."""
    used = slot_map.is_read | (slot_map.provenance.seq != NOBODY)
    return np.where(used.numpy(), slot_map.states.numpy(), UNUSED)


def _draw_slots(ax: Axes, codes: Any) -> None:
    """Draw the image, with a hatch over slots that do not hold the reader's token."""
    colours = [colour for colour, _ in _NOT_READ.values()] + [
        _SLOT_COLOURS[state] for state in STATES
    ]
    ax.imshow(
        codes,
        cmap=ListedColormap(colours),
        vmin=UNUSED,
        vmax=len(STATES) - 1,
        aspect="auto",
        interpolation="none",
        interpolation_stage="rgba",  # a colour per slot, not per pixel
    )
    for state, hatch in _HATCHES.items():
        if (codes == state.code).any():
            hatch_cells(ax, codes == state.code, hatch, "white")


def _slot_entries(codes: Any) -> list[Patch]:
    """Return the legend's entries for what the image shows."""
    entries = []
    for code in np.unique(codes).tolist():
        if code in _NOT_READ:
            colour, label = _NOT_READ[code]
            entries.append(Patch(facecolor=colour, label=label))
        else:
            state = STATES[code]
            style: dict[str, Any] = {
                "facecolor": _SLOT_COLOURS[state],
                "hatch": _HATCHES.get(state),
            }
            entries.append(Patch(**style, edgecolor="white", label=f"read: {state}"))
    return entries


def _circle(ax: Axes, mask: Any, colour: str) -> None:
    """Circle the first slot of each run of columns of a mask, since one slot of many is too small."""
    firsts = [first for first, _ in runs(mask.any(0))]
    style: dict[str, Any] = {"ms": 11, "mfc": "none", "mec": colour, "mew": 2, "clip_on": False}
    if firsts:
        ax.plot(firsts, mask[:, firsts].argmax(0), "o", **style)


def _block_label(slot_map: SlotMap, block: int) -> str:
    owner = slot_map.at(block, 0).owner
    return f"block {block}" if owner is None else f"block {block} (sequence {owner[0]})"


def _slot_finding(slot_map: SlotMap) -> str:
    counts = slot_map.counts()
    if not counts:
        return "no slot is read"
    if set(counts) == {SlotState.OWN}:
        return f"all {counts[SlotState.OWN]} slots that are read hold the reader's token"
    return "slots read: " + ", ".join(f"{number} {state}" for state, number in counts.items())


# Errors: of each token and head, and the largest of each sequence.

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
    ax.set_title(title or _error_finding(errors))
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


def _error_finding(errors: "ErrorMap") -> str:
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


# The stages of a test, the power of a test, and the steps of MLA.

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
_MARGINS = 1e-9, 1e6


def plot_power(mutants: Sequence["Mutant"], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the largest effect of each mutant divided by the tolerance: above 1 the test kills it.

    NaN and infinity are at the right edge, no effect at the left edge.
    """
    ax = ax or plt.subplots(figsize=(8, 0.8 + 0.2 * len(mutants)), layout="constrained")[1]
    for outcome, (colour, marker) in _LOOK.items():
        at = [(y, m.margin) for y, m in enumerate(mutants) if m.outcome == outcome]
        ax.plot(
            [min(max(margin, _MARGINS[0]), _MARGINS[1]) for _, margin in at],
            [y for y, _ in at],
            marker,
            color=colour,
            label=f"{outcome}: {len(at)}",
        )
    ax.axvline(1.0, color="red", linestyle="--", linewidth=1, label="the test's tolerance")
    ax.set_xscale("log")
    ax.set_xlim(_MARGINS[0] / 3, _MARGINS[1] * 3)
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


# An X-ray: weights by row and key, and log weights against the right ones.

Which = Literal["measured", "expected", "difference"]
_LEAST_WEIGHT = 1e-5  # the smallest weight that has a colour
_NAN_WEIGHT = "#c9a0dc"
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
    drawn = values if which == "difference" else np.maximum(values, _LEAST_WEIGHT / 10)
    style, own = _weight_colours(values, which), columns.own
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


def _weight_colours(values: Any, which: str) -> dict[str, Any]:
    """Return the colour map and the norm of an image."""
    if which == "difference":
        # rounding must not look like a fault: the scale is at least 1 % of a weight of 1
        largest = max(float(np.nanmax(np.abs(values), initial=0.0)), 0.01)
        colours = plt.get_cmap("RdBu_r").with_extremes(bad=_NAN_WEIGHT)
        return {"cmap": colours, "norm": TwoSlopeNorm(0.0, -largest, largest)}
    colours = plt.get_cmap("viridis").with_extremes(under="#80808030", bad=_NAN_WEIGHT)
    return {"cmap": colours, "norm": LogNorm(_LEAST_WEIGHT, 1.0)}


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
