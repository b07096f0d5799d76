"""The views of a panel: pictures rendered from its PanelData."""

import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.masks import CAUSAL
from attnlab.contracts.slot_states import NOT_READ, STATES, Slot, SlotMap
from attnlab.kernels.backend import OnStep
from attnlab.lab.cache_write import as_numbers, slot_order
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, Result, map_errors
from attnlab.show.panels.rendering import (
    AxesTransform,
    Cells,
    Picture,
    Rendered,
    as_rendered,
    axes_rect,
    new_axes,
    render,
    style_texts,
)
from attnlab.show.plots import (
    BAND,
    draw_cache,
    draw_errors,
    draw_seq_errors,
    error_scale,
    frame_cache,
    frame_errors,
    frame_seq_errors,
    label_errors,
    mask_codes,
    plot_mask,
)
from attnlab.show.sheets import html
from attnlab.show.sheets.results import beyond_rounding, place_lines, rules_text
from attnlab.tensors.cache import NOBODY
from attnlab.tensors.case_call import longest_mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PanelData:
    """A Result with the tensors that were compared.

    - ``got``, ``expected``: [rows, heads, elements], or None if the call was rejected. For an op that
      writes the cache a row is a slot.
    - ``row_slots``: [rows], the slot of each row for such an op, else None.
    - ``slot_map``: the writer and the reader of each slot.
    - ``other``: the same Case on another runner, or None; ``difference``: how far its output is from this
      one, with the rounding bounds of both as tolerance; ``refusal``: why there is none, or "".
    """

    result: Result
    got: torch.Tensor | None
    expected: torch.Tensor | None
    row_slots: torch.Tensor | None
    slot_map: SlotMap
    other: "PanelData | None" = None
    difference: ErrorMap | None = None
    refusal: str = ""

    @property
    def cache_of(self) -> int | None:
        """Return the number of sequences for an op that writes the cache, else None."""
        return None if self.row_slots is None else len(self.result.case.lengths.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One head of one output row, its place in the cache and its worst element.

    - ``seq``, ``token``, ``row``, ``head``: as in an ErrorMap. For an op that writes the cache a row is
      a slot, and slots without owner have the number of sequences as ``seq``.
    - ``place``: the cache slot of the row's token.
    - ``error``: the largest absolute error of the head's elements, at index ``element`` with the values
      ``got`` and ``expected``; -inf if the head did not run.
    """

    seq: int
    token: int
    row: int
    head: int
    place: Slot
    error: float
    element: int
    got: float
    expected: float

    @property
    def has_run(self) -> bool:
        """Return whether the row and head were computed."""
        return self.error != float("-inf")


def make_panel_data(lab: Lab, case: Case, on_step: OnStep) -> PanelData:
    """Run the Case and return what a panel shows of it; raise as Lab.run does.

    ``on_step`` is called before each step and may raise to end the run. The results are shared with
    ``lab``.
    """
    lab = copy(lab)  # with the same shared products
    lab.on_step = on_step
    result = lab.run(case)
    got = expected = row_slots = None
    if result.errors is not None:
        got, expected = result.output, lab.reference(case)
        if case.spec.writes_cache:
            row_slots = slot_order(case, result.provenance.block_table)
            got, expected = as_numbers(got[row_slots], expected[row_slots])
    return PanelData(
        result=result, got=got, expected=expected, row_slots=row_slots, slot_map=result.slot_map()
    )


def compared(data: PanelData, lab: Lab, case: Case, on_step: OnStep) -> PanelData:
    """Return the data with those of another runner: ``case`` in ``lab``, equal but for its backend."""
    try:
        other = make_panel_data(lab, case, on_step)
    except AttnLabError as error:
        return replace(data, refusal=str(error))
    errors = data.result.errors
    if data.got is None or other.got is None or errors is None:
        return replace(data, other=other, refusal="there are not two outputs")
    bound: torch.Tensor | float = 0.0
    if data.row_slots is None:
        bound = 2 * lab.bound(case, other.result.call)
    wide = data.got.to(torch.promote_types(data.got.dtype, torch.float32))
    apart = map_errors(other.got, wide, errors.lengths, bound, 0.0, errors.heads, errors.rows)
    return replace(data, other=other, difference=apart)


def against_html(data: PanelData) -> str:
    """Return the verdict of the other runner, and how far the outputs are apart; "" without one."""
    if data.other is None and not data.refusal:
        return ""
    parts = [] if data.other is None else [verdict_html(data.other.result)]
    text = data.refusal
    if data.difference is not None:
        apart, most = data.difference.mismatched, data.difference.greatest_abs.value
        text = f"{apart} of {data.difference.total} elements differ beyond rounding, by up to {most:.3g}"
    return _block("attnlab-against", [*parts, f"<div><b>{escape(text)}</b></div>"])


def _errors_of(data: PanelData) -> ErrorMap:
    """Return the errors of the output; raise ValueError for a rejected call."""
    if data.result.errors is None:
        raise ValueError("a rejected call has no output to select from")
    return data.result.errors


def select(data: PanelData, row: int, head: int) -> Selection:
    """Return the selection of one head of one output row; raise ValueError for a rejected call."""
    errors = _errors_of(data)
    assert data.got is not None
    assert data.expected is not None
    seq, token = errors.lengths.locate(row)
    got, expected = (tensor[row, head].double().cpu() for tensor in (data.got, data.expected))
    element = int((got - expected).abs().argmax())  # NaN counts as the largest
    return Selection(
        seq=seq,
        token=token,
        row=row,
        head=head,
        place=data.slot_map.at(*_slot_of(data, seq, token, row)),
        error=float(errors.error[row, head]),
        element=element,
        got=float(got[element]),
        expected=float(expected[element]),
    )


def _slot_of(data: PanelData, seq: int, token: int, row: int) -> tuple[int, int]:
    """Return (block, slot) of the token of an output row."""
    provenance = data.slot_map.provenance
    if data.row_slots is not None:
        return divmod(int(data.row_slots[row]), provenance.seq.shape[1])
    return provenance.slot(seq, data.result.case.lengths.ctx_lens[seq] + token)


def select_band(data: PanelData, band: int, head: int) -> Selection:
    """Return the selection of the worst row of a band, one row of the error plot; NaN is the worst."""
    errors = _errors_of(data)
    rows = errors.band_rows(band)
    worst = int(errors.error[rows.start : rows.stop, head].argmax())
    return select(data, rows.start + worst, head)


def select_seq(data: PanelData, seq: int) -> Selection:
    """Return the selection of the worst row and head of a sequence; NaN is the worst."""
    errors = _errors_of(data)
    lens = errors.lengths.query_lens
    start, heads = sum(lens[:seq]), errors.error.shape[1]
    row, head = divmod(int(errors.error[start : start + lens[seq]].argmax()), heads)
    return select(data, start + row, head)


def bands_of(data: PanelData, selection: Selection, bands_per_seq: int) -> range:
    """Return the bands of the error plot that contain the selected row."""
    errors = _errors_of(data)
    first = selection.seq * bands_per_seq
    bands = range(first, first + bands_per_seq)
    found = [band for band in bands if selection.row in errors.band_rows(band)]
    return range(found[0], found[-1] + 1)


FACTS: dict[str, Callable[[Result], str]] = {
    "dispatch": lambda result: html(result.decision),
    "violations": lambda result: html(result.violations),
}
# Mid-tones that are readable on white and on black; everything else inherits the page's colours.
_COLOURS = {"match": "#2da44e", "mismatch": "#e5534b", "rejected": "#a475c9"}


def result_html(data: PanelData) -> dict[str, str]:
    """Return the texts of a panel but the selection, by name; may compute a rounding bound."""
    facts = {name: fact(data.result) for name, fact in FACTS.items()}
    return {"verdict": verdict_html(data.result), "against": against_html(data), **facts}


def verdict_html(result: Result) -> str:
    """Return the verdict, the kernels and the first places of errors."""
    verdict = result.verdict if result.errors is None else f"{result.status}: {result.verdict}"
    kernels = " then ".join(result.decision.kernels)
    parts = [
        status_line(f"<b>{escape(verdict)}</b>", result.status),
        f'<div class="attnlab-dim">{escape(kernels)} on {escape(result.case.platform)}'
        f"{escape(rules_text(result.case))}, backend {escape(result.backend)}</div>",
    ]
    if result.errors is not None and result.case.has_own_tolerance:
        parts.append(f'<div class="attnlab-dim">beyond rounding: {beyond_rounding(result)}</div>')
    parts += [f"<div>{escape(line)}</div>" for line in place_lines(result.places(), most=2)]
    return _block(f"attnlab-verdict-line attnlab-is-{result.status}", parts)


def failure_html(error: Exception) -> str:
    """Return what replaces the verdict if there is no Result.

    An error that is not an AttnLabError is shown with its type and source line.
    """
    title, text = f"{type(error).__name__}:", str(error)
    if not isinstance(error, AttnLabError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, line {where.lineno}"
        title, text = "Internal error:", f"{type(error).__name__}: {error} ({place})"
    line = status_line(f"<b>{escape(title)}</b> {escape(text)}", "rejected")
    return _block("attnlab-verdict-line attnlab-is-failure", [line])


def selection_html(selection: Selection, query_len: int) -> str:
    """Return the place, the error and the cache slot of the selected head."""
    place = (
        f"sequence {selection.seq}, token {selection.token} of {query_len} "
        f"(row {selection.row}), head {selection.head}"
    )
    values = "not computed"
    if selection.has_run:
        values = (
            f"error {selection.error:.4g}; element {selection.element}: "
            f"got {selection.got:.6g}, expected {selection.expected:.6g}"
        )
    lines = [f"<div><b>{escape(place)}</b></div>", f"<div>{escape(values)}</div>"]
    return _block("attnlab-selection", [*lines, slot_html(selection.place)])


def slot_html(slot: Slot) -> str:
    """Return the owner, the writer and the reader of a slot."""
    place = f"block {slot.block}, slot {slot.slot}"
    if slot.owner is not None:
        seq, position = slot.owner
        place += f": sequence {seq}, position {position} by the block table"
    writer = f"written by {_token(slot.writer)}" if slot.writer is not None else "never written"
    reader = f"read by {_token(slot.reader)}" if slot.reader is not None else "not read"
    return f'<div class="attnlab-slot">{escape(place)}<br>{writer}; {reader}</div>'


def _token(token: tuple[int, int]) -> str:
    return f"sequence {token[0]}, position {token[1]}"


def status_line(content: str, status: str) -> str:
    colour = _COLOURS[status]
    return f'<div style="border-left:4px solid {colour};padding-left:.6em">{content}</div>'


def _block(css_class: str, parts: Sequence[str]) -> str:
    return f'<div class="attnlab-text {css_class}">{"".join(parts)}</div>'


# Frames: what a picture shows of any data, drawn once and kept as pixels.
#
# Most of the time to draw a picture goes to its axes, ticks and labels, which a change of a Case seldom
# changes. Only the content is drawn anew, over the pixels of the frame and its labels.

T = TypeVar("T")
Rect = tuple[float, float, float, float]
_KEEP = 8  # frames of a panel, and labels of a frame; each has about 2 MB of pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedPlot:
    """A plot in three parts; ``key`` is everything that the first depends on, ``label_key`` the second.

    - ``frame(ax)`` draws the axes and sets their limits. It returns the artists that ``label`` changes.
    - ``label(ax)`` changes labels and ticks.
    - ``content(ax)`` adds the artists of the data, and may set the title and a legend.
    - ``size``: CSS pixels; ``rect``: the place of the axes, see
      :func:`attnlab.show.panels.rendering.axes_rect`.
    """

    key: Hashable
    size: tuple[int, int]
    rect: Rect
    frame: Callable[[Axes], Sequence[Artist]]
    content: Callable[[Axes], None]
    label_key: Hashable = None
    label: Callable[[Axes], None] = lambda ax: None


class Frames:
    """The frames of a panel that were used last; for one thread at a time."""

    def __init__(self) -> None:
        self._frames: OrderedDict[Hashable, _Frame] = OrderedDict()

    def render(self, plot: FramedPlot, cells: Cells, *, is_dark: bool = False) -> Rendered:
        """Render a plot, with the frame of an earlier one that has the same key, size and theme."""
        key = (plot.size, plot.rect, is_dark, plot.key)
        frame = self._frames.pop(key, None) or _Frame(plot, is_dark)
        rendered = frame.render(plot, cells)  # a frame whose content raised is not kept
        _keep(self._frames, key, frame)
        return rendered


def _keep(kept: OrderedDict[Hashable, T], key: Hashable, value: T) -> None:
    """Add a value as the newest, and drop the oldest of too many; changes ``kept``."""
    kept[key] = value
    if len(kept) > _KEEP:
        kept.popitem(last=False)


class _Frame:
    """A figure with the frame of a plot, and its pixels without what is drawn over the content."""

    def __init__(self, plot: FramedPlot, is_dark: bool) -> None:
        self._width, self._is_dark = plot.size[0], is_dark
        self._canvas, self._ax = new_axes(plot.size, plot.rect)
        self._labels = plot.frame(self._ax)
        self._above = [*self._ax.spines.values(), self._ax.title]
        for artist in (*self._labels, *self._above):
            artist.set_animated(True)  # the canvas does not draw it
        self._ax.set_autoscale_on(False)  # the content does not change the limits
        style_texts(self._ax, self._width, is_dark)
        self._canvas.draw()
        self._pixels = self._copy()
        self._labelled: OrderedDict[Hashable, Any] = OrderedDict()  # pixels with labels
        self._own = set(self._ax.get_children())

    def render(self, plot: FramedPlot, cells: Cells) -> Rendered:
        """Render the labels and the content over the frame."""
        ax = self._ax
        pixels = self._labelled.pop(plot.label_key, None)
        if pixels is None:
            plot.label(self._ax)
            style_texts(self._ax, self._width, self._is_dark)
            self._canvas.restore_region(self._pixels)
            self._draw(self._labels)
            pixels = self._copy()
        else:
            self._canvas.restore_region(pixels)
        _keep(self._labelled, plot.label_key, pixels)
        plot.content(ax)
        style_texts(ax, self._width, self._is_dark)
        added = [artist for artist in ax.get_children() if artist not in self._own]
        self._draw([*added, *self._above])
        rendered = as_rendered(self._canvas, ax, self._width, cells)
        for artist in added:
            artist.remove()
        ax.set_prop_cycle(None)  # the next content begins with the first colour again
        return rendered

    def _draw(self, artists: Iterable[Artist]) -> None:
        renderer = self._canvas.get_renderer()
        for artist in sorted(artists, key=Artist.get_zorder):
            artist.draw(renderer)

    def _copy(self) -> Any:
        return self._canvas.copy_from_bbox(self._ax.figure.bbox)


_HINT = (
    '<div class="attnlab-dim">Click a picture to select a head of a token: its sequence, cache slot '
    "and values are shown here.</div>"
)
_NO_MARK = [0.0, 0.0, 0.0, 0.0]


class Pointer:
    """The selection of a panel, changed by clicks, by arrow keys and from Python.

    ``rendered`` holds the current pictures by name; the panel changes it.
    """

    def __init__(
        self, pictures: Mapping[str, Picture], text: Any, rendered: Mapping[str, Rendered]
    ) -> None:
        self._pictures, self._text, self._rendered = pictures, text, rendered
        self._data: PanelData | None = None
        self.selection: Selection | None = None
        if "error" in pictures:
            pictures["error"].on_point(self.click_error, self.step)
        if "slots" in pictures:
            pictures["slots"].on_point(self.click_slot)
        if "seqs" in pictures:
            pictures["seqs"].on_point(self.click_seq, self.step)

    def follow(self, data: PanelData | None) -> None:
        """Keep the selected row and head if the new output has them, else drop the selection."""
        before, self._data = self.selection, data
        self.selection = None
        if before is not None and data is not None and data.got is not None:
            rows, heads = data.got.shape[:2]
            if before.row < rows and before.head < heads:
                self.selection = select(data, before.row, before.head)
        self._show()

    def select(self, seq: int, token: int, head: int) -> Selection:
        """Select a head of a sequence's token; raise ValueError if it does not exist."""
        errors = None if self._data is None else self._data.result.errors
        if self._data is None or errors is None:
            raise ValueError("nothing can be selected: there is no output")
        lens = errors.lengths.query_lens
        heads = errors.error.shape[1]
        if not (0 <= seq < len(lens) and 0 <= token < lens[seq] and 0 <= head < heads):
            raise ValueError(f"the output has no sequence {seq}, token {token}, head {head}")
        self.selection = select(self._data, sum(lens[:seq]) + token, head)
        self._show()
        return self.selection

    def click_error(self, across: float, down: float) -> None:
        """Select what the error plot shows at a point, given as fractions of the picture."""
        at = self._data_at("error", across, down)
        if at is not None and self._data is not None and self._data.got is not None:
            self.selection = select_band(self._data, round(at[1]), round(at[0]))
            self._show()

    def step(self, right: int, down: int) -> None:
        """Move the selection by heads and by rows of the error plot, within its edges."""
        selection, data = self.selection, self._data
        if selection is None or data is None or data.got is None or data.result.errors is None:
            return
        bands, heads = BAND * len(data.result.errors.lengths.query_lens), data.got.shape[1]
        here = bands_of(data, selection, BAND)
        band = here.start + down if down < 0 else here.stop - 1 + down if down else here.start
        band = min(max(band, 0), bands - 1)
        head = min(max(selection.head + right, 0), heads - 1)
        self.selection = select_band(data, band, head)
        self._show()

    def click_seq(self, across: float, down: float) -> None:
        """Select the worst row and head of the sequence at a point of the plot by sequence."""
        at = self._data_at("seqs", across, down)
        if at is not None and self._data is not None and self._data.got is not None:
            self.selection = select_seq(self._data, round(at[0]))
            self._show()

    def click_slot(self, across: float, down: float) -> None:
        """Select the output row of a slot's token; without such a row, show the slot alone."""
        at = self._data_at("slots", across, down)
        if at is None or self._data is None:
            return
        block = int(self._data.slot_map.order()[round(at[0])])
        slot = self._data.slot_map.at(block, round(at[1]))
        lengths = self._data.result.case.lengths
        if slot.owner is not None and self._data.got is not None and self._data.row_slots is None:
            seq, position = slot.owner
            token = position - lengths.ctx_lens[seq]
            if 0 <= token < lengths.query_lens[seq]:
                self.select(seq, token, self.selection.head if self.selection else 0)
                return
        self.selection = None
        self._show()
        self._text.value = f'<div class="attnlab-text">{slot_html(slot)}</div>'

    def _data_at(self, name: str, across: float, down: float) -> tuple[float, float] | None:
        """Return the data at a point of a picture; None outside its axes or without the picture."""
        if name not in self._rendered:
            return None
        return self._rendered[name].transform.to_data(across, down)

    def _show(self) -> None:
        """Show the text of the selection and its marks on the pictures."""
        selection, data = self.selection, self._data
        marks: dict[str, list[float]] = {}
        if selection is None or data is None or data.result.errors is None:
            is_selectable = data is None or data.result.errors is not None
            self._text.value = _HINT if is_selectable and self._pictures else ""
        else:
            query_len = data.result.errors.lengths.query_lens[selection.seq]
            self._text.value = selection_html(selection, query_len)
            column = data.slot_map.order().tolist().index(selection.place.block)
            bands = bands_of(data, selection, BAND)
            boxes: dict[str, Callable[[AxesTransform], list[float]]] = {
                "error": lambda t: t.box(selection.head, bands.start, len(bands)),
                "slots": lambda t: t.box(column, selection.place.slot),
                "seqs": lambda t: t.column(selection.seq),
            }
            marks = {
                name: box(self._rendered[name].transform)
                for name, box in boxes.items()
                if name in self._rendered
            }
        for name, picture in self._pictures.items():
            picture.mark = marks.get(name, _NO_MARK)


_BELOW: Mapping[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.19),
    "ncols": 3,
    "fontsize": "small",
    "frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture: its hint, and the function that renders it or returns None.

    ``render(data, frames, is_dark)`` gives the picture for a page with a light or a dark theme.
    """

    hint: str
    render: Callable[[PanelData, Frames, bool], Rendered | None]


def _render_error(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    return _render_map(data, data.result.errors, frames, is_dark)


def _render_other(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    return None if data.other is None else _render_error(data.other, frames, is_dark)


def _render_difference(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    if data.difference is None:
        return None
    title = f"{data.difference.mismatched} elements of the two differ beyond rounding"
    return _render_map(data, data.difference, frames, is_dark, title)


def _render_map(
    data: PanelData, errors: ErrorMap | None, frames: Frames, is_dark: bool, title: str = ""
) -> Rendered | None:
    """Render errors of the outputs of ``data``; None if there are none."""
    result = data.result
    if errors is None:
        return None

    def frame(ax: Axes) -> list[Artist]:
        bar = frame_errors(ax, num_seqs, num_heads, data.cache_of)
        place_color_bar(ax, rect)
        return [ax.yaxis, bar.yaxis]

    def content(ax: Axes) -> None:
        draw_errors(ax, errors, unwritten=unwritten, legend=_BELOW, title=title)

    num_seqs, num_heads = len(errors.lengths.query_lens), errors.error.shape[1]
    unwritten = result.unwritten_rows() if data.row_slots is None and not title else None
    size, margins = (520, 320), (138, 106, 66, 26)
    rect = axes_rect(size, margins)
    plot = FramedPlot(
        key=("error", num_seqs, num_heads, data.cache_of is None),
        label_key=(errors.lengths, data.cache_of, error_scale(errors), errors.is_derived),
        size=size,
        rect=rect,
        frame=frame,
        label=lambda ax: label_errors(ax, _color_bar(ax), errors, data.cache_of),
        content=content,
    )
    return frames.render(plot, _error_cells(data, errors), is_dark=is_dark)


def _error_cells(data: PanelData, errors: ErrorMap) -> Cells:
    """Return the text of each band of tokens, and the error of each head."""
    noun, column = ("token", "head") if data.cache_of is None else ("position", "KV head")
    rows = []
    for seq, length in enumerate(errors.lengths.query_lens):
        owner = f"sequence {seq}"
        if data.cache_of is not None and seq >= data.cache_of:
            owner, noun = "no sequence", "slot"
        start = sum(errors.lengths.query_lens[:seq])
        for band in range(seq * BAND, (seq + 1) * BAND):
            tokens = errors.band_rows(band)
            first, last = tokens.start - start, tokens.stop - 1 - start
            count = f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
            rows.append(f"{owner}, {count} of {length}")
    heads = [f"{column} {head}" for head in range(errors.error.shape[1])]
    values = errors.bands(errors.error, BAND).cpu().numpy()
    return Cells(rows=rows, columns=heads, values=values, unit="error")


def place_color_bar(ax: Axes, rect: tuple[float, float, float, float]) -> None:
    """Move the colour bar to the right of the axes, with room for its labels."""
    left, bottom, width, height = rect
    ax.set_position(rect)
    bar = _color_bar(ax)
    bar.set_box_aspect(None)
    bar.set_position((left + width + 0.02, bottom, 0.025, height))
    bar.set_ylabel(bar.get_ylabel(), fontsize="small")
    bar.tick_params(labelsize="small")


def _color_bar(ax: Axes) -> Axes:
    """Return the axes of the colour bar."""
    return next(other for other in ax.figure.axes if other is not ax)


def _render_slots(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    def frame(ax: Axes) -> list[Artist]:
        frame_cache(ax, slot_map)
        return []

    slot_map, size = data.slot_map, (520, 198)
    plot = FramedPlot(
        key=("slots", tuple(slot_map.states.shape), tuple(slot_map.provenance.block_table.shape)),
        size=size,
        rect=axes_rect(size, (52, 10, 75, 26)),
        frame=frame,
        content=lambda ax: draw_cache(ax, slot_map),
    )
    return frames.render(plot, _slot_cells(data), is_dark=is_dark)


def _slot_cells(data: PanelData) -> Cells:
    """Return the block and the sequence of each column, and what each slot is."""
    slot_map = data.slot_map
    order, table = slot_map.order(), slot_map.provenance.block_table
    owners = {int(block): seq for seq, row in enumerate(table) for block in row}
    columns = [
        f"block {block}" + (f" of sequence {owners[block]}" if block in owners else "")
        for block in order.tolist()
    ]
    written = slot_map.provenance.seq != NOBODY
    codes = np.where(written.numpy(), len(STATES) + 1, len(STATES))
    codes = np.where(slot_map.states.numpy() == NOT_READ, codes, slot_map.states.numpy())
    names = [*(f"read: {state}" for state in STATES), "not used", "written, not read"]
    rows = [f"slot {slot}" for slot in range(codes.shape[1])]
    return Cells(rows=rows, columns=columns, values=codes[order.numpy()].T, names=names)


def _render_seqs(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    errors = data.result.errors
    if errors is None:
        return None

    def frame(ax: Axes) -> list[Artist]:
        frame_seq_errors(ax, errors.lengths, has_nan=has_nan)  # of the lengths, their number
        ax.set(ylabel="", xlabel="sequence" if data.cache_of is None else "slots of sequence")
        return []

    def content(ax: Axes) -> None:
        limit = "largest bound" if errors.is_derived else "atol"
        title = f"largest error (dashed: {limit})"
        draw_seq_errors(ax, {data.result.case.platform: found}, atol=errors.atol, title=title)

    found, size = errors.seq_error(), (300, 198)
    has_nan = bool(np.isnan(found).any())
    plot = FramedPlot(
        key=("seqs", len(errors.lengths.query_lens), has_nan, data.cache_of is None),
        size=size,
        rect=axes_rect(size, (60, 8, 45, 26)),
        frame=frame,
        content=content,
    )
    names = [f"sequence {seq}" for seq in range(len(errors.lengths.query_lens))]
    if data.cache_of is not None:
        names[data.cache_of :] = ["no sequence"] * (len(names) - data.cache_of)
    values = np.array([found], dtype=np.float32)
    cells = Cells(rows=[""], columns=names, values=values, unit="largest error")
    return frames.render(plot, cells, is_dark=is_dark)


def _render_mask(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    """Render the mask of the sequence with the most new tokens; None for a causal one."""
    case = data.result.case
    if case.mask == CAUSAL:
        return None
    mask = longest_mask(case)
    codes = mask_codes(mask)
    size = (520, 230)
    cells = Cells(
        rows=[f"new token {token}" for token in range(codes.shape[0])],
        columns=[f"key {position}" for position in range(codes.shape[1])],
        values=codes,
        names=["hidden", "visible", "visible, after the row", "visible, with a bias"],
    )
    rect = axes_rect(size, (60, 10, 80, 26))
    return render(lambda ax: plot_mask(mask, ax=ax), size, rect, cells, is_dark=is_dark)


XRAY = "xray"  # the attention weights, which are measured on demand


def check_views(known: Sequence[str], names: Sequence[str]) -> None:
    """Raise AttnLabError for a name that is not known."""
    for name in names:
        if name not in known:
            raise AttnLabError(f"view must be one of {', '.join(known)}, got {name}")


VIEWS = {
    "error": View(
        hint="Errors by token and head. Click, or move with the arrow keys, to select.",
        render=_render_error,
    ),
    "other": View(hint="Errors of the other runner by token and head.", render=_render_other),
    "difference": View(
        hint="How far the outputs of the two runners are apart, by token and head.",
        render=_render_difference,
    ),
    "slots": View(
        hint="The use of each cache slot. Click a slot to select its token.", render=_render_slots
    ),
    "seqs": View(
        hint="The largest error of each sequence. Click a sequence to select its worst token.",
        render=_render_seqs,
    ),
    "mask": View(
        hint="Which keys the rows of the longest new part see, if the mask is not causal.",
        render=_render_mask,
    ),
}
