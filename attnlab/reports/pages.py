"""Write what an investigation found for people: HTML pages that load nothing from anywhere."""

import logging
import re
from collections.abc import Collection, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.reports.notebook_result import Results, Status, one_line, write_text
from attnlab.reports.standalone import self_contained
from attnlab.show.notebook import PROVENANCE_MIME, VERDICT_MIME, Verdict, as_text, versions

_TEMPLATES = Path(__file__).parent / "templates"
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
# Richest first; what needs JavaScript is not in the list and is left out of a report.
_SHOWN = [
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/markdown",
    "text/latex",
    "text/plain",
]


def write_post_mortem(
    executed: Path,
    html: Path,
    *,
    command: str,
    failure: str = "",
    status: Status = "passed",
    pages: Collection[str] = (),
) -> None:
    """Write an executed notebook as one HTML file that loads nothing from anywhere.

    `command` is what a reader types to make the report again; `failure` says what went wrong, and
    `status` how the notebook ended. `pages` names the notebooks that have a page beside this one: links
    to these lead there, and links to other files that a page does not take along are plain text.
    """
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    papermill = notebook.metadata.get("papermill", {})
    folder = Path(papermill.get("input_path") or executed).parent
    provenance = _read_mime(notebook, PROVENANCE_MIME)[-1:]
    page = _render(
        "post_mortem.html.j2",
        title=read_title(notebook) or executed.stem,
        body=self_contained(_body(notebook, folder, status), pages),
        failure=failure or _last_error(notebook),
        status=status,
        verdicts=read_verdicts(notebook),
        provenance=provenance,
        case_command=_case_command(provenance),
        command=command,
        date=_date(papermill.get("start_time")),
        versions=next((one["versions"] for one in provenance if "versions" in one), versions()),
    )
    write_text(html, page)


def write_index(results: Results, path: Path) -> None:
    """Write the page that leads to the reports."""
    page = _render(
        "overview.html.j2",
        title="attnlab: verdicts",
        results=results,
        outcomes=results.outcomes,
        total=results.total,
        folder=path.parent,
        versions=versions(),
        date=_date(None),
    )
    write_text(path, page)


def write_findings(path: Path, report: Any, pictures: Sequence[Any], command: str) -> None:
    """Write what ``attnlab check`` found as one page, a picture for each finding; `report` is its Report,
    `pictures` are :class:`attnlab.reports.findings_page.Picture`."""
    page = _render(
        "findings.html.j2",
        title=f"attnlab check: {report.version}",
        report=report,
        pictures=pictures,
        command=command,
        versions=versions(),
        date=_date(None),
    )
    write_text(path, page)


def read_title(notebook: Any) -> str:
    """Return the text of the notebook's first H1, or an empty string."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"(?m)^# +(.+)$", cell.source)):
            return re.sub(r"[`*]", "", found[1]).strip()
    return ""


def read_summary(notebook: Any) -> str:
    """Return the paragraph that begins with "**Verdict.**" as plain text, or an empty string."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (
            found := re.search(r"\*\*Verdict\.\*\* (.+?)(?:\n\s*\n|$)", cell.source, re.DOTALL)
        ):
            return " ".join(re.sub(r"[`*]", "", found[1]).split())
    return ""


def read_verdicts(notebook: Any) -> list[Verdict]:
    """Return the verdicts that an executed notebook shows, each name once."""
    verdicts = [Verdict.from_json(data) for data in _read_mime(notebook, VERDICT_MIME)]
    return list({verdict.name: verdict for verdict in verdicts}.values())


def drop_widgets(notebook: Any) -> None:
    """Take out of an executed notebook what needs the kernel that it ran in: the state of its widgets, and
    each view of one that a static output stands beside. Changes ``notebook``."""
    notebook.metadata.pop("widgets", None)
    for data in (output.data for output in _outputs(notebook) if "data" in output):
        if "text/html" in data:
            data.pop(_WIDGET_MIME, None)


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _read_mime(notebook: Any, mime: str) -> list[Any]:
    datas = (output.get("data", {}) for output in _outputs(notebook))
    return [data[mime] for data in datas if mime in data]


