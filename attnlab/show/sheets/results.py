"""Sheets of what came of a run: violations, ErrorMap, Result and the table of stages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import (
    Cell,
    Facts,
    Folded,
    Grid,
    Lines,
    Part,
    Row,
    Sheet,
    Tone,
    Words,
)
from attnlab.show.terminal import describe, place_lines

if TYPE_CHECKING:
    from attnlab.contracts.violation import Violation, Violations
    from attnlab.lab.error_map import ErrorMap
    from attnlab.lab.result import Result
    from attnlab.lab.stage_table import Cell as StageCell
    from attnlab.lab.stage_table import StageTable

STATUS: dict[str, Tone] = {"match": "good", "mismatch": "bad", "rejected": "odd"}
_EFFECT: dict[str, Tone] = {"rejected": "odd", "silent": "bad", "harmless": "quiet"}


def violations(found: "Violations") -> Sheet:
    """Return a row for each violation."""
    told = _count(len(found), "violation", "violations")
    kinds = ", ".join(dict.fromkeys(f"{one.effect} {one.kind}" for one in found))
    return Sheet(
        kind="Violations",
        line=f"<Violations: {told}{': ' + kinds if kinds else ''}>",
        head=Words(told if found else "none", "bad" if is_serious(found) else "good"),
        parts=[_breach_grid(found)] if found else [],
    )


def is_serious(found: Sequence["Violation"]) -> bool:
    """Answer whether a violation changes what comes out."""
    return any(one.effect != "harmless" for one in found)


def _breach_grid(found: Sequence["Violation"], title: str = "") -> Grid:
    rows: list[Row] = [
        [Words(one.effect, _EFFECT[one.effect]), one.subject, one.text] for one in found
    ]
    return Grid(["effect", "of", "what"], rows, title)


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def errors(one: "ErrorMap") -> Sheet:
    """Return how many elements are off and by how much, and the same for each sequence."""
    told = f"{one.mismatched} of {one.total} elements off by more than {_allowed(one)}"
    return Sheet(
        kind="ErrorMap",
        line=f"<ErrorMap: {told}, greatest {one.greatest_abs.value:.4g}>",
        head=Words(told, "bad" if one.mismatched else "good"),
        parts=[Facts(_error_facts(one)), _seq_grid(one)],
    )


def _allowed(one: "ErrorMap") -> str:
    return f"{one.atol:g}" + (f" + {one.rtol:g} × |expected|" if one.rtol else "")


def _error_facts(one: "ErrorMap") -> list[tuple[str, Cell]]:
    facts: list[tuple[str, Cell]] = [
        (f"greatest {name}", f"{greatest.value:.4g} at {greatest.index}")
        for name, greatest in (("absolute", one.greatest_abs), ("relative", one.greatest_rel))
    ]
    if one.first_index is not None:
        facts.append(("first", str(one.first_index)))
    if one.nan_elements:
        facts.append(("NaN", Words(f"{one.nan_elements} elements", "bad")))
    for name, span in (("heads", one.heads), ("rows", one.rows)):
        if span is not None:
            facts.append((f"{name} that ran", f"{span.start} to {span.stop - 1}"))
    return facts


def _seq_grid(one: "ErrorMap") -> Grid:
    """Return a row for each sequence: rows and elements that are off, and the largest error."""
    lens = one.lengths
    wrong = one.mismatches.sum(1).split(list(lens.query_lens))
    rows: list[Row] = []
    for seq, (elements, error) in enumerate(zip(wrong, one.seq_error(), strict=True)):
        off, count = int((elements > 0).sum()), int(elements.sum())
        size = "not run" if error == float("-inf") else f"{error:.3g}"
        rows.append(
            [
                seq,
                lens.ctx_lens[seq],
                lens.query_lens[seq],
                off,
                count,
                Words(size, "bad" if count else "quiet" if size == "not run" else "good"),
            ]
        )
    columns = ["sequence", "context", "new", "rows off", "elements off", "largest error"]
    return Grid(columns, rows)


def result(one: "Result") -> Sheet:
    """Return what ran and why, the violations, what came of it and where it went wrong."""
    decision = one.decision
    facts: list[tuple[str, Cell | Sequence[Cell]]] = [
        ("case", describe(one.case)),
        ("kernels", f"{', then '.join(decision.kernels)} (backend {one.backend})"),
        ("why", [str(reason) for reason in decision.reasons]),
    ]
    if one.errors is not None:
        greatest = one.errors.greatest_abs
        size = f"greatest {greatest.value:.4g} at {greatest.index}"
        facts.append(("error", f"{size}, up to {_allowed(one.errors)} allowed"))
        if places := one.places():
            facts.append(("places", place_lines(places)))
    for name, lines in (
        ("memory", one.memory.lines() if one.memory is not None else []),
        ("launched", one.launches),
        ("seen", (*one.wraps, *one.outside)),
    ):
        if lines:
            facts.append((name, [Words(line, "warn" if name == "seen" else "") for line in lines]))
    told = one.verdict if one.errors is None else f"{one.status}: {one.verdict}"
    return Sheet(
        kind="Result",
        line=f"<Result: {told}>",
        head=Words(told, STATUS[one.status]),
        parts=[Facts(facts), *_result_breaches(one), *_result_folds(one)],
    )


def _result_breaches(one: "Result") -> list[Part]:
    if not one.violations:
        return [Lines([Words("no violation of a contract", "good")])]
    return [_breach_grid(one.violations, "violations, found without running it")]


def _result_folds(one: "Result") -> list[Part]:
    spent = ", ".join(f"{step} {s:.2f}" for step, s in one.seconds.items())
    last = Lines([Words(f"seconds: {spent}", "quiet")])
    return [last] if one.errors is None else [last, Folded("by sequence", [_seq_grid(one.errors)])]


def stages(table: "StageTable") -> Sheet:
    """Return a row for each stage, a column for each platform, and in them what came of it."""
    platforms = list(dict.fromkeys(cell.platform for cell in table))
    names = list(dict.fromkeys(cell.stage for cell in table))
    at = {(cell.stage, cell.platform): cell for cell in table}
    wrong = sum(cell.status != "match" for cell in table)
    told = (
        f"{len(names)} stages on {', '.join(platforms)}: {wrong} of {len(table)} runs do not match"
    )
    rows: list[Row] = [
        [
            name,
            *(_stage_cell(at[name, platform]) for platform in platforms if (name, platform) in at),
        ]
        for name in names
    ]
    return Sheet(
        kind="Stages",
        line=f"<StageTable: {told}>",
        head=told,
        parts=[Grid(["stage", *platforms], rows, most=len(rows))],
    )


def _stage_cell(cell: "StageCell") -> list[Cell]:
    sizes = [
        f"{name} {error:.1e}"
        for name, error in (("decode", cell.decode_error), ("prefill", cell.prefill_error))
        if error is not None
    ]
    told: list[Cell] = [Words(cell.verdict, STATUS[cell.status])]
    return told + ([Words(", ".join(sizes), "quiet")] if sizes else [])
