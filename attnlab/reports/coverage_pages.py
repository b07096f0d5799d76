"""Pages of coverage: the annotated source of each op, and an overview.

The source comes from the report of the check, which read it from the vLLM that was checked. It is written to
the user's folder only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.errors import Unavailable
from attnlab.case.output_file import make_output_folder, write_text

if TYPE_CHECKING:
    from attnlab.checker.coverage import Gap, OpCoverage
    from attnlab.checker.report import Report
    from attnlab.kernels.vllm.op_functions import Function


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
    try:
        import jinja2  # noqa: F401
        import nbconvert  # noqa: F401
        import pygments  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"pages need the lab extra: pip install 'attnlab[lab]' ({error})"
        ) from error
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
    for i, html in enumerate(_coloured("\n".join(function.text))):
        number = function.line + i
        missing, allowed = gaps.get(number, []), excused.get(number, [])
        state = "reached" if number in function.statements else ""
        if missing or allowed:
            is_line = any(gap.what == "line" for gap in missing)
            state = "missed" if is_line else "partly" if missing else "excused"
        notes = [gap.what if gap.what != "line" else "not reached" for gap in missing]
        notes = [f"never {note}" if note != "not reached" else note for note in notes]
        notes += dict.fromkeys(gap.reason for gap in allowed)
        yield SourceLine(number=number, html=html, state=state, note="; ".join(notes))


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
