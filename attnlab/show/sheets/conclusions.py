"""Sheets of what the lab concludes: Diagnosis, Power, the claims, and what ``attnlab check`` finds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlab.show.sheets.sheet import (
    Cell,
    Facts,
    Folded,
    Grid,
    Hidden,
    Lines,
    Link,
    Part,
    Row,
    Sheet,
    Tone,
    Words,
)

if TYPE_CHECKING:
    from attnlab.checker.finding import Finding
    from attnlab.checker.library import Report
    from attnlab.diagnosis.diagnosis import Diagnosis
    from attnlab.mutation.power import MutationReport
    from attnlab.study.claims.ledger import Finding as ClaimFinding
    from attnlab.study.claims.ledger import Findings
    from attnlab.study.overview import Chapters

_STATUS: dict[str, Tone] = {
    "nothing wrong": "good",
    "explained": "warn",
    "ambiguous": "odd",
    "unexplained": "bad",
    "rejected": "odd",
}
_OUTCOME: dict[str, Tone] = {"killed": "good", "survived": "bad", "equivalent": "quiet"}
_VERDICT: dict[str, Tone] = {"holds": "good", "fails": "bad", "cannot be decided": "odd"}
_COUNTED = {"holds": "hold", "fails": "fail", "cannot be decided": "cannot be decided"}
_HEARD: dict[str, Tone] = {"explains": "warn", "less likely": "odd"}


def diagnosis(one: "Diagnosis") -> Sheet:
    """Return what explains an output, sentence by sentence, and the candidates with their sizes."""
    from attnlab.diagnosis.diagnosis import CANDIDATE_COLUMNS, candidate_cells

    rows: list[Row] = []
    for candidate in one.candidates:
        cells: list[Cell] = [*candidate_cells(candidate)]
        cells[0] = Words(candidate.name, code=True)
        cells[5] = Words(str(cells[5]), _HEARD.get(candidate.verdict, "quiet"))
        rows.append(cells)
    title = "candidates at the failing place; sizes are largest absolute errors"
    looked = f"looked at {one.looked_at[0]} of {one.looked_at[1]} rows, {one.seconds:.1f} s"
    cause = one.cause.name if one.cause is not None else ""
    head = f"{one.status}: {cause}" if cause else one.status
    return Sheet(
        kind="Diagnosis",
        line=f"<Diagnosis: {head}>",
        head=Words(head, _STATUS[one.status]),
        parts=[
            Lines(one.sentences()),
            *([Grid(CANDIDATE_COLUMNS, rows, title, most=8)] if rows else []),
            Lines([Words(looked, "quiet")]),
        ],
    )


def power(one: "MutationReport") -> Sheet:
    """Return which defects a test would notice, survivors first, and what would show the others."""
    counts = ", ".join(f"{len(one.of(name))} {name}" for name in _OUTCOME)
    mutants = [mutant for name in ("survived", "killed", "equivalent") for mutant in one.of(name)]
    rows: list[Row] = [
        [
            Words(mutant.name, code=True),
            Words(mutant.outcome, _OUTCOME[mutant.outcome]),
            f"{mutant.effect:.3g}",
            f"{mutant.margin:.3g}",
            mutant.remedy_text,
        ]
        for mutant in mutants
    ]
    columns = ["defect", "outcome", "moves the output by", "of what is allowed", "cheapest change"]
    return Sheet(
        kind="MutationReport",
        line=f"<Power: {counts}>",
        head=Words(counts, "bad" if one.survivors else "good"),
        parts=[Lines(one.sentences()), Grid(columns, rows, most=10)],
    )


def claim(one: "ClaimFinding") -> Sheet:
    """Return what came of one claim."""
    said = one.claim
    return Sheet(
        kind=f"Claim {said.number}",
        line=f"<Claim {said.number}: {one.verdict}>",
        head=Words(one.verdict, _VERDICT[one.verdict]),
        parts=[
            Lines([f"“{said.text}” (notes {said.notes})", one.reading]),
            Facts([("rests on", one.rests_on), *_evidence(one)]),
        ],
    )


def claims(found: "Findings") -> Sheet:
    """Return the ledger: each claim, what came of it, on what evidence."""
    counts = ", ".join(
        f"{sum(one.verdict == name for one in found)} {counted}"
        for name, counted in _COUNTED.items()
        if any(one.verdict == name for one in found)
    )
    rows: list[Row] = [
        [
            one.claim.number,
            Words(one.verdict, _VERDICT[one.verdict]),
            one.claim.text,
            [one.reading, *_figures(one)],
            Words(one.rests_on, "quiet"),
        ]
        for one in found
    ]
    told = f"{len(found)} claims: {counts}" if found else "no claim"
    columns = ["", "verdict", "the notes say", "evidence", "rests on"]
    return Sheet(
        kind="Claims",
        line=f"<Claims: {told}>",
        head=told,
        parts=[Grid(columns, rows, most=len(rows))],
    )


def _figures(one: "ClaimFinding") -> list[Hidden]:
    """Return what an experiment measured, to be opened; nothing where it measured nothing."""
    lines = [f"{name}: {value}" for name, value in _evidence(one)]
    return (
        [Hidden("one figure" if len(lines) == 1 else f"{len(lines)} figures", lines)]
        if lines
        else []
    )


def chapters(found: "Chapters") -> Sheet:
    """Return the notebooks: what each asks, what comes of it, and which claims it bears on."""
    told = f"{len(found)} notebooks, {sum(bool(one.verdict) for one in found)} of them judged here"
    rows: list[Row] = [
        [
            Link(one.notebook[:2], one.notebook),
            Link(one.question, one.notebook),
            one.verdict or Words("nothing to judge: to be explored by hand", "quiet"),
            ", ".join(one.claims),
        ]
        for one in found
    ]
    columns = ["", "question", "what comes of it, computed here", "claims"]
    return Sheet(
        kind="Notebooks",
        line=f"<Chapters: {told}>",
        head=told,
        parts=[Grid(columns, rows, most=len(rows))],
    )


def _evidence(one: "ClaimFinding") -> list[tuple[str, str]]:
    from attnlab.show.notebook import as_text

    return [(name, as_text(value)) for name, value in one.evidence.items()]


def finding(one: "Finding") -> Sheet:
    """Return one thing that a kernel does wrong, and the smallest Case that shows it."""
    return Sheet(
        kind="Finding",
        line=f"<Finding: {one.op}: {one.kind}, {one.diagnosis}>",
        head=Words(f"{one.op}: {one.kind}", "bad" if one.is_fault else "warn"),
        parts=[
            Facts(
                [
                    ("evidence", one.evidence),
                    ("diagnosis", one.diagnosis),
                    ("seen in", f"{one.seen} cases"),
                    ("smallest case", Words(one.case.to_cli(), code=True)),
                ]
            )
        ],
    )


def report(one: "Report") -> Sheet:
    """Return what came of a library: its findings, its observations, and what was left out."""
    told = f"{one.version}: {one.cases_run} cases in {one.seconds:.0f} s, "
    told += f"{len(one.findings)} findings"
    tables: list[Part] = []
    for title, found in (("findings", one.findings), ("observed besides", one.observations)):
        if found:
            tables.append(_finding_grid(title, found))
        else:
            tables.append(Lines([Words(f"{title}: none", "good")]))
    if one.reads:
        tables.append(_reads_grid(one))
    left = Folded("left out", [Lines(one.left_out)])
    return Sheet(
        kind="Report",
        line=f"<Report: {told}>",
        head=Words(told, "bad" if one.findings else "good"),
        parts=[*tables, left],
    )


def _finding_grid(title: str, found: Sequence["Finding"]) -> Grid:
    rows: list[Row] = [
        [
            one.op,
            one.kind,
            one.diagnosis,
            one.seen,
            [one.evidence, Words(one.case.to_cli(), code=True)],
        ]
        for one in found
    ]
    columns = ["op", "kind", "diagnosis", "seen in", "evidence, and the smallest case"]
    return Grid(columns, rows, title)


def _reads_grid(one: "Report") -> Grid:
    """Return how many slots of each kind the kernels of each op read."""
    rows: list[Row] = []
    for op, counts in one.reads.items():
        named = {kind.replace("_", " "): n for kind, n in counts.items() if n}
        fine = one.reads_allowed[op]
        told = [Words(f"{n} {kind}", "" if kind in fine else "warn") for kind, n in named.items()]
        rows.append([op, told or "none"])
    return Grid(["op", "slots read, by what they are to the reader"], rows, most=len(rows))
