"""Sheets of MLA: a case, a path that ran, and a report of hostile cases."""

from typing import TYPE_CHECKING

from attnlab.mla.faults import MLA_FAULTS
from attnlab.show.sheets.sheet import Facts, Grid, Lines, Row, Sheet, Tone, Words

if TYPE_CHECKING:
    from attnlab.mla.mla_report import MlaReport
    from attnlab.mla.mla_result import MlaResult

_TONES: dict[str, Tone] = {"match": "good", "mismatch": "bad", "unavailable": "odd"}


def mla_result(one: "MlaResult") -> Sheet:
    """Return the verdict, the cause, and the steps with their errors."""
    lens = ", ".join(
        f"{q} after {c}" for q, c in zip(one.case.query_lens, one.case.ctx_lens, strict=True)
    )
    facts = [
        ("path", one.case.path),
        ("ops", one.ops),
        ("sequences", f"new tokens and context: {lens}"),
        ("largest error", f"{one.error:.3g}, {one.worst:.3g} × its bound"),
    ]
    if one.planted is not None:
        facts.append(("planted", one.planted))
    if one.first_wrong is not None:
        facts.append(("first wrong step", one.first_wrong))
    if one.status != "match":
        facts.append(("cause", _cause(one)))
    rows: list[Row] = [
        [
            step.name,
            step.kind,
            f"{float(step.ratio.amax()):.3g}",
            Words("right", "good")
            if step.is_right
            else Words(f"wrong in {len(step.wrong_rows)} rows", "bad"),
        ]
        for step in one.steps
    ]
    return Sheet(
        kind="MLA",
        line=f"<MlaResult: {one.case.path}, {one.status}>",
        head=Words(one.status, _TONES[one.status]),
        parts=[Facts(facts), Grid(["step", "kind", "error × bound", "verdict"], rows, "steps")],
    )


def _cause(one: "MlaResult") -> str:
    """Return the fault that explains the output, and the others that do."""
    if one.cause is None:
        return "no fault with a name explains it"
    others = ", ".join(one.candidates[1:])
    text = f"{one.cause}: {MLA_FAULTS[one.cause].text}"
    return f"{text} (or {others})" if others else text


def mla_report(one: "MlaReport") -> Sheet:
    """Return a row for each hostile case."""
    rows: list[Row] = []
    for case in one.results:
        cause = case.error or "" if case.result is None else case.result.cause or ""
        worst = "" if case.result is None else f"{case.result.worst:.3g}"
        rows.append(
            [case.case.path, case.reason, Words(case.status, _TONES[case.status]), worst, cause]
        )
    head = f"{len(one.findings)} findings in {len(one.results)} cases"
    tone: Tone = "bad" if one.findings else "good"
    lines = [f"{len(one.unavailable)} cases could not run here"] if one.unavailable else []
    columns = ["path", "case", "result", "error × bound", "cause"]
    return Sheet(
        kind="MLA check",
        line=f"<MlaReport: {head}>",
        head=Words(head, tone),
        parts=[
            Facts([("release", one.release), ("backend", one.backend)]),
            Grid(columns, rows, most=len(rows)),
            *([Lines(lines)] if lines else []),
        ],
    )
