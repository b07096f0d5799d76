"""Sheets: how nouns are displayed, as HTML in a notebook, as text in a terminal, as one line.

Each noun becomes one :class:`~attnlab.show.sheets.sheet.Sheet`. Both renderers take the same sheet, so
that a terminal and a notebook show the same facts.
"""

from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING

from attnlab.case.shown import Shown
from attnlab.show.sheets.sheet import Sheet

if TYPE_CHECKING:
    from rich.console import RenderableType

# The function that makes the sheet of each noun without a method ``sheet``; it is imported when such a noun
# is displayed first. Nouns of later folders have that method.
SHEETS: dict[str, str] = {
    "attnlab.case.case.Case": "attnlab.show.sheets.results.case",
    "attnlab.tensors.cache.Batch": "attnlab.show.sheets.results.batch",
    "attnlab.tensors.cache.Provenance": "attnlab.show.sheets.results.provenance",
    "attnlab.tensors.cache.PagedCache": "attnlab.show.sheets.results.cache",
    "attnlab.tensors.call.KernelCall": "attnlab.show.sheets.results.call",
    "attnlab.contracts.dispatch.Decision": "attnlab.show.sheets.results.decision",
    "attnlab.contracts.contract.Contract": "attnlab.show.sheets.results.contract",
    "attnlab.contracts.violations.Violations": "attnlab.show.sheets.results.violations",
    "attnlab.lab.result.ErrorMap": "attnlab.show.sheets.results.errors",
    "attnlab.lab.result.Result": "attnlab.show.sheets.results.result",
    "attnlab.lab.lab.StageTable": "attnlab.show.sheets.results.stages",
    "attnlab.checker.matrix.MatrixTable": "attnlab.show.sheets.results.matrix",
    "attnlab.lab.decode_error.DecodedError": "attnlab.show.sheets.results.decoded_error",
    "attnlab.diagnosis.diagnosis.OtherRun": "attnlab.show.sheets.results.other_run",
    "attnlab.lab.decode_error.ErrorAnswer": "attnlab.show.sheets.results.error_answer",
    "attnlab.diagnosis.diagnosis.Diagnosis": "attnlab.show.sheets.conclusions.diagnosis",
    "attnlab.weights.xray.XRay": "attnlab.show.sheets.conclusions.xray",
    "attnlab.lab.writes.WriteReport": "attnlab.show.sheets.conclusions.write_report",
    "attnlab.mla.run.MlaResult": "attnlab.show.sheets.conclusions.mla_result",
    "attnlab.mla.run.MlaReport": "attnlab.show.sheets.conclusions.mla_report",
    "attnlab.linear.state_check.StateReport": "attnlab.show.sheets.conclusions.state_report",
    "attnlab.linear.state_check.StateFinding": "attnlab.show.sheets.conclusions.state_finding",
    "attnlab.linear.state_check.StateXRay": "attnlab.show.sheets.conclusions.state_xray",
    "attnlab.mutation.power.MutationReport": "attnlab.show.sheets.conclusions.power",
    "attnlab.checker.finding.Finding": "attnlab.show.sheets.conclusions.finding",
    "attnlab.checker.report.Report": "attnlab.show.sheets.conclusions.report",
    "attnlab.horizon.survey.Survey": "attnlab.show.sheets.conclusions.survey",
    "attnlab.checker.releases.ReleaseTable": "attnlab.show.sheets.conclusions.release_table",
    "attnlab.replay.replay_call.Replays": "attnlab.replay.replay_call.replays",
    "attnlab.replay.probe.Probe": "attnlab.replay.probe.probe_sheet",
    "attnlab.replay.shrinking.Shrunk": "attnlab.replay.shrinking.shrunk",
    "attnlab.serving.report.CaptureReport": "attnlab.serving.report.capture_report",
}
WIDTH = 110  # columns of text if no terminal reports its width


def sheet_of(noun: Shown) -> Sheet:
    """Return a noun's sheet; a Sheet is its own. Raises TypeError for a noun without one."""
    if isinstance(noun, Sheet):
        return noun
    if make := getattr(noun, "sheet", None):
        own: Sheet = make()
        return own
    for kind in type(noun).__mro__:
        if place := SHEETS.get(f"{kind.__module__}.{kind.__qualname__}"):
            module, _, name = place.rpartition(".")
            sheet: Sheet = getattr(import_module(module), name)(noun)
            return sheet
    raise TypeError(f"attnlab.show.sheets.SHEETS must have an entry for {type(noun).__name__}")


def line(noun: Shown) -> str:
    """Return a noun in one line: its repr."""
    return sheet_of(noun).line


def text(noun: Shown, *, complete: bool = False) -> "RenderableType":
    """Return a noun as rich prints it; ``complete`` includes the rows that a notebook folds."""
    from attnlab.show.sheets.render import render_text as render

    return render(sheet_of(noun), complete=complete)


def plain(noun: Shown) -> str:
    """Return a noun as text without colours."""
    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_jupyter=False)
    console.print(text(noun), crop=False)
    return "\n".join(row.rstrip() for row in out.getvalue().rstrip().splitlines())


def html(noun: Shown) -> str:
    """Return a noun as HTML without scripts and external resources."""
    from attnlab.show.sheets.render import render_html as render

    return render(sheet_of(noun))
