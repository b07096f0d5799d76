"""How the lab's nouns look: as HTML in a notebook, as text in a terminal, as one line.

Each noun becomes a :class:`~attnlab.show.sheets.sheet.Sheet`, and a sheet is written either way, so that both
hold the same facts.
"""

from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING

from attnlab.case.shown import Shown
from attnlab.show.sheets.sheet import Sheet

if TYPE_CHECKING:
    from rich.console import RenderableType

SHEETS: dict[str, str] = {  # the function in attnlab.show.sheets that makes each noun's sheet
    "attnlab.case.case.Case": "inputs.case",
    "attnlab.tensors.batch.Batch": "inputs.batch",
    "attnlab.tensors.cache.Provenance": "inputs.provenance",
    "attnlab.tensors.cache.PagedCache": "inputs.cache",
    "attnlab.tensors.call.KernelCall": "inputs.call",
    "attnlab.contracts.dispatch.Decision": "inputs.decision",
    "attnlab.contracts.contract.Contract": "inputs.contract",
    "attnlab.contracts.violation.Violations": "results.violations",
    "attnlab.lab.error_map.ErrorMap": "results.errors",
    "attnlab.lab.result.Result": "results.result",
    "attnlab.lab.stage_table.StageTable": "results.stages",
    "attnlab.diagnosis.diagnosis.Diagnosis": "conclusions.diagnosis",
    "attnlab.mutation.report.MutationReport": "conclusions.power",
    "attnlab.study.claims.ledger.Finding": "conclusions.claim",
    "attnlab.study.claims.ledger.Findings": "conclusions.claims",
    "attnlab.study.overview.Chapters": "conclusions.chapters",
    "attnlab.checker.finding.Finding": "conclusions.finding",
    "attnlab.checker.library.Report": "conclusions.report",
}
_WIDTH = 110  # of text where no terminal says how wide it is


def sheet_of(noun: Shown) -> Sheet:
    """Return a noun's sheet; raise TypeError for one that has none."""
    for kind in type(noun).__mro__:
        if place := SHEETS.get(f"{kind.__module__}.{kind.__qualname__}"):
            module, _, name = place.partition(".")
            sheet: Sheet = getattr(import_module(f"attnlab.show.sheets.{module}"), name)(noun)
            return sheet
    raise TypeError(f"{type(noun).__name__} must be named in attnlab.show.sheets.SHEETS")


def line(noun: Shown) -> str:
    """Return a noun in one line: its repr."""
    return sheet_of(noun).line


def text(noun: Shown) -> "RenderableType":
    """Return a noun as rich prints it."""
    from attnlab.show.sheets.as_text import render

    return render(sheet_of(noun))


def plain(noun: Shown) -> str:
    """Return a noun as text without colours."""
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, force_jupyter=False)
    console.print(text(noun))
    return "\n".join(row.rstrip() for row in out.getvalue().rstrip().splitlines())


def html(noun: Shown) -> str:
    """Return a noun as a piece of HTML that needs nothing from anywhere."""
    from attnlab.show.sheets.as_html import render

    return render(sheet_of(noun))
