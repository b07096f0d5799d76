"""Pointing at a picture: what is selected, its mark on the pictures, and its text."""

from collections.abc import Mapping
from typing import Any

from attnlab.show.panels import texts
from attnlab.show.panels.draw import Rendered
from attnlab.show.panels.panel_data import PanelData, Selection, band_of, select, select_band
from attnlab.show.panels.picture import Picture
from attnlab.show.plots.errors import BAND

_HINT = (
    '<div class="attnlab-dim">Click the picture: sequence, token, head, block, slot, values.</div>'
)
_NO_MARK = [0.0, 0.0, 0.0, 0.0]


class Pointer:
    """The selection of a panel; changed by clicks, by arrow keys and from Python.

    ``drawn`` are the pictures as they stand, by name; the panel changes it.
    """

    def __init__(
        self, pictures: Mapping[str, Picture], text: Any, drawn: Mapping[str, Rendered]
    ) -> None:
        self._pictures, self._text, self._drawn = pictures, text, drawn
        self._seen: PanelData | None = None
        self.selection: Selection | None = None
        if "error" in pictures:
            pictures["error"].on_point(self.click_error, self.step)
        if "slots" in pictures:
            pictures["slots"].on_point(self.click_slot)

    def follow(self, seen: PanelData | None) -> None:
        """Keep the selection where the new output has its row and head, else drop it."""
        before, self._seen = self.selection, seen
        self.selection = None
        if before is not None and seen is not None and seen.got is not None:
            rows, heads = seen.got.shape[:2]
            if before.row < rows and before.head < heads:
                self.selection = select(seen, before.row, before.head)
        self._show()

    def select(self, seq: int, token: int, head: int) -> Selection:
        """Select a head of a sequence's token; raise ValueError where there is none."""
        errors = None if self._seen is None else self._seen.result.errors
        if self._seen is None or errors is None:
            raise ValueError("nothing can be selected: there is no output")
        lens = errors.lengths.query_lens
        heads = errors.error.shape[1]
        if not (0 <= seq < len(lens) and 0 <= token < lens[seq] and 0 <= head < heads):
            raise ValueError(f"no sequence {seq}, token {token}, head {head} in the output")
        self.selection = select(self._seen, sum(lens[:seq]) + token, head)
        self._show()
        return self.selection

    def click_error(self, across: float, down: float) -> None:
        """Select what stands at a place of the picture of errors, in parts of its width and height."""
        at = self._drawn["error"].frame.data(across, down) if "error" in self._drawn else None
        if at is None or self._seen is None or self._seen.got is None:
            return
        head, band = round(at[0]), round(at[1])
        self.selection = select_band(self._seen, band, head)
        self._show()

    def step(self, right: int, down: int) -> None:
        """Move the selection by heads and by rows of the picture."""
        one, seen = self.selection, self._seen
        if one is None or seen is None or seen.got is None or seen.result.errors is None:
            return
        bands, heads = BAND * len(seen.result.errors.lengths.query_lens), seen.got.shape[1]
        band = min(max(band_of(seen, one, BAND) + down, 0), bands - 1)
        head = min(max(one.head + right, 0), heads - 1)
        self.selection = select_band(seen, band, head)
        self._show()

    def click_slot(self, across: float, down: float) -> None:
        """Select the newest-looking token of a slot: its row if it has one, else tell of the slot."""
        at = self._drawn["slots"].frame.data(across, down) if "slots" in self._drawn else None
        if at is None or self._seen is None:
            return
        block = int(self._seen.use.order()[round(at[0])])
        slot = self._seen.use.at(block, round(at[1]))
        lengths = self._seen.result.case.lengths
        if slot.owner is not None and self._seen.got is not None and self._seen.row_slots is None:
            seq, position = slot.owner
            token = position - lengths.ctx_lens[seq]
            if 0 <= token < lengths.query_lens[seq]:
                self.select(seq, token, self.selection.head if self.selection else 0)
                return
        self.selection = None
        self._show()
        self._text.value = f'<div class="attnlab-text">{texts.slot_html(slot)}</div>'

    def _show(self) -> None:
        """Write the selection's text and lay its mark on the pictures."""
        one, seen = self.selection, self._seen
        marks: dict[str, list[float]] = {}
        if one is None or seen is None or seen.result.errors is None:
            is_drawn = seen is None or seen.result.errors is not None
            self._text.value = _HINT if is_drawn and self._pictures else ""
        else:
            query_len = seen.result.errors.lengths.query_lens[one.seq]
            self._text.value = texts.selection_html(one, query_len)
            order = seen.use.order().tolist()
            places = {
                "error": (one.head, band_of(seen, one, BAND)),
                "slots": (order.index(one.place.block), one.place.slot),
            }
            marks = {
                name: self._drawn[name].frame.box(*place)
                for name, place in places.items()
                if name in self._drawn
            }
        for name, picture in self._pictures.items():
            picture.mark = marks.get(name, _NO_MARK)
