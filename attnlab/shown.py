"""Shown: what lets a noun show itself, in a notebook and in a terminal.

How each noun looks is written in :mod:`attnlab.display`, above all of them; it is imported when one is
looked at, and not before.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

SHEETS: dict[str, str] = {  # the function in attnlab.display that makes each noun's sheet
    "attnlab.case.Case": "inputs.case",
    "attnlab.batch.Batch": "inputs.batch",
    "attnlab.cache.Provenance": "inputs.provenance",
    "attnlab.cache.PagedCache": "inputs.cache",
    "attnlab.call.KernelCall": "inputs.call",
    "attnlab.dispatch.Decision": "inputs.decision",
    "attnlab.contracts.Contract": "inputs.contract",
    "attnlab.breaches.Breaches": "results.breaches",
    "attnlab.compare.ErrorMap": "results.errors",
    "attnlab.result.Result": "results.result",
    "attnlab.stage_table.StageTable": "results.stages",
    "attnlab.diagnosis.Diagnosis": "conclusions.diagnosis",
    "attnlab.power.Power": "conclusions.power",
    "attnlab.claims.ledger.Finding": "conclusions.claim",
    "attnlab.claims.ledger.Findings": "conclusions.claims",
    "attnlab.chapters.Chapters": "conclusions.chapters",
    "attnlab.sanitize.finding.Finding": "conclusions.finding",
    "attnlab.sanitize.library.Report": "conclusions.report",
}


class Shown:
    """Show a noun: a table in a notebook, the same as text in a terminal, one line as its repr.

    IPython asks for ``_repr_html_`` and ``_repr_pretty_``, rich for ``__rich__``. A dataclass leaves
    ``__repr__`` to this with ``repr=False``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(_display().line(self))

    def __rich__(self) -> "RenderableType":
        shown: RenderableType = _display().text(self)
        return shown

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Give IPython the text, and the one line where the noun is part of something else."""
        alone = type(printer).__module__.startswith("IPython.") and len(printer.stack) == 1
        printer.text(_display().plain(self) if alone else repr(self))

    def _repr_html_(self) -> str:
        return str(_display().html(self))


def _display() -> Any:
    return importlib.import_module("attnlab.display")
