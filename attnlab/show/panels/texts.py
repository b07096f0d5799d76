"""The texts of a panel as HTML: the verdict, an error, a selection and a slot."""

import traceback
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.contracts.slot_states import Slot, SlotMap
from attnlab.kernels.backend import OnStep
from attnlab.lab.cache_write import as_numbers, slot_order
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, Result, map_errors
from attnlab.show.sheets import html
from attnlab.show.sheets.results import beyond_rounding, place_lines, rules_text

# PanelData: what a panel shows of a Case, and Selection: one selected head of one row.


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
    on_notice: Callable[[str], None] = on_step
    lab = copy(lab)  # with the same shared products
    lab.on_step, lab.on_notice = on_step, on_notice
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
    return _block(
        "attnlab-selection",
        [
            f"<div><b>{escape(place)}</b></div>",
            f"<div>{escape(values)}</div>",
            slot_html(selection.place),
        ],
    )


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
