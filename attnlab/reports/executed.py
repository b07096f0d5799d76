"""Read an executed notebook: its title, its summary, its verdicts and its post-mortem."""

import re
from typing import Any

from attnlab.reports.notebook_result import one_line
from attnlab.reports.post_mortem import POST_MORTEM_MIME, PostMortem
from attnlab.show.notebook import PROVENANCE_MIME, VERDICT_MIME, Verdict

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
    """Return the last post-mortem in the outputs of an executed notebook, or None.

    Raises AttnLabError if its data has another form.
    """
    found = _read_mime(notebook, POST_MORTEM_MIME)
    return PostMortem.from_json(found[-1]) if found else None


def read_provenance(notebook: Any) -> list[Any]:
    """Return the last provenance record as a list of one, or an empty list."""
    return _read_mime(notebook, PROVENANCE_MIME)[-1:]


def read_error(notebook: Any) -> str:
    """Return the exception that ended the notebook as one line, or an empty string."""
    errors = [output for output in outputs(notebook) if output.output_type == "error"]
    return f"{errors[-1].ename}: {one_line(errors[-1].evalue)}" if errors else ""


def drop_widgets(notebook: Any) -> None:
    """Remove what needs a running kernel: the widgets' state, and views that have a static output too.

    Changes ``notebook``.
    """
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
