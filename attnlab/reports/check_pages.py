"""Pictures of X-rays, and the pages of coverage, of releases and of the findings of a check."""

import base64
import hashlib
import os
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnlab import __version__
from attnlab.case.case import Case, Lengths
from attnlab.case.errors import AttnLabError, InvalidCase, check_installed
from attnlab.case.ops import OPS
from attnlab.case.output_file import make_output_folder, write_bytes, write_text
from attnlab.checker.case_run import run_case
from attnlab.checker.finding import KINDS, OBSERVATIONS, Finding
from attnlab.checker.matrix import junit_text, suite_of
from attnlab.checker.releases import STATES, Fault, ReleaseTable, ranges
from attnlab.checker.report import NotRun, Report
from attnlab.kernels.backend import Backend
from attnlab.lab.cache_write import owners_of
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, map_errors
from attnlab.reports.pages import png_of, render_page, write_findings
from attnlab.weights.conclude import xray
from attnlab.weights.xray import XRay, key_columns, law_points

if TYPE_CHECKING:
    from attnlab.checker.coverage import Gap, OpCoverage
    from attnlab.kernels.vllm.features import Function


def check_packages() -> None:
    """Raise Unavailable if a package of the page is missing."""
    check_installed("html", "jinja2", "matplotlib", "pygments")


