"""Pictures of X-rays, and the pages of coverage, of releases and of the findings of a check."""

import base64
import io
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.errors import AttnLabError, check_installed
from attnlab.case.ops import OPS
from attnlab.case.output_file import make_output_folder, write_bytes, write_text
from attnlab.checker.case_run import run_case
from attnlab.checker.finding import KINDS, Finding
from attnlab.checker.releases import STATES, Fault, OpRun, ReleaseTable, ranges
from attnlab.checker.report import Report
from attnlab.kernels.backend import Backend
from attnlab.lab.cache_write import owners_of
from attnlab.lab.lab import Lab
from attnlab.lab.result import ErrorMap, map_errors
from attnlab.reports.pages import render_page
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

    from attnlab.show.plots.weights import plot_xray

    with plt.style.context("dark_background" if is_dark else "default"):
        figure = Figure(figsize=(13.5, 7.6), layout="constrained")
        plot_xray(key_columns(one), law_points(one), figure=figure)
        room = io.BytesIO()
        figure.savefig(room, format="png", dpi=dpi, transparent=is_transparent)
    return base64.b64encode(room.getvalue()).decode()


# Pages of coverage: the annotated source of each op, and an overview.
#
# The source comes from the report of the check, which read it from the vLLM that was checked. It is written
# to the user's folder only.


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of a page: its number, its text as HTML, and its state.

    - ``state``: "reached", "missed", "partly" (a branch lacks an outcome), "excused", or "" for a line
      without code.
    - ``note``: what no case reached, and the reason if there is one.
    """

    number: int
    html: str
    state: str
    note: str


def check_writable(folder: Path) -> None:
    """Create the folder of the pages.

    Raises Unavailable if a package of the reports is missing, InvalidCase if the folder cannot be created.
    """
    check_installed("pages", "jinja2", "nbconvert", "pygments")
    make_output_folder(folder, "coverage_html")


def write_coverage(report: "Report", folder: Path, command: str) -> Path:
    """Write a page for each op of a report and ``index.html``; return the latter.

    Raises the errors of :func:`check_writable`.
    """
    check_writable(folder)
    from attnlab.reports.pages import render_page

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


def _lines(function: "Function", found: "OpCoverage") -> Iterator[SourceLine]:
    """Yield the lines of a function."""
    gaps = _by_line(function, found.missing)
    excused = _by_line(function, found.excused)
    for i, line in enumerate(_coloured("\n".join(function.text))):
        number = function.line + i
        missing, allowed = gaps.get(number, []), excused.get(number, [])
        state = "reached" if number in function.statements else ""
        if missing or allowed:
            is_line = any(gap.what == "line" for gap in missing)
            state = "missed" if is_line else "partly" if missing else "excused"
        notes = [gap.what if gap.what != "line" else "not reached" for gap in missing]
        notes = [f"never {note}" if note != "not reached" else note for note in notes]
        notes += dict.fromkeys(gap.reason for gap in allowed)
        yield SourceLine(number=number, html=line, state=state, note="; ".join(notes))


def _by_line(function: "Function", gaps: list["Gap"]) -> dict[int, list["Gap"]]:
    """Return the gaps of a function by line."""
    found: dict[int, list[Gap]] = {}
    for gap in gaps:
        if (gap.file, gap.function) == (function.file.as_posix(), function.name):
            found.setdefault(gap.line, []).append(gap)
    return found


def _coloured(text: str) -> list[str]:
    """Return the lines of a Python text as HTML with Pygments' classes."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.python import PythonLexer

    html: str = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return html.splitlines()


# The page of ``attnlab releases``: a row per fault, a column per release.

