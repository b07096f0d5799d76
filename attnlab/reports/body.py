"""Render the cells of an executed notebook as HTML, without what a page shows elsewhere."""

import logging
import re
import threading
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.reports.executed import WIDGET_MIME, outputs
from attnlab.reports.notebook_result import Status
from attnlab.reports.post_mortem import POST_MORTEM_MIME
from attnlab.show.notebook import PROVENANCE_MIME, VERDICTS_MIME

TEMPLATES = Path(__file__).parent / "templates"
_ELSEWHERE = {
    PROVENANCE_MIME,
    POST_MORTEM_MIME,
    VERDICTS_MIME,
}  # the page has these in its own places
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
