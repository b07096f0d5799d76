"""The texts of a panel as HTML: the verdict, an error, a selection and a slot."""

import traceback
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from attnlab.case.errors import AttnLabError
from attnlab.contracts.slot_map import Slot
from attnlab.lab.result import Result
from attnlab.show.panels.panel_data import Selection
from attnlab.show.sheets import html
from attnlab.show.sheets.results import beyond_rounding, place_lines

FACTS: dict[str, Callable[[Result], str]] = {
    "dispatch": lambda result: html(result.decision),
    "violations": lambda result: html(result.violations),
}
# Mid-tones that are readable on white and on black; everything else inherits the page's colours.
_COLOURS = {"match": "#2da44e", "mismatch": "#e5534b", "rejected": "#a475c9"}


def result_html(result: Result) -> dict[str, str]:
    """Return the verdict and the FACTS of a Result by name; may compute its rounding bound."""
    facts = {name: fact(result) for name, fact in FACTS.items()}
    return {"verdict": verdict_html(result), **facts}


def verdict_html(result: Result) -> str:
    """Return the verdict, the kernels and the first places of errors."""
    verdict = result.verdict if result.errors is None else f"{result.status}: {result.verdict}"
    kernels = " then ".join(result.decision.kernels)
    parts = [
        _line(f"<b>{escape(verdict)}</b>", result.status),
        f'<div class="attnlab-dim">{escape(kernels)} on {escape(result.case.platform)}, '
        f"vLLM {escape(result.case.release)}, backend {escape(result.backend)}</div>",
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
    line = _line(f"<b>{escape(title)}</b> {escape(text)}", "rejected")
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


def _line(content: str, status: str) -> str:
    colour = _COLOURS[status]
    return f'<div style="border-left:4px solid {colour};padding-left:.6em">{content}</div>'


def _block(css_class: str, parts: Sequence[str]) -> str:
    return f'<div class="attnlab-text {css_class}">{"".join(parts)}</div>'
