"""Interactive panels for JupyterLab: controls for the fields of a Case, with the results next to them.

A panel runs its Case in the background and shows the Result. It computes nothing that a notebook cannot
compute with one call.
"""

from collections.abc import Sequence

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.lab.lab import Lab
from attnlab.show.panels.case_panel import Panel
from attnlab.show.panels.texts import FACTS
from attnlab.show.panels.views import VIEWS, XRAY

__all__ = ["Panel", "explorer", "panel"]


def panel(
    case: Case,
    *,
    knobs: Sequence[str],
    views: Sequence[str] = ("error",),
    lab: Lab | None = None,
) -> Panel:
    """Return a small panel of a Case: controls for the fields ``knobs``, the verdict and the ``views``.

    Views are the texts "dispatch" and "violations", the pictures "error", "slots", "seqs" and "mask", and
    "xray", the attention weights, which are measured on demand. With ``lab`` the panel shares the results
    that the notebook has already computed.
    """
    return Panel(case, knobs=knobs, views=views, lab=lab)


def explorer(case: Case | None = None, *, lab: Lab | None = None) -> Panel:
    """Return the panel with every field and every view."""
    case = case if case is not None else Case()
    return Panel(case, knobs=list(FIELDS), views=[*FACTS, *VIEWS, XRAY], lab=lab, is_explorer=True)