def xray_picture(one: XRay, *, is_dark: bool, dpi: int = 90, is_transparent: bool = True) -> str:
    """Return a PNG in base64: measured weights, expected weights, their difference, and the law."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    from attnlab.show.plots import plot_xray

    with plt.style.context("dark_background" if is_dark else "default"):
        figure = Figure(figsize=(13.5, 7.6), layout="constrained")
        plot_xray(key_columns(one), law_points(one), figure=figure)
        data = png_of(figure, dpi, is_transparent=is_transparent)
    return base64.b64encode(data).decode()


# Pages of coverage: the annotated source of each op, and an overview.
#
# The source comes from the report of the check, which read it from the vLLM that was checked. It is written
# to the user's folder only.


def check_writable(folder: Path) -> None:
    """Create the folder of the pages."""
    check_installed("pages", "jinja2", "nbconvert", "pygments")
    make_output_folder(folder, "coverage_html")


def write_coverage(report: "Report", folder: Path, command: str) -> Path:
    """Write a page for each op of a report and ``index.html``; return the latter."""
    check_writable(folder)
    facts = {"report": report, "command": command}
    for op, found in report.coverage.items():
        functions = [(one, [*_lines(one, found)]) for one in found.functions]
        title = f"{op}: coverage by {report.version}"
        page = render_page(
            "coverage_op.html.j2", title=title, op=op, found=found, functions=functions, **facts
        )
        write_text(folder / f"{op}.html", page)
    page = render_page("coverage.html.j2", title=f"Coverage of {report.version}", **facts)
    write_text(folder / "index.html", page)
    return folder / "index.html"


def _lines(function: "Function", found: "OpCoverage") -> Iterator[dict[str, Any]]:
    """Yield the lines of a function for the template: the number, the text as HTML, the state and a note.

    - ``state``: "reached", "missed", "partly" (a branch lacks an outcome), "excused", or "" for a line
      without code.
    - ``note``: what no case reached, and the reason if there is one.
    """
    gaps = _by_line(function, found.missing)
    excused = _by_line(function, found.excused)
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.python import PythonLexer

    html: str = highlight(
        "\n".join(function.text), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    )
    for i, line in enumerate(html.splitlines()):
        number = function.line + i
        missing, allowed = gaps.get(number, []), excused.get(number, [])
        state = "reached" if number in function.statements else ""
        if missing or allowed:
            is_line = any(gap.what == "line" for gap in missing)
            state = "missed" if is_line else "partly" if missing else "excused"
        notes = [f"never {gap.what}" if gap.what != "line" else "not reached" for gap in missing]
        notes += dict.fromkeys(gap.reason for gap in allowed)
        yield {"number": number, "html": line, "state": state, "note": "; ".join(notes)}


def _by_line(function: "Function", gaps: list["Gap"]) -> dict[int, list["Gap"]]:
    """Return the gaps of a function by line."""
    found: dict[int, list[Gap]] = {}
    for gap in gaps:
        if (gap.file, gap.function) == (function.file.as_posix(), function.name):
            found.setdefault(gap.line, []).append(gap)
    return found


SIGNS = {"finding": "●", "sound": "·", "other fault": "○", "absent": "", "not run": "?"}
NATIVE_SIGNS = {"yes": "✓", "no": "✗", "not confirmed": "≠", "not runnable": "–", "not tried": ""}


def write_releases(path: Path, table: ReleaseTable) -> None:
    """Write the table as one self-contained HTML page."""
    faults = sorted(table.faults, key=lambda one: _GROUPS.index(_age(table, one)))
    rows = [_row(table, number, fault) for number, fault in enumerate(faults, 1)]
    groups = groupby(rows, itemgetter("group"))
    page = render_page(
        "releases.html.j2",
        title=_title(table),
        table=table,
        rows=rows,
        by_op=[(name, [*group]) for name, group in groups],
        minors=[(name, [*group]) for name, group in groupby(table.releases, _minor)],
        signs=SIGNS,
        native_signs=NATIVE_SIGNS,
        is_native_tried=any(fault.native for fault in table.faults),
        counts=Counter(state for fault in table.faults for state in fault.cells.values()),
        states=STATES,
        command=shlex.join(["attnlab", *sys.argv[1:]]),
    )
    write_text(path, page)


# Faults of several libraries, by the newest release that has them.
_CURRENT, _EARLIER = "in the newest release of a library", "in earlier releases"
_NEVER = "in no release"
_GROUPS = ("", _CURRENT, _EARLIER, _NEVER)


def _age(table: ReleaseTable, fault: Fault) -> str:
    """Return which releases of several libraries have a fault, "" for a fault of one library."""
    if not fault.family:
        return ""
    newest = {of[-1] for of in table.libraries.values()}
    return _CURRENT if newest & {*fault.releases} else _EARLIER if fault.releases else _NEVER


def _title(table: ReleaseTable) -> str:
    """Return what the table is about."""
    libraries = [*table.libraries]
    if len(libraries) == 1:
        return f"Faults of {libraries[0]}'s attention ops, {table.span}"
    return f"Faults of the attention ops of {', '.join(libraries[:-1])} and {libraries[-1]}"


def _row(table: ReleaseTable, number: int, fault: Fault) -> dict[str, Any]:
    """Return a fault as the page shows it.

    ``spans``: the releases that have it, as ranges without gaps; ``kind``: in words; ``command``: runs its
    smallest case in the first release; ``group``: the heading above it; ``runs``: of a fault of several
    libraries, what its calls did, by state.
    """
    finding, first = fault.finding, next(iter(fault.releases), "")
    is_state = finding.state_case is not None
    is_vllm = not is_state and finding.case.backend == "vllm" and not finding.horizon
    source = f" --source $(attnlab fetch --ops {first})" if is_vllm else ""
    source = " --source SOURCE" if is_state else source
    age = _age(table, fault)
    return {
        "number": number,
        "fault": fault,
        "spans": ranges(table.releases, fault.releases),
        "kind": KINDS[finding.kind],
        "command": finding.run(first) + source,
        "group": f"{age}: {fault.family}" if age == _NEVER else age or fault.finding.op,
        "runs": {
            state: [(one, ranges(table.releases, one.releases)) for one in of]
            for state in STATES
            if (of := [one for one in fault.runs if one.state == state])
        },
    }


def _minor(version: str) -> str:
    """Return the library of a version, if it has one, and its first two numbers."""
    library, _, numbers = version.rpartition(" ")
    return ".".join([library, *re.findall(r"\d+", numbers)[:2]])


# Pictures of the findings of a check: an error map and an X-ray for each, and one page with all of them.

_XRAY_S = 6.0  # time for the search for a description
_NO_WEIGHTS = ("wrong_lse",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A finding and the file of its picture.

    ``data`` is the file in base64, ``kind`` the kind of finding as text. Without a picture ``path`` is
    None and ``why`` states the reason. ``xray``: the X-ray of the smallest Case, with its pictures for light
    and dark screens in base64, or None; ``no_xray`` then states the reason.
    """

    finding: Finding
    kind: str
    path: Path | None = None
    data: str = ""
    why: str = ""
    xray: XRay | None = None
    light: str = ""
    dark: str = ""
    no_xray: str = ""


def check_folder(folder: Path) -> None:
    """Create the folder."""
    check_installed("pictures", "jinja2", "matplotlib", "pygments")
    make_output_folder(folder, "pictures")


