"""The page of a capture: one self-contained HTML file."""

from pathlib import Path

from attnlab.case.errors import Unavailable
from attnlab.case.output_file import write_text
from attnlab.serving.report import CaptureReport
from attnlab.show.sheets import html


def check_page() -> None:
    """Raise Unavailable if a package of the page is missing."""
    try:
        import jinja2  # noqa: F401
        import pygments  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"html needs the lab extra: pip install 'attnlab[lab]' ({error})"
        ) from error


def write_page(path: Path, one: CaptureReport, command: str) -> None:
    """Write the page of a report; ``command`` is the command line that was captured.

    Raises Unavailable if a package of the page is missing, InvalidCase if the file cannot be written.
    """
    check_page()
    from attnlab.reports.pages import render_page

    title = "Attention in a running vLLM"
    write_text(path, render_page("capture.html.j2", title=title, sheet=html(one), command=command))
