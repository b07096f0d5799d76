"""PanelData: what a panel shows of a Case, and Selection: one selected head of one row."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.contracts.slot_map import Slot, SlotMap
from attnlab.kernels.steps import OnStep
from attnlab.lab.cache_write import as_numbers, slot_order
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PanelData:
    """A Result with the tensors that were compared.

    - ``got``, ``expected``: [rows, heads, elements], or None if the call was rejected. For an op that
      writes the cache a row is a slot.
    - ``row_slots``: [rows], the slot of each row for such an op, else None.
    - ``slot_map``: the writer and the reader of each slot.
    """

    result: Result
    got: torch.Tensor | None
    expected: torch.Tensor | None
    row_slots: torch.Tensor | None
    slot_map: SlotMap

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
    on_notice: Callable[[str], None] = on_step
    lab = copy(lab)  # with the same shared products
    lab.on_step, lab.on_notice = on_step, on_notice
    result = lab.run(case)
    got = expected = row_slots = None
    if result.errors is not None:
        got, expected = result.output, lab.reference(case)
        if case.spec.writes_cache:
            row_slots = slot_order(case, result.cache.provenance.block_table)
            got, expected = as_numbers(got[row_slots], expected[row_slots])
    return PanelData(
        result=result, got=got, expected=expected, row_slots=row_slots, slot_map=result.slot_map()
    )


def select(data: PanelData, row: int, head: int) -> Selection:
    """Return the selection of one head of one output row; raise ValueError for a rejected call."""
    errors = data.result.errors
    if errors is None or data.got is None or data.expected is None:
        raise ValueError("a rejected call has no output to select from")
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
    errors = data.result.errors
    if errors is None:
        raise ValueError("a rejected call has no output to select from")
    rows = errors.band_rows(band)
    worst = int(errors.error[rows.start : rows.stop, head].argmax())
    return select(data, rows.start + worst, head)


def select_seq(data: PanelData, seq: int) -> Selection:
    """Return the selection of the worst row and head of a sequence; NaN is the worst."""
    errors = data.result.errors
    if errors is None:
        raise ValueError("a rejected call has no output to select from")
    lens = errors.lengths.query_lens
    start, heads = sum(lens[:seq]), errors.error.shape[1]
    row, head = divmod(int(errors.error[start : start + lens[seq]].argmax()), heads)
    return select(data, start + row, head)


def bands_of(data: PanelData, selection: Selection, bands_per_seq: int) -> range:
    """Return the bands of the error plot that contain the selected row."""
    errors = data.result.errors
    assert errors is not None  # a selection exists only with errors
    first = selection.seq * bands_per_seq
    bands = range(first, first + bands_per_seq)
    found = [band for band in bands if selection.row in errors.band_rows(band)]
    return range(found[0], found[-1] + 1)