SIGNS = {"finding": "●", "sound": "·", "other fault": "○", "absent": "", "not run": "?"}
NATIVE_SIGNS = {"yes": "✓", "no": "✗", "not confirmed": "≠", "not runnable": "–", "not tried": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault as the page shows it.

    ``spans``: the releases that have it, as ranges without gaps; ``kind``: in words; ``command``: runs its
    smallest case in the first release; ``group``: the heading above it; ``runs``: of a fault of several
    libraries, what its calls did, by state.
    """

    number: int
    fault: Fault
    spans: str
    kind: str
    command: str
    group: str
    runs: dict[str, list[tuple[OpRun, str]]]


def write_releases(path: Path, table: ReleaseTable, command: str = "") -> None:
    """Write the table as one self-contained HTML page; ``command``: what made it, default this command."""
    faults = sorted(table.faults, key=lambda one: _GROUPS.index(_age(table, one)))
    rows = [_row(table, number, fault) for number, fault in enumerate(faults, 1)]
    groups = groupby(rows, lambda row: row.group)
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
        command=command or shlex.join(["attnlab", *sys.argv[1:]]),
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


def _group(table: ReleaseTable, fault: Fault) -> str:
    """Return the heading above a fault."""
    age = _age(table, fault)
    return f"{age}: {fault.family}" if age == _NEVER else age or fault.finding.op


def _title(table: ReleaseTable) -> str:
    """Return what the table is about."""
    libraries = [*table.libraries]
    if len(libraries) == 1:
        return f"Faults of {libraries[0]}'s attention ops, {table.span}"
    return f"Faults of the attention ops of {', '.join(libraries[:-1])} and {libraries[-1]}"


def _row(table: ReleaseTable, number: int, fault: Fault) -> Row:
    finding, first = fault.finding, next(iter(fault.releases), "")
    is_vllm = finding.case.backend == "vllm" and not finding.horizon
    source = f" --source $(attnlab fetch --ops {first})" if is_vllm else ""
    return Row(
        number=number,
        fault=fault,
        spans=spans(table.releases, fault),
        kind=KINDS[finding.kind],
        command=finding.run(first) + source,
        group=_group(table, fault),
        runs={
            state: [(one, ranges(table.releases, one.releases)) for one in of]
            for state in STATES
            if (of := [one for one in fault.runs if one.state == state])
        },
    )


def spans(releases: list[str], fault: Fault) -> str:
    """Return the releases that have a fault as ranges, such as "0.9.0 to 0.11.2, 0.30.0"."""
    return ranges(releases, fault.releases)


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
    """Create the folder.

    Raises Unavailable if matplotlib or a package of the reports is missing, and InvalidCase if the folder
    cannot be created.
    """
    check_installed("pictures", "jinja2", "matplotlib", "pygments")
    make_output_folder(folder, "pictures")


def write_pictures(report: Report, backend: Backend, folder: Path, command: str) -> Path:
    """Write a PNG of each finding, and a page with all of them, to ``folder``; return the page.

    The page has an X-ray of each finding. The Cases run again. Raises the errors of :func:`check_drawable`.
    """
    check_folder(folder)
    from attnlab.reports.pages import write_findings

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
    kind = KINDS[finding.kind]
    if finding.horizon:
        return Picture(finding=finding, kind=kind, why="no tensor of this size was allocated")
    if finding.kind == "fails":
        return Picture(
            finding=finding, kind=kind, why="the call raised an error, so there is no output"
        )
    cases = {"first found": finding.first, "the smallest case": finding.case}
    try:
        maps = {
            words: errors_of(lab, backend, case, finding)
            for words, case in cases.items()
            if case is not None
        }
    except AttnLabError as error:
        return Picture(finding=finding, kind=kind, why=f"the second run raised an error: {error}")
    owners = [owners_of(case) for case in cases.values() if case is not None]
    data = _drawn(maps, owners, f"{finding.op}: {finding.diagnosis}")
    write_bytes(path, data)
    return Picture(
        finding=finding,
        kind=kind,
        path=path,
        data=base64.b64encode(data).decode(),
        **_xray(lab, backend, finding),
    )


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

    from attnlab.show.plots.errors import plot_error

    figure = Figure(figsize=(7.5 * len(maps), 5.2), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for panel, (words, errors), cache_of in zip(panels, maps.items(), owners, strict=True):
        plot_error(errors, cache_of=cache_of, title=f"{words}: {_place(errors)}", ax=panel)
    figure.suptitle(title, fontweight="bold")
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=110)
    return room.getvalue()


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
