"""What a panel shows of a Case: its Result with what a selection needs, computed in the background."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attnlab.case.case import Case
from attnlab.contracts.dispatch import Target
from attnlab.contracts.slot_use import Slot, SlotUse, slot_use
from attnlab.lab.cache_write import as_numbers, slot_order
from attnlab.lab.lab import Lab
from attnlab.lab.result import Result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PanelData:
    """A Result, and beside it what was compared.

    - ``got``, ``expected``: [rows, heads, elements], or None where the call was rejected; of an op that
      writes the cache the rows are slots.
    - ``row_slots``: of such an op the slot of each row, else None.
    - ``use``: who wrote and who reads each slot.
    """

    result: Result
    got: torch.Tensor | None
    expected: torch.Tensor | None
    row_slots: torch.Tensor | None
    use: SlotUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One head of one output row, with its place in the cache and its worst element.

    - ``seq``, ``token``, ``row``, ``head``: as an ErrorMap counts them. Of an op that writes the cache a
      row is a slot, and ``seq`` may be one behind the last: the slots that are nobody's.
    - ``place``: the slot of the token that the row belongs to.
    - ``error``: the largest absolute error over the head's elements; ``element`` has it, and ``got`` and
      ``expected`` are its values. Where the head did not run ``error`` is -inf.
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
    def ran(self) -> bool:
        """Answer whether the row and head were run at all."""
        return self.error != float("-inf")


def look(lab: Lab, case: Case, on_step: Callable[[str], None]) -> PanelData:
    """Run the Case and return what a panel shows of it; raises as Lab.run does.

    ``on_step`` is called with the name of every step before it begins, and may end the work by raising.
    """
    own = replace(lab, on_step=on_step, on_notice=on_step)  # shares what the Lab holds
    result = own.run(case)
    provenance = result.cache.provenance
    use = slot_use(result.call, Target.of(case), result.decision.kernels, provenance)
    got = expected = row_slots = None
    if result.errors is not None:
        got, expected = result.call.output, own.reference(case)
        if case.spec.writes_cache:
            row_slots = slot_order(case, provenance.block_table)
            got, expected = as_numbers(got[row_slots], expected[row_slots])
    return PanelData(result=result, got=got, expected=expected, row_slots=row_slots, use=use)


def select(seen: PanelData, row: int, head: int) -> Selection:
    """Return what is known of one head of one output row; the call must not have been rejected."""
    errors = seen.result.errors
    if errors is None or seen.got is None or seen.expected is None:
        raise ValueError("a rejected call has no output to select from")
    seq, token = errors.lengths.locate(row)
    got, expected = (tensor[row, head].double().cpu() for tensor in (seen.got, seen.expected))
    element = int((got - expected).abs().argmax())  # NaN is the greatest
    return Selection(
        seq=seq,
        token=token,
        row=row,
        head=head,
        place=seen.use.at(*_slot(seen, seq, token, row)),
        error=float(errors.error[row, head]),
        element=element,
        got=float(got[element]),
        expected=float(expected[element]),
    )


def _slot(seen: PanelData, seq: int, token: int, row: int) -> tuple[int, int]:
    """Return (block, slot) of the token of an output row."""
    provenance = seen.use.provenance
    if seen.row_slots is not None:
        return divmod(int(seen.row_slots[row]), provenance.seq.shape[1])
    return provenance.slot(seq, seen.result.case.lengths.ctx_lens[seq] + token)


def select_band(seen: PanelData, band: int, head: int) -> Selection:
    """Return the selection of the worst row that a row of the picture stands for; NaN is the worst."""
    errors = seen.result.errors
    if errors is None:
        raise ValueError("a rejected call has no output to select from")
    rows = errors.band_rows(band)
    worst = int(errors.error[rows.start : rows.stop, head].argmax())
    return select(seen, rows.start + worst, head)


def band_of(seen: PanelData, selection: Selection, height: int) -> int:
    """Return the row of the picture that shows the selection."""
    errors = seen.result.errors
    assert errors is not None  # it was selected from
    bands = range(selection.seq * height, (selection.seq + 1) * height)
    return next(band for band in bands if selection.row in errors.band_rows(band))
