"""Panels for JupyterLab: toggles for the knobs of a Case, and what comes of it, side by side.

A panel asks a Lab, in the background, for the Case that its controls say, and shows the answer. All that
it shows is a function's result that a notebook could call itself; nothing is computed here.
"""

from collections.abc import Sequence

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.lab.lab import Lab
from attnlab.show.panels.case_panel import FACTS, Panel
from attnlab.show.panels.views import VIEWS

__all__ = ["Panel", "explorer", "panel"]


def panel(
    case: Case,
    *,
    knobs: Sequence[str],
    views: Sequence[str] = ("error",),
    lab: Lab | None = None,
) -> Panel:
    """Return a small panel of a Case: toggles for ``knobs``, the verdict and the ``views``.

    Views are the texts "dispatch" and "violations" and the pictures "error", "slots" and "seqs". With
    ``lab``, what the notebook ran already is shared.
    """
    return Panel(case, knobs=knobs, views=views, lab=lab)


def explorer(case: Case | None = None, *, lab: Lab | None = None) -> Panel:
    """Return the panel with every knob and every view."""
    case = case if case is not None else Case()
    return Panel(case, knobs=list(FIELDS), views=[*FACTS, *VIEWS], lab=lab, is_explorer=True)
