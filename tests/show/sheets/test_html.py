"""Rendering a sheet: HTML that is well formed and escaped, text without markup."""

from io import StringIO

import pytest
from helpers.html import Page
from rich.console import Console

from attnlab.show.sheets import render
from attnlab.show.sheets.sheet import Bar, Facts, Folded, Grid, Lines, Sheet, Words

SHEET = Sheet(
    kind="<K>",
    line="<K: a<b>",
    head=Words("a<b", "bad"),
    parts=[
        Facts([("n<", ["1", Words("2>", "quiet")])]),
        Grid(["i", "bar"], [[i, Bar(i, 1, 9, f"{i}<")] for i in range(9)], "t<", most=3),
        Lines([Words("[b]x<y", code=True)]),
        Folded("more<", [Lines(["inside"])]),
    ],
)


def printed(complete: bool) -> str:
    """Return the sheet as a terminal shows it."""
    out = StringIO()
    Console(file=out, width=80, color_system=None).print(
        render.render_text(SHEET, complete=complete)
    )
    return out.getvalue()


@pytest.mark.parametrize("bad", ["<b>x", "<table><tr></table>", "x</div>", "<script></script>"])
def test_the_check_of_html_finds_planted_faults(bad):
    with pytest.raises((AssertionError, IndexError)):
        Page(f"<div>{bad}</div>" if bad[0] == "<" else bad)


def test_html_has_everything_escaped():
    html = render.render_html(SHEET)
    page = Page(html)
    for text in ("<K>", "a<b", "n<", "2>", "t<", "[b]x<y", "more<", "inside", "6 more rows", "8<"):
        assert text in page.texts
    assert "<K>" not in html


def test_html_aligns_numbers_and_draws_bars():
    html = render.render_html(SHEET)
    assert html.count('<td class="n">') == 9
    assert html.count("<rect") == 8 + 9  # a bar with context 0 has one part


def test_the_class_names_the_kind():
    assert 'class="attnlab-sheet attnlab-k"' in render.render_html(SHEET)


def test_text_omits_folded_parts_and_rows():
    text = printed(complete=False)
    assert all(part in text for part in ("a<b", "[b]x<y", "… and 6 more rows", "█"))
    assert "inside" not in text


def test_complete_text_has_every_row():
    assert printed(complete=True).count("█") == 3 * 9
    assert printed(complete=False).count("█") == 3 * 3
    assert "more rows" not in printed(complete=True)


def test_a_sheet_displays_itself():
    assert repr(SHEET) == SHEET.line
    assert SHEET._repr_html_() == render.render_html(SHEET)
