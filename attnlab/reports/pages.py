"""Write the pages of an investigation: self-contained HTML files."""

import io
import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.output_file import write_text
from attnlab.case.shown import STEP_MIME
from attnlab.reports.notebook_result import POST_MORTEM_MIME, PostMortem, Results, Status, one_line
from attnlab.show.notebook import (
    PROVENANCE_MIME,
    VERDICT_MIME,
    VERDICTS_MIME,
    Verdict,
    as_text,
    versions,
)

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from matplotlib.figure import Figure

# Make a piece of HTML self-contained: nothing is loaded, no script runs, no link is dead.

_LOADERS = ["script", "link", "iframe", "frame", "object", "embed", "base", "meta"]
_LOADING = ["src", "srcset", "poster", "data", "background", "xlink:href", "action", "formaction"]
_LOADING += ["ping"]
_CSS_LOAD = re.compile(r"@import[^;]*;?|url\(\s*['\"]?(?!['\"]?(?:data:|#))[^)]*\)", re.I)
_NOTEBOOK_LINK = re.compile(r"(?:\./)?(\d\d-[\w.-]+)\.ipynb(#.*)?$")
_PAGE_LINK = re.compile(r"(https?:|mailto:|#)", re.I)
_NO_ALT = "No description has been provided for this image"


def self_contained(body: str, pages: Collection[str] = ()) -> "BeautifulSoup":
    """Return parsed HTML without loaders, scripts and dead links; every picture has an alternative text.

    A link to a notebook of ``pages`` becomes a link to its page. Links to the web and within the page
    stay. Every other link becomes plain text.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(body, "html.parser")
    for tag in soup.find_all(_LOADERS):
        tag.decompose()
    for tag in soup.find_all(True):
        for name in [name for name in tag.attrs if _is_loading(tag.name, name, str(tag[name]))]:
            del tag[name]
        if tag.name == "img":
            _clean_picture(tag)
        elif tag.name in ("a", "area") and tag.has_attr("href"):
            _clean_link(tag, pages)
        elif "style" in tag.attrs:
            tag["style"] = _CSS_LOAD.sub("none", str(tag["style"]))
        elif tag.name == "style":
            tag.string = _CSS_LOAD.sub("", tag.get_text())
    return soup


def headings(body: "BeautifulSoup") -> list[tuple[str, str]]:
    """Return the H2 headings of a body as (id, text)."""
    found = []
    for heading in body.find_all("h2"):
        if heading.get("id"):
            found.append((str(heading["id"]), heading.get_text().rstrip("¶ ")))
    return found


def lift_picture(body: "BeautifulSoup") -> str:
    """Remove the first picture from ``body`` and return it; "" without one.

    A link to "#picture" takes its place. Changes ``body``.
    """
    found = body.find("img")
    if found is None:
        return ""
    link = body.new_tag("a", href="#picture")
    link.string = "picture: at the top of the page"
    found.replace_with(link)
    return str(found)


def _clean_picture(picture: Any) -> None:
    """Replace a picture that is not embedded by its text; without a text it gets that of its heading."""
    alt = str(picture.get("alt") or "")
    if not picture.has_attr("src"):
        picture.replace_with(f"({alt or 'picture'}: not embedded)")
    elif not alt or alt == _NO_ALT:
        heading = picture.find_previous(["h1", "h2", "h3"])
        title = heading.get_text().rstrip("¶ ") if heading else ""
        picture["alt"] = f"Figure: {title}" if title else "Figure"


def _clean_link(link: Any, pages: Collection[str]) -> None:
    """Point a link to the page of a notebook, keep it, or remove its address."""
    address = str(link["href"]).strip()
    found = _NOTEBOOK_LINK.match(address)
    if found and found[1] in pages:
        link["href"] = f"{found[1]}.html{found[2] or ''}"
    elif found or not _PAGE_LINK.match(address):
        del link["href"]


def _is_loading(tag: str, attribute: str, value: str) -> bool:
    """Answer whether an attribute fetches something or runs a script; a plain link does neither."""
    value = value.strip().lower()
    if attribute.startswith("on") or value.startswith("javascript:"):
        return True
    if attribute in _LOADING or (attribute == "href" and tag not in ("a", "area")):
        return not value.startswith(("data:", "#"))
    return False


# Read an executed notebook: its title, its summary, its verdicts and its post-mortem.

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


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
    """Return the verdicts in the outputs of an executed notebook, each name once."""
    verdicts = [Verdict.from_json(data) for data in _read_mime(notebook, VERDICT_MIME)]
    return list({verdict.name: verdict for verdict in verdicts}.values())


def read_post_mortem(notebook: Any) -> PostMortem | None:
    """Return the last post-mortem in the outputs of an executed notebook, or None."""
    found = _read_mime(notebook, POST_MORTEM_MIME)
    return PostMortem.from_json(found[-1]) if found else None


def read_error(notebook: Any) -> str:
    """Return the exception that ended the notebook as one line, or an empty string."""
    errors = [output for output in outputs(notebook) if output.output_type == "error"]
    return f"{errors[-1].ename}: {one_line(errors[-1].evalue)}" if errors else ""


def drop_widgets(notebook: Any) -> None:
    """Remove what needs a running kernel: the widgets' state, and views that have a static output too."""
    notebook.metadata.pop("widgets", None)
    for data in (output.data for output in outputs(notebook) if "data" in output):
        if "text/html" in data:
            data.pop(WIDGET_MIME, None)