def write_pictures(report: Report, backend: Backend, folder: Path, command: str) -> Path:
    """Write a PNG of each finding, and a page with all of them, to ``folder``; return the page."""
    check_folder(folder)
    lab = Lab(source=backend.path, device="cpu")
    pictures = [
        _picture(lab, backend, finding, folder / f"{i:02d}-{finding.op}-{finding.kind}.png")
        for i, finding in enumerate(report.findings, 1)
    ]
    page = folder / "index.html"
    write_findings(page, report, pictures, command)
    return page


def _picture(lab: Lab, backend: Backend, finding: Finding, path: Path) -> Picture:
    """Draw a finding at the Case where it was first found and at its smallest Case, and write ``path``."""
    picture = partial(Picture, finding=finding, kind=KINDS[finding.kind])
    if finding.horizon:
        return picture(why="no tensor of this size was allocated")
    if finding.kind == "fails":
        return picture(why="the call raised an error, so there is no output")
    given = {"first found": finding.first, "the smallest case": finding.case}
    cases = {words: case for words, case in given.items() if case is not None}
    try:
        maps = {words: errors_of(lab, backend, case, finding) for words, case in cases.items()}
    except AttnLabError as error:
        return picture(why=f"the second run raised an error: {error}")
    owners = [owners_of(case) for case in cases.values()]
    data = _drawn(maps, owners, f"{finding.op}: {finding.diagnosis}")
    write_bytes(path, data)
    text = base64.b64encode(data).decode()
    return picture(path=path, data=text, **_xray(lab, backend, finding))


def _xray(lab: Lab, backend: Backend, finding: Finding) -> dict[str, Any]:
    """Return the X-ray of a finding's smallest Case and its pictures, or why there is none."""
    if OPS[finding.op].writes_cache:
        return {"no_xray": "the op weighs no values"}
    if finding.kind in _NO_WEIGHTS:
        return {"no_xray": "the finding does not concern the weighted sum"}
    try:
        found = xray(finding.case, backend=backend, lab=lab, confirm=False, limit_s=_XRAY_S)
    except AttnLabError as error:
        return {"no_xray": str(error)}
    pictures = {
        name: xray_picture(found, is_dark=name == "dark", dpi=70) for name in ("light", "dark")
    }
    return {"xray": found, **pictures}


