"""The page of the faults of many releases."""

from pathlib import Path

import pytest
from helpers.browser import WIDTHS, layout_problems, offline_page
from helpers.release_table import RELEASES, TABLE, fault

from attnlab.checker.releases import ranges
from attnlab.reports.check_pages import write_releases


def test_spans_have_no_gap() -> None:
    """Ranges of consecutive releases, in order."""
    one = fault(0)
    text = ranges(RELEASES, one.releases)
    assert text.startswith("0.9.0 to 0.9.1, 0.13.0 to 0.13.1, ")
    ends = [end for part in text.split(", ") for end in part.split(" to ")]
    assert set(ends) <= set(one.releases)
    assert (ends[0], ends[-1]) == (one.releases[0], one.releases[-1])


def test_text_from_kernels_is_escaped(tmp_path: Path) -> None:
    """Evidence is text, not HTML."""
    write_releases(tmp_path / "page.html", TABLE)
    page = (tmp_path / "page.html").read_text()
    assert "<wrong>" not in page
    assert "&lt;wrong&gt;" in page


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_matrix_is_readable_at_every_width(tmp_path: Path, width: int, scheme: str) -> None:
    """The page does not scroll sideways; the matrix may. No text is cut, no cell is on another's text."""
    write_releases(tmp_path / "page.html", TABLE)
    with offline_page(viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        page.goto((tmp_path / "page.html").as_uri())
        assert layout_problems(page) == []
        assert page.locator(".matrix tbody td").count() == len(RELEASES) * len(TABLE.faults)
        states = page.locator(".matrix tbody td span").evaluate_all(
            "spans => spans.map(span => span.ariaLabel)"
        )
        assert states == [state for one in TABLE.faults for state in one.cells.values()]
        cut = page.evaluate(
            "[...document.querySelectorAll('.matrix :is(th, td, div), li, p, pre, h3')]"
            ".filter(e => e.scrollWidth > e.clientWidth + 1 && !e.matches('.matrix')).length"
        )
        assert cut == 0
        fits = page.evaluate(
            "(m => m.scrollWidth <= m.clientWidth)(document.querySelector('.matrix'))"
        )
        assert fits == (width >= 1280)
        page.evaluate("document.querySelector('.matrix').scrollLeft = 10000")
        moved = page.evaluate(
            "(x => x('.matrix tbody th.name') - x('.matrix'))"
            "(s => document.querySelector(s).getBoundingClientRect().left)"
        )
        assert 0 <= moved < 5  # the name of the fault stays visible
        assert page.complaints == []
