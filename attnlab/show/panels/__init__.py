"""Interactive panels for JupyterLab: controls for the fields of a Case, with the results next to them.

A panel runs its Case in the background and shows the Result. It computes nothing that a notebook cannot
compute with one call.
"""

from collections.abc import Sequence
from pathlib import Path

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.lab.lab import Lab
from attnlab.show.panels.case_panel import Kernel, NotebookKernels, Panel, subject
from attnlab.show.panels.views import FACTS, VIEWS, XRAY
from attnlab.tensors.call import KernelCall

__all__ = ["Panel", "explorer", "panel"]


def panel(
    case: Case, *, knobs: Sequence[str], views: Sequence[str] = ("error",), lab: Lab | None = None
) -> Panel:
    """Return a small panel of a Case: controls for the fields ``knobs``, the verdict and the ``views``.

    Views are the texts "dispatch" and "violations", the pictures "error", "slots", "seqs" and "mask", and
    "xray", the attention weights, which are measured on demand. With ``lab`` the panel shares the results
    that the notebook has already computed.
    """
    return Panel(case, knobs=knobs, views=views, lab=lab)


def explorer(
    what: Case | KernelCall | Path | str | None = None,
    *,
    kernel: Kernel | str | None = None,
    source: Path | str | None = None,
    against: Kernel | str | None = None,
    lab: Lab | None = None,
) -> Panel:
    """Return the panel with every field and every view.

    - ``what``: a Case, a saved call, or its file. Default: the Case of the test, or a small one for a kernel.
    - ``kernel``: what runs it: a function of the notebook, as ``attnlab check`` takes it in a file, or a name
      as in ``Case.backend``. When a cell defines the function anew, or a kernel that it calls, it runs again.
    - ``source``: the vLLM whose kernels run. ``against``: a second runner, as ``kernel``; the panel has its
      errors, too, and how far the two outputs are apart.
    - ``lab``: shares the results that the notebook has already computed.

    Raises InvalidCall or InvalidCase for a call that no Case can have.
    """
    kernels = NotebookKernels()
    case, lab = subject(what, kernel, source, lab, kernels)
    views = [*FACTS, *VIEWS, XRAY]
    other = "" if against is None else kernels.add(against)
    call = repr(str(what)) if isinstance(what, Path | str) else ""
    return Panel(
        case,
        knobs=list(FIELDS),
        views=views,
        lab=lab,
        kernels=kernels,
        against=other,
        call="call" if isinstance(what, KernelCall) else call,
        is_explorer=True,
    )
