"""Pictures of the findings of a check: an error map and an X-ray for each, and one page with all of them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, Unavailable
from attnlab.case.lengths import Lengths
from attnlab.case.ops import OPS
from attnlab.case.output_file import make_output_folder, write_bytes
from attnlab.checker.case_run import run_case
from attnlab.checker.finding import KINDS, Finding
from attnlab.checker.report import Report
from attnlab.kernels.backend import Backend
from attnlab.lab.cache_write import owners_of
from attnlab.lab.error_map import ErrorMap, compare
from attnlab.lab.lab import Lab
from attnlab.reports.xray_page import xray_picture
from attnlab.weights.public import xray
from attnlab.weights.xray import XRay

_XRAY_S = 6.0  # time for the search for a description
_NO_WEIGHTS = ("wrong_lse",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A finding and the file of its picture.

    ``data`` is the file in base64, ``kind`` the kind of finding as text. Without a picture ``path`` is
    None and ``why`` states the reason. ``xray``: the X-ray of the smallest Case, with its pictures for light
    and dark screens in base64, or None; ``no_xray`` then states the reason.
    """

    finding: Finding
    kind: str
    path: Path | None = None
    data: str = ""
    why: str = ""
    xray: XRay | None = None
    light: str = ""
    dark: str = ""
    no_xray: str = ""


def check_drawable(folder: Path) -> None:
    """Create the folder.

    Raises Unavailable if matplotlib or a package of the reports is missing, and InvalidCase if the folder
    cannot be created.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import pygments  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"pictures need the lab extra: pip install 'attnlab[lab]' ({error})"
        ) from error
    make_output_folder(folder, "pictures")


def write_pictures(report: Report, backend: Backend, folder: Path, command: str) -> Path:
    """Write a PNG of each finding, and a page with all of them, to ``folder``; return the page.

    The page has an X-ray of each finding. The Cases run again. Raises the errors of :func:`check_drawable`.
    """
    check_drawable(folder)
    from attnlab.reports.pages import write_findings

    lab = Lab(source=backend.path, device="cpu")
    pictures = [
        _picture(lab, backend, finding, folder / f"{i:02d}-{finding.op}-{finding.kind}.png")
        for i, finding in enumerate(report.findings, 1)
    ]
    page = folder / "index.html"
    write_findings(page, report, pictures, command)
    return page


def _picture(lab: Lab, backend: Backend, finding: Finding, path: Path) -> Picture:
    """Draw a finding at the Case where it was first found and at its smallest Case, and write ``path``."""
    kind = KINDS[finding.kind]
    if finding.kind == "fails":
        return Picture(
            finding=finding, kind=kind, why="the call raised an error, so there is no output"
        )
    cases = {"first found": finding.first, "the smallest case": finding.case}
    try:
        maps = {
            words: errors_of(lab, backend, case, finding)
            for words, case in cases.items()
            if case is not None
        }
    except AttnLabError as error:
        return Picture(finding=finding, kind=kind, why=f"the second run raised an error: {error}")
    owners = [owners_of(case) for case in cases.values() if case is not None]
    data = _drawn(maps, owners, f"{finding.op}: {finding.diagnosis}")
    write_bytes(path, data)
    return Picture(
        finding=finding,
        kind=kind,
        path=path,
        data=base64.b64encode(data).decode(),
        **_xray(lab, backend, finding),
    )


def _xray(lab: Lab, backend: Backend, finding: Finding) -> dict[str, Any]:
    """Return the X-ray of a finding's smallest Case and its pictures, or why there is none."""
    if OPS[finding.op].writes_cache:
        return {"no_xray": "the op weighs no values"}
    if finding.kind in _NO_WEIGHTS:
        return {"no_xray": "the finding does not concern the weighted sum"}
    try:
        found = xray(finding.case, backend=backend, lab=lab, confirm=False, limit_s=_XRAY_S)
    except AttnLabError as error:
        return {"no_xray": str(error)}
    pictures = {
        name: xray_picture(found, is_dark=name == "dark", dpi=70) for name in ("light", "dark")
    }
    return {"xray": found, **pictures}


def _drawn(maps: dict[str, ErrorMap], owners: Sequence[int | None], title: str) -> bytes:
    """Return a PNG with the error maps side by side; ``owners`` as from ``owners_of``, for each map."""
    from matplotlib.figure import Figure

    from attnlab.show.plots.errors import plot_error

    figure = Figure(figsize=(7.5 * len(maps), 5.2), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for panel, (words, errors), cache_of in zip(panels, maps.items(), owners, strict=True):
        plot_error(errors, cache_of=cache_of, title=f"{words}: {_place(errors)}", ax=panel)
    figure.suptitle(title, fontweight="bold")
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=110)
    return room.getvalue()


def _place(errors: ErrorMap) -> str:
    """Return where the error is, as text."""
    places = errors.places()
    if not places:
        return "nothing beyond rounding"
    worst = max(
        places, key=lambda place: float(errors.error[place.row].nan_to_num(torch.inf).max())
    )
    head = int(errors.error[worst.row].nan_to_num(torch.inf).argmax())
    return (
        f"{len(places)} of {len(errors.error)} rows,\nthe worst sequence {worst.seq}, "
        f"token {worst.token}, head {head}"
    )


def errors_of(lab: Lab, backend: Backend, case: Case, finding: Finding) -> ErrorMap:
    """Run a Case and return the errors of its finding, with the rounding bound as tolerance."""
    ran = run_case(lab, backend, case)
    if finding.kind == "wrong_lse" and ran.lse is not None:
        expected, bound = lab.expected_lse(case)
        given = ran.lse[: len(expected), :, None]
        return compare(given, expected[..., None], case.lengths, float(bound.max()), 0.0)
    if finding.diagnosis == "both parts empty" and ran.padded is not None:
        rows = Lengths(query_lens=(len(ran.padded),), ctx_lens=(0,))
        return compare(ran.padded, torch.zeros_like(ran.padded), rows, 0.0, 0.0)
    call = lab.call(case)
    call.buffer.copy_(ran.output)
    case = case.replace(atol=None, rtol=0.0)
    return lab.errors(case, call, lab.reference(case))
