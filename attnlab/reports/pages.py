"""Write the pages of an investigation: self-contained HTML files."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.output_file import write_text
from attnlab.reports.body import TEMPLATES, render_body
from attnlab.reports.executed import (
    read_error,
    read_post_mortem,
    read_provenance,
    read_title,
    read_verdicts,
)
from attnlab.reports.notebook_result import Results, Status
from attnlab.reports.standalone import headings, lift_picture, self_contained
from attnlab.show.notebook import as_text, versions


def write_post_mortem(
    executed: Path,
    html: Path,
    *,
    command: str,
    failure: str = "",
    status: Status = "passed",
    pages: Mapping[str, str] | None = None,
) -> None:
    """Write an executed notebook as one self-contained HTML file.

    ``command`` reproduces the page; ``failure`` states what went wrong, and ``status`` how the notebook
    ended. ``pages`` maps the notebooks that have a page in the same folder to their titles, in order:
    links to these notebooks lead to their pages, and other links to files become plain text.
    """
    import nbformat

    notebook, pages = nbformat.read(executed, as_version=4), pages or {}
    papermill = notebook.metadata.get("papermill", {})
    folder = Path(papermill.get("input_path") or executed).parent
    provenance = read_provenance(notebook)
    body = self_contained(render_body(notebook, folder, status), pages)
    report = read_post_mortem(notebook)
    picture = lift_picture(body) if report else ""
    previous, following = _neighbours(html.stem, pages)
    page = _render(
        "post_mortem.html.j2",
        title=read_title(notebook) or executed.stem,
        body=str(body),
        contents=headings(body),
        report=report,
        picture=picture,
        previous=previous,
        following=following,
        failure=failure or read_error(notebook),
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
    """Write the page that links to all others, titled by the incident of the first post-mortem."""
    reports = [one.report for one in results.outcomes if one.report and one.report.incident]
    incident = reports[0] if reports else None
    page = _render(
        "overview.html.j2",
        title=f"{incident.incident}: post-mortem" if incident else "attnlab: verdicts",
        incident=incident,
        results=results,
        outcomes=results.outcomes,
        total=results.total,
        folder=path.parent,
        versions=versions(),
        date=_date(None),
    )
    write_text(path, page)


def write_findings(path: Path, report: Any, pictures: Sequence[Any], command: str) -> None:
    """Write the findings of ``attnlab check`` as one page, with a picture for each finding.

    ``report`` is the Report of the check, ``pictures`` are
    :class:`attnlab.reports.findings_page.Picture`.
    """
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


def render_page(template: str, **facts: Any) -> str:
    """Return a page of a template, with the versions and the date."""
    return _render(template, versions=versions(), date=_date(None), **facts)


def _neighbours(
    name: str, pages: Mapping[str, str]
) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    """Return the page before and the page after one, each as its file and title, or None."""
    order = sorted(pages)
    if name not in order:
        return None, None
    at = order.index(name)
    links = [{"page": f"{one}.html", "title": pages[one] or one} for one in order]
    return (links[at - 1] if at else None), (links[at + 1] if at + 1 < len(links) else None)


def _date(iso: str | None) -> str:
    moment = datetime.fromisoformat(iso).astimezone(UTC) if iso else datetime.now(UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _case_command(provenance: Sequence[Any]) -> str:
    """Return the command line that runs the recorded Case, or "" if none is recorded."""
    for facts in provenance:
        try:
            return Case.from_dict(facts["case"]).to_cli()
        except (KeyError, TypeError, InvalidCase):
            continue  # the notebook records something else
    return ""


def _render(template: str, **facts: Any) -> str:
    """Fill a page template; everything that is not marked as HTML is escaped."""
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8") + _code_colours()
    return str(_environment().get_template(template).render(css=css, **facts))


@cache
def _environment() -> Any:
    """Return the templates; each is compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["as_text"] = as_text
    return environment


@cache
def _code_colours() -> str:
    """Return Pygments' CSS for code, light and dark."""
    from pygments.formatters.html import HtmlFormatter

    light, dark = (
        HtmlFormatter(style=style, nobackground=True).get_style_defs(".highlight")
        for style in ("default", "github-dark")
    )
    return f"\n{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
