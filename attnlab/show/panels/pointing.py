"""Pointer: the selection of a panel, its marks on the pictures, and its text."""

from collections.abc import Callable, Mapping
from typing import Any

from attnlab.show.panels import texts
from attnlab.show.panels.panel_data import (
    PanelData,
    Selection,
    bands_of,
    select,
    select_band,
    select_seq,
)
from attnlab.show.panels.picture import Picture
from attnlab.show.panels.rendering import AxesTransform, Rendered
from attnlab.show.plots.errors import BAND

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
        if at is None or self._data is None or self._data.got is None:
            return
        head, band = round(at[0]), round(at[1])
        self.selection = select_band(self._data, band, head)
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
        if at is None or self._data is None or self._data.got is None:
            return
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
        self._text.value = f'<div class="attnlab-text">{texts.slot_html(slot)}</div>'

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
            self._text.value = texts.selection_html(selection, query_len)
            marks = self._marks(data, selection)
        for name, picture in self._pictures.items():
            picture.mark = marks.get(name, _NO_MARK)

    def _marks(self, data: PanelData, selection: Selection) -> dict[str, list[float]]:
        """Return the mark of the selection on each picture that can show it."""
        column = data.slot_map.order().tolist().index(selection.place.block)
        bands = bands_of(data, selection, BAND)
        boxes: dict[str, Callable[[AxesTransform], list[float]]] = {
            "error": lambda t: t.box(selection.head, bands.start, len(bands)),
            "slots": lambda t: t.box(column, selection.place.slot),
            "seqs": lambda t: t.column(selection.seq),
        }
        return {
            name: box(self._rendered[name].transform)
            for name, box in boxes.items()
            if name in self._rendered
        }
