"""The page of an X-ray: one self-contained HTML file with its pictures, for light and dark screens."""

import base64
import io
from pathlib import Path

from attnlab.case.errors import Unavailable
from attnlab.case.output_file import write_text
from attnlab.diagnosis.kernel_location import KernelLocation
from attnlab.reports.pages import render_page
from attnlab.show.sheets import html
from attnlab.weights.columns import key_columns, law_points
from attnlab.weights.xray import XRay


def check_drawable() -> None:
    """Raise Unavailable if a package of the page is missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import pygments  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"html needs the lab extra: pip install 'attnlab[lab]' ({error})"
        ) from error


def write_xray(path: Path, one: XRay, command: str, location: KernelLocation | None = None) -> None:
    """Write the page; ``command`` is the command line that writes it again. ``location``: lines of the source
    that may hold the fault.

    Raises Unavailable if a package of the page is missing, InvalidCase if the file cannot be written.
    """
    check_drawable()
    page = render_page(
        "xray.html.j2",
        title="X-ray of attention weights",
        status=one.status,
        location=location,
        sheet=html(one),
        light=xray_picture(one, is_dark=False),
        dark=xray_picture(one, is_dark=True),
        command=command,
    )
    write_text(path, page)


def xray_picture(one: XRay, *, is_dark: bool, dpi: int = 90) -> str:
    """Return a PNG in base64: measured weights, expected weights, their difference, and the law."""
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    from attnlab.show.plots.weights import plot_xray

    with plt.style.context("dark_background" if is_dark else "default"):
        figure = Figure(figsize=(13.5, 7.6), layout="constrained")
        plot_xray(key_columns(one), law_points(one), figure=figure)
        room = io.BytesIO()
        figure.savefig(room, format="png", dpi=dpi, transparent=True)
    return base64.b64encode(room.getvalue()).decode()
