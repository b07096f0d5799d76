"""The views of a panel: pictures rendered from its PanelData."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from attnlab.case.errors import AttnLabError
from attnlab.case.masks import CAUSAL
from attnlab.contracts.slot_map import NOT_READ
from attnlab.contracts.slot_states import STATES
from attnlab.show.panels.frames import FramedPlot, Frames
from attnlab.show.panels.panel_data import PanelData
from attnlab.show.panels.rendering import Cells, Rendered, axes_rect, render
from attnlab.show.plots.cache import draw_cache, frame_cache
from attnlab.show.plots.errors import (
    BAND,
    draw_errors,
    draw_seq_errors,
    error_scale,
    frame_errors,
    frame_seq_errors,
    label_errors,
)
from attnlab.show.plots.mask import mask_codes, plot_mask
from attnlab.tensors.cache import NOBODY
from attnlab.tensors.case_visibility import longest_mask

_BELOW: Mapping[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.13),
    "ncols": 3,
    "fontsize": "small",
    "frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A picture: its name, its hint, and the function that renders it or returns None.

    ``render(data, frames, is_dark)`` gives the picture for a page with a light or a dark theme.
    """

    name: str
    hint: str
    render: Callable[[PanelData, Frames, bool], Rendered | None]


def _render_error(data: PanelData, frames: Frames, is_dark: bool) -> Rendered | None:
    result = data.result
    if result.errors is None:
        return None

    def frame(ax: Axes) -> list[Artist]:
        bar = frame_errors(ax, num_seqs, num_heads, data.cache_of)
        place_color_bar(ax, rect)
        return [ax.yaxis, bar.yaxis]

    def content(ax: Axes) -> None:
        draw_errors(ax, errors, unwritten=unwritten, legend=_BELOW)

    errors = result.errors
    num_seqs, num_heads = len(errors.lengths.query_lens), errors.error.shape[1]
    unwritten = result.unwritten_rows() if data.row_slots is None else None
    size, margins = (520, 380), (105, 98, 66, 26)
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
    return frames.render(plot, _error_cells(data), is_dark=is_dark)


def _error_cells(data: PanelData) -> Cells:
    """Return the text of each band of tokens, and the error of each head."""
    errors = data.result.errors
    assert errors is not None
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
        title = f"largest error per sequence (dashed: {limit})"
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
    view.name: view
    for view in (
        View(
            name="error",
            hint="Errors by token and head. Click, or move with the arrow keys, to select.",
            render=_render_error,
        ),
        View(
            name="slots",
            hint="The use of each cache slot. Click a slot to select its token.",
            render=_render_slots,
        ),
        View(
            name="seqs",
            hint="The largest error of each sequence. Click a sequence to select its worst token.",
            render=_render_seqs,
        ),
        View(
            name="mask",
            hint="Which keys the rows of the longest new part see, if the mask is not causal.",
            render=_render_mask,
        ),
    )
}