def _drawn(maps: dict[str, ErrorMap], owners: Sequence[int | None], title: str) -> bytes:
    """Return a PNG with the error maps side by side; ``owners`` as from ``owners_of``, for each map."""
    from matplotlib.figure import Figure

    from attnlab.show.plots import plot_error

    figure = Figure(figsize=(7.5 * len(maps), 5.2), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for panel, (words, errors), cache_of in zip(panels, maps.items(), owners, strict=True):
        plot_error(errors, cache_of=cache_of, title=f"{words}: {_place(errors)}", ax=panel)
    figure.suptitle(title, fontweight="bold")
    return png_of(figure, 110)


def _place(errors: ErrorMap) -> str:
    """Return where the error is, as text."""
    places = errors.places()
    if not places:
        return "nothing beyond rounding"
    worst = max(
        places, key=lambda place: float(errors.error[place.row].nan_to_num(torch.inf).max())
    )
    head = int(errors.error[worst.row].nan_to_num(torch.inf).argmax())
    return (
        f"{len(places)} of {len(errors.error)} rows,\nthe worst sequence {worst.seq}, "
        f"token {worst.token}, head {head}"
    )


def errors_of(lab: Lab, backend: Backend, case: Case, finding: Finding) -> ErrorMap:
    """Run a Case and return the errors of its finding, with the rounding bound as tolerance."""
    ran = run_case(lab, backend, case)
    if finding.kind == "wrong_lse" and ran.lse is not None:
        expected, bound = lab.expected_lse(case)
        given = ran.lse[: len(expected), :, None]
        return map_errors(given, expected[..., None], case.lengths, float(bound.max()), 0.0)
    if finding.diagnosis == "both parts empty" and ran.padded is not None:
        rows = Lengths(query_lens=(len(ran.padded),), ctx_lens=(0,))
        return map_errors(ran.padded, torch.zeros_like(ran.padded), rows, 0.0, 0.0)
    call = lab.call(case)
    call.buffer.copy_(ran.output)
    case = case.replace(atol=None, rtol=0.0)
    return lab.errors(case, call, lab.reference(case))


# The report of a check as JUnit XML, for CI systems.
#
# A test suite per op, and in it a test case per kind of fault. So their names are the same in every run. A
# fault is a failure; a known one is skipped with its link; what did not run is skipped with the reason.

_NOT_RUN, _MISSING = "cases that did not run", "known findings that no longer appear"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Return the report as a document of JUnit XML."""
    root = ET.Element("testsuites", name=_clean(f"attnlab check of {report.version}"))
    for op in report.ops:
        root.append(_suite(report, op))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{report.seconds:.3f}")
    return junit_text(root)


def _suite(report: Report, op: str) -> ET.Element:
    """Return the test suite of an op."""
    findings = [finding for finding in report.findings if finding.op == op]
    cases = [
        _kind(report, op, kind, [finding for finding in findings if finding.kind == kind])
        for kind in KINDS
    ]
    cases += [_skipped(op, entry, i) for i, entry in enumerate(_of_op(report.not_run, op), 1)]
    for entry in report.missing:
        if entry.op == op:
            case = _case(op, f"{_MISSING}: {entry.kind}, {entry.diagnosis}")
            ET.SubElement(case, "failure", type="missing", message=_clean(entry.link))
            cases.append(case)
    return suite_of(op, cases)


def _kind(report: Report, op: str, kind: str, findings: list[Finding]) -> ET.Element:
    """Return the test case of a kind of fault."""
    case = _case(op, kind)
    location = report.location(findings[0]) if findings else report.locations.get(op)
    if location is not None:
        case.set("file", location.file)
        case.set("line", str(location.line))
    unexpected = [finding for finding in findings if finding in report.unexpected]
    if unexpected:
        first = unexpected[0]
        message = _clean(f"{first.title}: {first.evidence}")
        failure = ET.SubElement(case, "failure", type=kind, message=message)
        failure.text = _clean("\n\n".join(_details(report, finding) for finding in unexpected))
    elif findings:
        links = [entry.link for entry in report.known if entry.finding in findings]
        ET.SubElement(case, "skipped", message=_clean(f"known: {', '.join(links)}"))
    elif not report.ops[op]:
        reasons = [entry.reason for entry in _of_op(report.not_run, op)]
        text = "; ".join(reasons) or "the library does not support any case of the op"
        ET.SubElement(case, "skipped", message=_clean(f"no case ran: {text}"))
    return case


def _skipped(op: str, entry: NotRun, number: int) -> ET.Element:
    """Return the test case of cases that did not run."""
    case = _case(op, f"{_NOT_RUN} ({number})")
    ET.SubElement(case, "skipped", message=_clean(f"{entry.cases}: {entry.reason}"))
    ET.SubElement(case, "system-out").text = _clean(f"the first of them: {entry.run}")
    return case


def _details(report: Report, finding: Finding) -> str:
    """Return a finding in lines: what is wrong, where, and the command that shows it."""
    location = report.location(finding)
    lines = [
        f"{finding.title}, in {finding.seen_in(report.ops[finding.op])}",
        finding.evidence,
        *([] if location is None else [str(location)]),
        finding.run(report.source),
    ]
    return "\n".join(lines)


def _case(op: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=f"attnlab.{op}", name=_clean(name), time="0")


def _of_op(entries: list[NotRun], op: str) -> list[NotRun]:
    return [entry for entry in entries if entry.op == op]


def _clean(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)


_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_RULES = {**KINDS, **OBSERVATIONS}
_ROOT = "%SRCROOT%"


def sarif(report: Report) -> dict[str, Any]:
    """Return the report as a SARIF log with one run.

    A fault has level "error", an observation "note". A known fault is suppressed, with its link. What did
    not run is a notification of the run.
    """
    findings = [*report.findings, *report.observations]
    rules = [
        {
            "id": kind,
            "shortDescription": {"text": text},
            "defaultConfiguration": {"level": _level(kind)},
        }
        for kind, text in _RULES.items()
    ]
    run = {
        "tool": {"driver": {"name": "attnlab", "version": __version__, "rules": rules}},
        "automationDetails": {"id": f"attnlab check/{report.version}/"},
        "originalUriBaseIds": {
            _ROOT: {"description": {"text": f"the root of the source of {report.version}"}}
        },
        "invocations": [
            {
                "executionSuccessful": not report.not_run,
                "exitCode": report.exit_code,
                "toolExecutionNotifications": [
                    {"level": "warning", "message": {"text": text}} for text in _warnings(report)
                ],
            }
        ],
        "results": [_result(report, finding) for finding in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _level(kind: str) -> str:
    return "error" if kind in KINDS else "note"


def _warnings(report: Report) -> list[str]:
    """Return what did not run, and the known findings that no longer appear."""
    missing = [
        f"{entry.op}: the known finding {entry.kind} ({entry.diagnosis}) no longer appears: {entry.link}"
        for entry in report.missing
    ]
    return [*report.warnings(), *missing]


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    """Return one finding."""
    text = f"{finding.op}: {_RULES[finding.kind]} ({finding.title}). {finding.evidence}"
    if finding.lines:
        text += f". {finding.lines[0].text}"
    # What identifies a finding over commits: its op, kind and diagnosis, not its line.
    fingerprint = hashlib.sha256("\0".join(finding.group).encode()).hexdigest()[:32]
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": [*_RULES].index(finding.kind),
        "level": _level(finding.kind),
        "message": {"text": text},
        "partialFingerprints": {"finding/v1": fingerprint},
        "properties": {
            "diagnosis": finding.diagnosis,
            "names": [*finding.names],
            "description": finding.description,
            "casesThatShowIt": finding.seen,
            "command": finding.run(report.source),
        },
    }
    location = report.location(finding)
    if location is not None:
        logical = {"name": finding.op, "kind": "function"}
        physical = _physical(location.file, location.line)
        result["locations"] = [{"physicalLocation": physical, "logicalLocations": [logical]}]
    if finding.lines[1:]:
        result["relatedLocations"] = [
            {"physicalLocation": _physical(line.file, line.line), "message": {"text": line.reason}}
            for line in finding.lines[1:]
        ]
    links = [entry.link for entry in report.known if entry.finding == finding]
    if links:
        result["suppressions"] = [{"kind": "external", "justification": links[0]}]
    return result


def _physical(file: str, line: int) -> dict[str, Any]:
    """Return a line of a file, relative to the root of the source unless it is outside."""
    artifact: dict[str, Any] = {"uri": file}
    if not file.startswith(("/", "../")):
        artifact["uriBaseId"] = _ROOT
    return {"artifactLocation": artifact, "region": {"startLine": line}}


VARIABLE = "GITHUB_STEP_SUMMARY"
_HEAD = "| op | finding | diagnosis | cases | line |\n|---|---|---|---|---|"


def summary(report: Report) -> str:
    """Return the report in Markdown: a verdict, a table of the findings, and what did not run."""
    parts = [
        f"## attnlab check: {_text(report.version)}",
        f"**{_verdict(report)}**: {report.cases_run} of {report.cases} cases ran, "
        f"{len(report.findings)} findings, {len(report.known)} of them known, "
        f"{len(report.observations)} observations",
    ]
    if report.findings:
        rows = [_check_files_row(report, finding) for finding in report.findings]
        commands = "\n".join(finding.run(report.source) for finding in report.findings)
        folded = (
            f"<details><summary>Smallest cases</summary>\n\n```sh\n{commands}\n```\n\n</details>"
        )
        parts += ["\n".join([_HEAD, *rows]), folded]
    lists = {
        "Known findings that no longer appear": [
            f"{entry.op}, {entry.kind}, {entry.diagnosis}: {entry.link}" for entry in report.missing
        ],
        "Not run": report.warnings(),
    }
    for title, lines in lists.items():
        if lines:
            parts.append("\n".join([f"{title}:", "", *(f"- {_text(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def _verdict(report: Report) -> str:
    """Return what the exit code means."""
    if report.unexpected:
        return "findings"
    if report.missing:
        return "known findings no longer appear"
    return "no new findings, but not all cases ran" if report.not_run else "no new findings"


def _check_files_row(report: Report, finding: Finding) -> str:
    """Return the row of a finding."""
    place = report.location(finding)
    cases = finding.seen_in(report.ops[finding.op]).removesuffix(" cases")
    words = (finding.op, finding.kind, finding.title, cases, "" if place is None else str(place))
    cells = [*map(_text, words)]
    known = next((entry.link for entry in report.known if entry.finding == finding), "")
    if known:
        cells[1] += f" ([known]({known}))"
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line of a table."""
    for character in "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def append_summary(report: Report) -> None:
    """Append the summary to the file that GITHUB_STEP_SUMMARY names, if it is set."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(summary(report))
    except OSError as error:
        raise InvalidCase(
            f"{VARIABLE} must be a file that can be written, got {path}: {error.strerror}"
        ) from error
