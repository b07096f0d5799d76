"""Sheets of conclusions: Diagnosis, MutationReport, the findings of ``attnlab check``, and horizons."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attnlab.show.sheets.sheet import (
    Cell,
    Command,
    Facts,
    Grid,
    Lines,
    Part,
    Row,
    Sheet,
    Tone,
    Words,
)

if TYPE_CHECKING:
    from attnlab.checker.finding import Finding
    from attnlab.checker.releases import ReleaseTable
    from attnlab.checker.report import Report
    from attnlab.diagnosis.diagnosis import Diagnosis
    from attnlab.horizon.deployment import Deployment
    from attnlab.horizon.survey import Row as Horizon
    from attnlab.horizon.survey import Survey
    from attnlab.lab.writes import WriteReport
    from attnlab.linear.state_check import StateFinding, StateReport, StateXRay
    from attnlab.mla.run import MlaReport, MlaResult
    from attnlab.mutation.power import MutationReport
    from attnlab.weights.xray import XRay

_STATUS: dict[str, Tone] = {
    "nothing wrong": "good",
    "explained": "warn",
    "ambiguous": "odd",
    "described": "warn",
    "unexplained": "bad",
    "rejected": "odd",
    "not decided": "quiet",
}
_OUTCOME: dict[str, Tone] = {"killed": "good", "survived": "bad", "equivalent": "quiet"}
_EXIT_CODE: dict[int, Tone] = {0: "good", 1: "bad", 3: "warn"}
_CANDIDATE: dict[str, Tone] = {"explains": "warn", "less likely": "odd"}


_NEAREST = 2  # excluded candidates in the table; all are in the JSON


def diagnosis(one: "Diagnosis") -> Sheet:
    """Return what explains an output, and the candidates with their sizes; of those that are excluded,
    the nearest, and the number of the others."""
    from attnlab.diagnosis.diagnosis import CANDIDATE_COLUMNS, candidate_cells

    rows: list[Row] = []
    shown = [each for each in one.candidates if not each.verdict.startswith("excluded")]
    excluded = [each for each in one.candidates if each.verdict.startswith("excluded")]
    for candidate in [*shown, *excluded[:_NEAREST]]:
        cells: list[Cell] = [*candidate_cells(candidate)]
        cells[0] = Words(candidate.name, code=True)
        cells[5] = Words(str(cells[5]), _CANDIDATE.get(candidate.verdict, "quiet"))
        rows.append(cells)
    title = "candidates at the failing place; sizes are largest absolute errors"
    examined, every = one.looked_at
    covered = [f"{every} rows compared with the reference"] if every else []
    covered += [f"candidates with {examined} of them"] if one.candidates else []
    covered += [f"{one.seconds:.1f} s"]
    head = one.status if one.cause is None else f"{one.status}: {one.cause.name}"
    head = head if one.instability is None else f"{head}: not deterministic"
    command = None if one.distinction is None else one.distinction.command
    return Sheet.of(
        "Diagnosis",
        head,
        Lines(one.sentences()),
        Command(command, "the case that decides; your kernel must run it") if command else None,
        Grid(CANDIDATE_COLUMNS, rows, title, most=8),
        Lines([_excluded_text(one.counts())]) if len(excluded) > _NEAREST else None,
        Lines([Words(", ".join(covered), "quiet")]),
        tone=_STATUS[one.status],
    )


def _excluded_text(counts: dict[str, int]) -> str:
    """Return how many candidates are excluded, and where to find them."""
    counted = [f"{n} {verdict}" for verdict, n in counts.items() if verdict.startswith("excluded")]
    return f"candidates {', '.join(counted)}; --json lists them all"


def power(one: "MutationReport") -> Sheet:
    """Return which defects a test detects, survivors first, and the change that detects each."""
    counts = ", ".join(f"{len(one.of(name))} {name}" for name in _OUTCOME)
    mutants = [mutant for name in ("survived", "killed", "equivalent") for mutant in one.of(name)]
    rows: list[Row] = [
        [
            Words(mutant.name, code=True),
            Words(mutant.outcome_text, _OUTCOME[mutant.outcome]),
            f"{mutant.effect:.3g}",
            f"{mutant.margin:.3g}",
            mutant.remedy_text,
        ]
        for mutant in mutants
    ]
    size, change = "change of the output", "cheapest change that kills it"
    columns = ["defect", "outcome", size, "÷ tolerance", change]
    return Sheet.of(
        "MutationReport",
        counts,
        Lines(one.sentences()),
        Grid(columns, rows, most=10),
        tone="bad" if one.survivors else "good",
    )


def finding(one: "Finding") -> Sheet:
    """Return one fault of a kernel, and the smallest Case that shows it."""
    return Sheet.of(
        "Finding",
        f"{one.op}: {one.kind}",
        Facts(
            [
                ("diagnosis", one.title),
                *(("source", line.text) for line in one.lines),
                ("evidence", one.evidence),
                ("seen in", one.seen_in()),
            ]
        ),
        Command(one.command, "horizon" if one.horizon else "smallest case"),
        tone="bad" if one.is_fault else "warn",
        line=f"{one.op}: {one.kind}, {one.title}",
    )


def report(one: "Report") -> Sheet:
    """Return the findings and observations of a library, its slot reads, and what was not checked."""
    new = one.unexpected
    count = "1 finding" if len(new) == 1 else f"{len(new)} findings"
    count += f" and {len(one.known)} known" if one.known else ""
    summary = f"{one.version}: {count}; {one.cases_run} cases in {one.seconds:.0f} s"
    parts: list[Part] = []
    if one.not_run:
        missing = sum(entry.cases for entry in one.not_run)
        text = f"{missing} of {one.cases} cases did not run; a fault may be among them"
        parts.append(Lines([Words(text, "bad"), *one.warnings()]))
    parts += _known_parts(one)
    for title, found in (("findings", new), ("observations", one.observations)):
        if found:
            parts.append(_finding_grid(title, found))
            parts += [Command(each.command, f"{each.op}: {each.title}") for each in found]
        else:
            parts.append(Lines([Words(f"{title}: none", "good")]))
    forms: list[Row] = [
        [op, form, count] for op, of in one.forms.items() for form, count in of.items()
    ]
    parts += [_reads_grid(one), Grid(["op", "kernels", "cases"], forms, most=len(forms))]
    parts += _coverage_parts(one)
    parts.append(Lines([f"written: {path}" for path in one.reports or ()]))
    parts.append(Grid(["not checked"], [[text] for text in one.left_out], most=3))
    return Sheet.of("Report", summary, *parts, tone=_EXIT_CODE[one.exit_code])


def _coverage_parts(one: "Report") -> list[Part]:
    """Return the coverage of each op, and the lines and outcomes that no case reached."""
    rows: list[Row] = []
    gaps: list[Row] = []
    arguments: list[Row] = []
    for op, found in one.coverage.items():
        counts = (found.lines, found.branches)
        reached = [f"{n.reached} of {n.total} ({n.percent:.1f} %)" for n in counts]
        rows.append([op, *reached, *(f"{n.percent_of_reachable:.1f} %" for n in counts)])
        for what, several in (("", found.missing), ("listed as unreachable: ", found.outdated)):
            gaps += [[op, f"{gap.file}:{gap.line}", what + gap.what, gap.text] for gap in several]
        arguments += [
            [op, one.name, " ".join(one.values)[:40], "; ".join(one.gaps) or "; ".join(one.reasons)]
            for one in found.parameters
            if one.gaps or one.reasons
        ]
    columns = ["op", "lines", "branches", "reachable lines", "reachable branches"]
    why = ["op", "parameter", "values", "what did not occur, or why it does not matter"]
    return [
        Grid(columns, rows, "coverage", most=len(rows)),
        Grid(["op", "place", "never", "text"], gaps, "not reached", most=20),
        Grid(why, arguments, "arguments", most=20),
    ]


def _known_parts(one: "Report") -> Iterator[Grid]:
    """Yield the known findings with their links, and those that no longer appear."""
    columns = ["op", "kind", "diagnosis", "link"]
    for title, entries in (
        ("known findings", one.known),
        ("known findings that no longer appear: update the list", one.missing),
    ):
        rows = [[entry.to_dict()[name] for name in columns] for entry in entries]
        yield Grid(columns, rows, title, most=len(rows))


def _finding_grid(title: str, found: Sequence["Finding"]) -> Grid:
    rows: list[Row] = [
        [one.op, one.kind, one.title, "" if one.horizon else one.seen, one.evidence]
        for one in found
    ]
    return Grid(["op", "kind", "what is known", "cases", "evidence"], rows, title)


def _reads_grid(one: "Report") -> Grid:
    """Return how many slots of each kind the kernels of each op read."""
    rows: list[Row] = []
    for op, counts in one.reads.items():
        allowed = {kind.replace(" ", "_") for kind in one.reads_allowed[op]}
        words = [
            Words(f"{n} {kind.replace('_', ' ')}", "" if kind in allowed else "warn")
            for kind, n in counts.items()
            if n
        ]
        rows.append([op, words or "none"])
    return Grid(["op", "slots read, by what they are to the reader"], rows, most=len(rows))


_TONES: dict[str, Tone] = {
    "match": "good",
    "mismatch": "bad",
    "failed": "bad",
    "unavailable": "odd",
}


def write_report(one: "WriteReport") -> Sheet:
    """Return a row for each hostile write."""
    rows: list[Row] = []
    for result in one.results:
        wrong = ", ".join(f"{count} {kind}" for kind, count in result.wrong.items())
        rows.append(
            [result.name, Words(result.status, _TONES[result.status]), result.error or wrong]
        )
    head = f"{len(one.findings)} findings in {len(one.results)} writes"
    columns = ["write", "result", "wrong"]
    return Sheet.of(
        "Cache writes",
        head,
        Facts([("ops", one.backend)]),
        Grid(columns, rows, most=len(rows)),
        tone="bad" if one.findings else "good",
        name="WriteReport",
    )


def release_table(one: "ReleaseTable") -> Sheet:
    """Return a row per fault with its first and last release, and what did not run."""
    found = one.found
    count = "1 fault" if len(found) == 1 else f"{len(found)} faults"
    line = (
        f"{one.span}: {count} in {len(one.releases)} releases; "
        f"{one.cases_run} cases in {one.seconds:.0f} s"
    )
    is_native_tried = any(fault.native for fault in found)
    rows: list[Row] = [
        [
            fault.finding.op,
            fault.finding.kind,
            fault.finding.title,
            fault.releases[0],
            fault.releases[-1],
            len(fault.releases),
            *([fault.is_native] if is_native_tried else []),
        ]
        for fault in found
    ]
    columns = ["op", "kind", "diagnosis", "first", "last", "releases"]
    columns += ["on a GPU"] if is_native_tried else []
    left: list[Row] = [[entry.op, entry.cases, entry.reason] for entry in one.not_run]
    return Sheet.of(
        "ReleaseTable",
        line,
        Grid(columns, rows, "faults", most=len(rows)),
        Grid(["release and op", "cases", "reason"], left, "not run"),
        tone=_EXIT_CODE.get(one.exit_code, "bad"),
    )


_XRAY_STATUS: dict[str, Tone] = {
    "right": "good",
    "precision": "warn",
    "described": "bad",
    "undecided": "odd",
    "unreadable": "odd",
}


def xray(one: "XRay") -> Sheet:
    """Return the conclusion, the fitted law, and the sums of the rows that are wrong."""
    setup, wrong = one.setup, one.wrong
    rows: list[Row] = []
    for index in wrong.any(1).nonzero().flatten().tolist():
        sums = one.weights[index].sum(-1)
        least, most = float(sums.min()), float(sums.max())
        text = (
            f"{least:.4g}" if most - least < 1e-4 or most != most else f"{least:.4g} to {most:.4g}"
        )
        rows.append(
            [
                int(setup.rows[index]),
                int(setup.seq[index]),
                int(setup.position[index]),
                setup.kernels[index],
                f"{int(wrong[index].sum())} of {len(setup.heads)}",
                text,
            ]
        )
    columns = ["row", "sequence", "position", "kernel", "wrong heads", "sum of weights"]
    grid = Grid(columns, rows, "rows with wrong weights", most=8)
    sentences = Lines(list(one.sentences))
    return Sheet.of(
        "XRay", one.status, sentences, Facts(_facts(one)), grid, tone=_XRAY_STATUS[one.status]
    )


def _facts(one: "XRay") -> list[tuple[str, str]]:
    """Return the backend, and the fit of the log weights."""
    facts = [("backend", one.backend)]
    if one.law is not None:
        facts.append(
            (
                "log weight",
                f"{one.law.score:.4g} ± {one.law.score_error:.1g} × score, "
                f"spread {one.law.spread:.2g} ({one.law.count} weights)",
            )
        )
    return [*facts, ("seconds", f"{one.seconds:.2f}")]


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
    return Sheet.of(
        "MLA",
        one.status,
        Facts(facts),
        Grid(["step", "kind", "error × bound", "verdict"], rows, "steps"),
        tone=_TONES[one.status],
        name="MlaResult",
        line=f"{one.case.path}, {one.status}",
    )


def _cause(one: "MlaResult") -> str:
    """Return the fault that explains the output, and the others that do."""
    if one.cause is None:
        return "no fault with a name explains it"
    others = ", ".join(one.candidates[1:])
    from attnlab.mla.faults import MLA_FAULTS

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
    lines = [f"{len(one.unavailable)} cases could not run here"] if one.unavailable else []
    columns = ["path", "case", "result", "error × bound", "cause"]
    return Sheet.of(
        "MLA check",
        head,
        Facts([("release", one.release), ("backend", one.backend)]),
        Grid(columns, rows, most=len(rows)),
        Lines(lines),
        tone="bad" if one.findings else "good",
        name="MlaReport",
    )


def state_report(one: "StateReport") -> Sheet:
    """Return a row for each finding of a check of linear attention."""
    rows: list[Row] = [
        [Words(each.op, code=True), each.title, each.evidence, ", ".join(each.reasons)]
        for each in one.findings
    ]
    ran = sum(one.ops.values())
    commands = [each.case.to_cli() for each in one.findings]
    return Sheet.of(
        "Check",
        f"{len(rows)} findings in {ran} cases of {len(one.ops)} ops",
        Facts([("source", one.source), ("seconds", f"{one.seconds:.0f}")]),
        Grid(["op", "finding", "evidence", "cases"], rows, most=len(rows)),
        Lines(["Run one of them (with --source):", *commands]) if commands else None,
        Lines([f"Not run: {text}" for text in one.not_run]),
        Lines([f"Left out: {text}" for text in one.left_out]),
        tone="bad" if rows else "good",
        name="StateReport",
    )


def state_finding(one: "StateFinding") -> Sheet:
    """Return a fault of an op of linear attention."""
    facts = [("op", one.op), ("evidence", one.evidence), ("run", one.case.to_cli())]
    return Sheet.of("Finding", one.title, Facts(facts), tone="bad", name="StateFinding")


def state_xray(one: "StateXRay") -> Sheet:
    """Return what the weights of an op of linear attention show."""
    facts = [
        ("op", one.case.op),
        ("source", one.source),
        ("largest error", f"{one.worst:.3g} × its bound"),
        ("largest error of a weight", f"{one.worst_weight:.3g} × its bound"),
        ("runs", str(one.weights.runs)),
    ]
    tone: Tone = "good" if one.status == "right" else "bad"
    sentences = Lines(list(one.sentences))
    return Sheet.of("XRay", one.status, sentences, Facts(facts), tone=tone, name="StateXRay")


_MOST_SIZES = 6  # in a row


def survey(one: "Survey") -> Sheet:
    """Return the horizons of described launches, those of assumed ones, and what did not run."""
    described = [row for row in one.rows if row.is_described]
    assumed = [row for row in one.rows if not row.is_described]
    ran = len(one.kernels) - len(one.not_run)
    summary = f"{ran} of {len(one.kernels)} kernels ran, {len(one.rows)} horizon{'s' * (len(one.rows) != 1)}"
    if one.deployment is not None:
        summary += f", {len(one.reached)} reached by {one.deployment.name}"
    missing = [[f"{k.file}:{k.line}", k.kernel, k.why] for k in one.not_run]
    missing += [[file, "", why] for file, why in one.broken.items()]
    part: Part | None = None
    if described:
        part = _horizon_grid("launches as the library makes them", described, one.deployment)
    elif any(each.is_described for each in one.kernels):
        text = "launches as the library makes them: no access uses a wrapped value"
        part = Lines([Words(text, "good")])
    facts = [("source", one.source), ("processor time", f"{one.seconds:.0f} s")]
    if one.deployment is not None:
        limits = ", ".join(f"{name} {value:,}" for name, value in one.deployment.limits.items())
        facts.append(("deployment", f"{one.deployment.name}: {limits}"))
    proof = "each size was run, and the size before it; others are as in the column 'with'"
    return Sheet.of(
        "Horizon",
        summary,
        Facts([*facts, ("proof", proof)]),
        part,
        _horizon_grid("launches that attnlab assumes", assumed, None) if assumed else None,
        Grid(["file", "kernel", "why it was not run"], missing, title="not run", most=8),
        tone="bad" if one.reached else "warn" if one.exit_code else "good",
        name="Survey",
    )


def _horizon_grid(title: str, rows: "list[Horizon]", deployment: "Deployment | None") -> Grid:
    columns = ["kernel, line", "expression", "wrong from", "with", "effect"]
    cells: list[list[Any]] = []
    for row in rows:
        one = row.statement
        begin = f"{one.size} {one.wrong_at:,}"
        if one.wraps_at != one.wrong_at:
            begin += f" (wraps, but masked, from {one.wraps_at:,})"
        named = one.sizes
        if deployment is None and len(named) > _MOST_SIZES:
            named = {n: v for n, v in named.items() if re.search(rf"\b{n}\b", one.site.text)}
        others = (
            ", ".join(f"{name} {value:,}" for name, value in named.items())
            or "--json has the others"
        )
        more = f" and {row.also} more" if row.also else ""
        name = f"{row.kernel.kernel} {one.site.place}"
        cells.append([name, Words(one.site.text + more, code=True), begin, others, one.effect])
        if deployment is not None:
            cells[-1].append(_reached(row))
    if deployment is not None:
        columns.append("reached")
    return Grid(columns, cells, title=title, most=20)


def _reached(row: "Horizon") -> Words:
    if row.margin is None:
        return Words("size not in the deployment", "quiet")
    text = f"{'yes' if row.is_reached else 'no'}: {row.margin:.2g} times {row.limits[row.statement.size]:,}"
    return Words(text, "bad" if row.is_reached else "good")
