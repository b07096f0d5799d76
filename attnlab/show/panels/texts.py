"""The texts of a panel, as HTML: verdict, dispatch, violations, selection. Each is a function of facts."""

from collections.abc import Sequence
from html import escape

from attnlab.contracts.dispatch import Decision
from attnlab.contracts.slot_use import Slot
from attnlab.contracts.violations import Violation
from attnlab.lab.result import Result
from attnlab.show.panels.panel_data import Selection
from attnlab.show.sheets.results import place_lines

# Mid-tones that read on white and on black; everything else inherits the page's colours.
_COLOURS = {
    "match": "#2da44e",
    "mismatch": "#e5534b",
    "rejected": "#a475c9",
    "silent": "#e5534b",
    "harmless": "#8a8a8a",
}
_MOST = 6  # lines of a list


def verdict_html(result: Result) -> str:
    """Return the verdict: what came of the Case, on which kernels, and where it is wrong."""
    words = result.verdict if result.errors is None else f"{result.status}: {result.verdict}"
    kernels = " then ".join(result.decision.kernels)
    parts = [
        _line(f"<b>{escape(words)}</b>", result.status),
        f'<div class="attnlab-dim">{escape(kernels)} on {escape(result.case.platform)}, '
        f"vLLM {escape(result.case.release)}, backend {escape(result.backend)}</div>",
    ]
    parts += [f"<div>{escape(line)}</div>" for line in place_lines(result.places(), most=2)]
    return _block(f"attnlab-verdict-line attnlab-is-{result.status}", parts)


def failure_html(title: str, text: str) -> str:
    """Return what stands in the verdict's place where there is no Result."""
    words = f"<b>{escape(title)}</b> {escape(text)}"
    return _block("attnlab-verdict-line attnlab-is-failure", [_line(words, "rejected")])


def dispatch_html(decision: Decision) -> str:
    """Return which kernel runs, and the predicate's terms; those that said no stand out."""
    parts = [f"<div>{escape(reason)}</div>" for reason in decision.reasons]
    rows = [
        f'<tr class="{"" if term.holds else "attnlab-no"}"><td>{"yes" if term.holds else "no"}</td>'
        f"<td>{escape(term.name)}</td><td>{escape(term.value)}</td><td>{escape(term.allowed)}</td></tr>"
        for term in decision.terms
    ]
    head = "<tr><th></th><th>term</th><th>is</th><th>allowed for the ROCm kernel</th></tr>"
    if rows:
        table = f'<table class="attnlab-terms">{head}{"".join(rows)}</table>'
        parts.append(f"<details><summary>{len(rows)} terms</summary>{table}</details>")
    parts.append(f'<div class="attnlab-dim">{escape(decision.source)}</div>')
    return _titled("who runs, and why", parts)


def breaches_html(violations: Sequence[Violation]) -> str:
    """Return the violations of the contracts, in the order in which a person would want to know them."""
    parts = [
        f'<div><b style="color:{_COLOURS[one.effect]}">{one.effect}</b> {escape(one.text)}</div>'
        for one in violations[:_MOST]
    ]
    if len(violations) > _MOST:
        parts.append(f"<div>… and {len(violations) - _MOST} more</div>")
    return _titled("violations of contract", parts or ["<div>none</div>"])


def selection_html(selection: Selection, query_len: int) -> str:
    """Return what is known of the selected head and row."""
    one = selection
    at = f"sequence {one.seq}, token {one.token} of {query_len} (row {one.row}), head {one.head}"
    if one.ran:
        numbers = f"element {one.element}: got {one.got:.6g}, expected {one.expected:.6g}"
        sizes = f"error {one.error:.4g}; {numbers}"
    else:
        sizes = "did not run"
    return _block(
        "attnlab-selection",
        [f"<div><b>{escape(at)}</b></div>", f"<div>{escape(sizes)}</div>", slot_html(one.place)],
    )


def slot_html(slot: Slot) -> str:
    """Return what is known of a slot."""
    at = f"block {slot.block}, slot {slot.slot}"
    if slot.owner is not None:
        at += f": sequence {slot.owner[0]}, position {slot.owner[1]} of its row"
    return (
        f'<div class="attnlab-slot">{escape(at)}<br>written by {_who(slot.writer)}; '
        f"read by {_who(slot.reader)}</div>"
    )


def _who(pair: tuple[int, int] | None) -> str:
    return "nobody" if pair is None else f"sequence {pair[0]}, position {pair[1]}"


def _line(words: str, status: str) -> str:
    return f'<div style="border-left:4px solid {_COLOURS[status]};padding-left:.6em">{words}</div>'


def _block(name: str, parts: Sequence[str]) -> str:
    return f'<div class="attnlab-text {name}">{"".join(parts)}</div>'


def _titled(title: str, parts: Sequence[str]) -> str:
    name = "attnlab-" + title.split()[0].strip(",")
    return _block(name, [f'<div class="attnlab-title"><b>{title}</b></div>', *parts])