def _last_error(notebook: Any) -> str:
    """Return the exception that ended the notebook as one line, or an empty string."""
    errors = [output for output in _outputs(notebook) if output.output_type == "error"]
    return f"{errors[-1].ename}: {one_line(errors[-1].evalue)}" if errors else ""


def _date(iso: str | None) -> str:
    moment = datetime.fromisoformat(iso).astimezone(UTC) if iso else datetime.now(UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _case_command(provenance: Sequence[Any]) -> str:
    """Return the command line that runs the Case on record, or an empty string where there is none."""
    for facts in provenance:
        try:
            return Case.from_dict(facts["case"]).to_cli()
        except (KeyError, TypeError, InvalidCase):
            continue  # a notebook on something else
    return ""


def _body(notebook: Any, folder: Path, status: Status) -> str:
    """Render the cells with nbconvert; pictures that markdown names are looked for in `folder`."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    exporter = HTMLExporter(
        template_name="classic",
        template_file="notebook.html.j2",
        extra_template_paths=[str(_TEMPLATES)],
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"hint": _hint},
        config=Config({"NbConvertBase": {"display_data_priority": _SHOWN}}),
        log=logging.Logger("nbconvert", logging.CRITICAL),
    )
    body, _ = exporter.from_notebook_node(
        _prepared(notebook, status), {"metadata": {"path": str(folder)}}
    )
    return str(body)


def _prepared(notebook: Any, status: Status) -> Any:
    """Return what a report shows of a notebook.

    papermill's own error markers go, since the report has a better one; so does the provenance,
    which is in the footer; and a widget gives way to what else its output has. Where the notebook did
    not come to its end, each code cell says whether it was run.
    """
    marker = "papermill-error-cell-tag"
    shown = deepcopy(notebook)
    shown.metadata.pop("widgets", None)
    shown.cells = [cell for cell in shown.cells if marker not in cell.metadata.get("tags", [])]
    for cell in shown.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if _is_shown(output)]
    for data in (output.data for output in _outputs(shown) if "data" in output):
        if data.pop(_WIDGET_MIME, None) and not set(data) & set(_SHOWN) - {"text/plain"}:
            data["text/html"] = '<p class="note">(interactive in JupyterLab)</p>'
    if status != "passed":
        _mark_progress(shown.cells, status)
    return shown


def _mark_progress(cells: Sequence[Any], status: Status) -> None:
    """Note in each code cell's metadata whether the notebook stopped in it, or did not come to it.

    papermill gives a start time to each cell that it comes to, and to no other.
    """
    told = [cell for cell in cells if cell.cell_type == "code" and "papermill" in cell.metadata]
    begun = [cell for cell in told if cell.metadata.papermill.get("start_time")]
    for cell in told:
        if cell not in begun:
            cell.metadata["attnlab"] = "not run"
    raised = [cell for cell in begun if cell.metadata.papermill.get("exception")]
    for cell in begun[-1:] if status in ("died", "timeout", "interrupted") else raised:
        cell.metadata["attnlab"] = "stopped here"


def _is_shown(output: Any) -> bool:
    """Say whether a report has a way, and a reason, to show an output."""
    if "data" not in output:
        return True
    return PROVENANCE_MIME not in output.data and bool({*_SHOWN, _WIDGET_MIME} & set(output.data))


def _hint(source: str) -> str:
    """Return the first line of a cell, for the summary that the cell is folded under."""
    return next((line for line in source.splitlines() if line.strip()), "")


def _render(template: str, **facts: Any) -> str:
    """Fill one of the lab's page templates; all that is not marked as HTML is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    pages.filters["as_text"] = as_text
    css = (_TEMPLATES / "style.css").read_text(encoding="utf-8") + _code_colours()
    return pages.get_template(template).render(css=css, **facts)


def _code_colours() -> str:
    """Return Pygments' CSS for code, light and dark."""
    from pygments.formatters.html import HtmlFormatter

    light, dark = (
        HtmlFormatter(style=style, nobackground=True).get_style_defs(".highlight")
        for style in ("default", "github-dark")
    )
    return f"\n{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