def outputs(notebook: Any) -> list[Any]:
    """Return the outputs of all cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _read_mime(notebook: Any, mime: str) -> list[Any]:
    datas = (output.get("data", {}) for output in outputs(notebook))
    return [data[mime] for data in datas if mime in data]


# Render the cells of an executed notebook as HTML, without what a page shows elsewhere.

TEMPLATES = Path(__file__).parent / "templates"
# The page has these in its own places.
_ELSEWHERE = {PROVENANCE_MIME, POST_MORTEM_MIME, VERDICTS_MIME, STEP_MIME}
_EXPORTING = threading.Lock()  # an exporter keeps the folder of the notebook that it exports
# Richest first. Types that need JavaScript are missing, so a page leaves them out.
_SHOWN = [
    "text/html",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/markdown",
    "text/latex",
    "text/plain",
]


def render_body(notebook: Any, folder: Path, status: Status) -> str:
    """Return the cells as HTML; pictures that markdown names are looked up in ``folder``."""
    with _EXPORTING:
        body, _ = _exporter().from_notebook_node(
            _prepared(notebook, status), {"metadata": {"path": str(folder)}}
        )
    return str(body)


@cache
def _exporter() -> Any:
    """Return nbconvert's exporter with this package's template; it compiles its templates once."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    return HTMLExporter(
        template_name="classic",
        template_file="notebook.html.j2",
        extra_template_paths=[str(TEMPLATES)],
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"hint": _hint},
        config=Config({"NbConvertBase": {"display_data_priority": _SHOWN}}),
        log=logging.Logger("nbconvert", logging.CRITICAL),
    )


def _prepared(notebook: Any, status: Status) -> Any:
    """Return a copy of the notebook with what its page shows.

    Removed are papermill's error markers, the first H1 (the page has its own) and the outputs that the
    page shows in its header or footer. A widget is replaced by the static part of its output. If the
    notebook did not run to its end, each code cell is marked with how far it got.
    """
    marker = "papermill-error-cell-tag"
    shown = deepcopy(notebook)
    shown.metadata.pop("widgets", None)
    shown.cells = [cell for cell in shown.cells if marker not in cell.metadata.get("tags", [])]
    _drop_title(shown.cells)
    for cell in shown.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if _is_shown(output)]
    for data in (output.data for output in outputs(shown) if "data" in output):
        if data.pop(WIDGET_MIME, None) and not set(data) & set(_SHOWN) - {"text/plain"}:
            data["text/html"] = '<p class="note">(interactive in JupyterLab)</p>'
    if status != "passed":
        _mark_progress(shown.cells, status)
    return shown


def _drop_title(cells: Sequence[Any]) -> None:
    for cell in cells:
        if cell.cell_type == "markdown" and re.search(r"(?m)^# +.+$", cell.source):
            cell.source = re.sub(r"(?m)^# +.+\n?", "", cell.source, count=1)
            return


def _mark_progress(cells: Sequence[Any], status: Status) -> None:
    """Mark each code cell as "stopped here" or "not run" in its metadata.

    papermill records a start time for each cell that it reaches, and for no other.
    """
    recorded = [cell for cell in cells if cell.cell_type == "code" and "papermill" in cell.metadata]
    begun = [cell for cell in recorded if cell.metadata.papermill.get("start_time")]
    for cell in recorded:
        if cell not in begun:
            cell.metadata["attnlab"] = "not run"
    raised = [cell for cell in begun if cell.metadata.papermill.get("exception")]
    for cell in begun[-1:] if status in ("died", "timeout", "interrupted") else raised:
        cell.metadata["attnlab"] = "stopped here"


def _is_shown(output: Any) -> bool:
    """Answer whether the body shows an output."""
    if "data" not in output:
        return True
    return not _ELSEWHERE & set(output.data) and bool({*_SHOWN, WIDGET_MIME} & set(output.data))


def _hint(source: str) -> str:
    """Return the first non-empty line of a cell: the summary of the folded cell."""
    return next((line for line in source.splitlines() if line.strip()), "")


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
    provenance = _read_mime(notebook, PROVENANCE_MIME)[-1:]
    body = self_contained(render_body(notebook, folder, status), pages)
    report = read_post_mortem(notebook)
    picture = lift_picture(body) if report else ""
    previous, following = _neighbours(html.stem, pages)
    page = render_page(
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


def png_of(figure: "Figure", dpi: int, *, is_transparent: bool = False) -> bytes:
    """Return a figure as a PNG."""
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=dpi, transparent=is_transparent)
    return room.getvalue()


def write_index(results: Results, path: Path) -> None:
    """Write the page that links to all others, titled by the incident of the first post-mortem."""
    reports = [one.report for one in results.outcomes if one.report and one.report.incident]
    incident = reports[0] if reports else None
    page = render_page(
        "overview.html.j2",
        title=f"{incident.incident}: post-mortem" if incident else "attnlab: verdicts",
        incident=incident,
        results=results,
        outcomes=results.outcomes,
        total=results.total,
        folder=path.parent,
    )
    write_text(path, page)


def write_findings(path: Path, report: Any, pictures: Sequence[Any], command: str) -> None:
    """Write the findings of ``attnlab check`` as one page, with a picture for each finding."""
    title = f"attnlab check: {report.version}"
    facts = {"title": title, "report": report, "pictures": pictures, "command": command}
    write_text(path, render_page("findings.html.j2", **facts))


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


def render_page(template: str, **facts: Any) -> str:
    """Fill a page template; everything that is not marked as HTML is escaped.

    The versions and the date are those of now, unless ``facts`` have others.
    """
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8") + _code_colours()
    facts = {"versions": versions(), "date": _date(None), **facts}
    return str(templates().get_template(template).render(css=css, **facts))


@cache
def templates() -> Any:
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
