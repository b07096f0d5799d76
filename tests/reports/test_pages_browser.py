"""The pages in a browser without a network, opened from disk."""

from pathlib import Path

import pytest
from helpers.browser import WIDTHS, layout_problems, offline_page

pytestmark = pytest.mark.browser
# A picture that did not load has no size.
BROKEN = "() => [...document.images].filter(one => !one.complete || !one.naturalWidth).length"


def pages_of(small_run: Path) -> list[Path]:
    """Return the index and the report of each notebook."""
    pages = sorted(small_run.glob("*.html"))
    assert [page.name for page in pages if page.stem[:1].isdigit()], "no report was written"
    return pages


def test_the_watch_sees_what_a_page_asks_for(tmp_path: Path) -> None:
    """A page that loads, calls and complains is noted for each: so that an empty list means something."""
    bad = '<img src="http://127.0.0.1:9/a.png"><script>fetch("https://example.org/x"); missing()</script>'
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><body>{bad}<img src=none.png></body>")
    with offline_page() as page:
        page.goto((tmp_path / "bad.html").as_uri())
        page.wait_for_load_state("load")
        assert {url.split("/")[2] for url in page.asked} == {"127.0.0.1:9", "example.org"}
        assert any("missing is not defined" in one for one in page.complaints)
        assert any("none.png" in one for one in page.complaints)
        assert page.evaluate(BROKEN) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_each_page_opens_without_a_network(small_run: Path, width: int, scheme: str) -> None:
    """No request, no complaint, no broken picture, nothing wrong with the layout."""
    with offline_page(viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        for path in pages_of(small_run):
            page.goto(path.as_uri())
            page.wait_for_load_state("load")
            page.evaluate(
                "() => document.querySelectorAll('details').forEach(one => one.open = true)"
            )
            found = (path.name, page.asked, page.complaints, page.evaluate(BROKEN))
            assert found == (path.name, [], [], 0)
            assert layout_problems(page) == [], path.name


def test_the_index_leads_to_each_page_and_back(small_run: Path) -> None:
    """Every link that stays on disk opens, from the index and from each page; others are the web's."""
    with offline_page() as page:
        for path in pages_of(small_run):
            page.goto(path.as_uri())
            links = page.eval_on_selector_all("a[href]", "all => all.map(one => one.href)")
            files = {link.split("#")[0] for link in links if link.startswith("file:")}
            missing = [link for link in files if not Path(link.removeprefix("file://")).exists()]
            assert missing == [], path.name
            assert all(link.startswith(("file:", "https://")) for link in links), path.name
            anchors = {link.split("#")[1] for link in links if link.startswith(f"{path.as_uri()}#")}
            for anchor in anchors:
                assert page.evaluate("id => !!document.getElementById(id)", anchor), (path, anchor)
        page.goto((small_run / "index.html").as_uri())
        page.click(".overview a >> nth=0")
        page.click("footer a[href='index.html']")
        assert page.url.endswith("/index.html")


# What is cut on paper, where nothing can be scrolled: text and pictures to the right of the sheet.
CUT = """() => [...document.querySelectorAll("pre, table, img, svg")]
  .filter(one => one.scrollWidth > one.clientWidth + 1
    || one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(one => one.outerHTML.slice(0, 120))"""
HIDDEN = """() => [...document.querySelectorAll("details.code pre")]
  .filter(one => !one.checkVisibility()).length"""


def test_on_paper_the_code_is_there_and_nothing_is_cut(small_run: Path) -> None:
    """In print the folded code is shown, the page is white, and nothing is wider than A4 less its margins."""
    with offline_page(color_scheme="dark", viewport={"width": 680, "height": 1000}) as page:
        for path in pages_of(small_run):
            page.goto(path.as_uri())
            page.emulate_media(media="print", color_scheme="dark")
            background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            assert background == "rgb(255, 255, 255)", path.name
            assert page.evaluate(CUT) == [], path.name
            assert page.evaluate(HIDDEN) == 0, path.name
            assert page.pdf(format="A4").startswith(b"%PDF-")


def test_what_is_cut_on_paper_is_seen(tmp_path: Path) -> None:
    """A line that does not wrap, a picture that is too wide and code that stays folded are each found."""
    code = "<details class='code'><summary>code</summary><pre>x</pre></details>"
    wide = f"<pre>{'x' * 300}</pre><svg width=2000 height=9></svg>"
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><body>{code}{wide}</body>")
    with offline_page(viewport={"width": 680, "height": 1000}) as page:
        page.goto((tmp_path / "bad.html").as_uri())
        page.emulate_media(media="print")
        assert [one[:4] for one in page.evaluate(CUT)] == ["<pre", "<svg"]
        assert page.evaluate(HIDDEN) == 1


def test_what_is_wrong_with_a_layout_is_seen(tmp_path: Path) -> None:
    """Grey on grey, also by opacity and in a drawing, small text, text over text, a page that scrolls."""
    bad = """<p style='color:#777;background:#ccc'>grey</p>
      <p style='background:#0008;color:#555'>through</p><p style='font-size:11px'>small</p>
      <p style='position:absolute;top:300px'>below</p><p style='position:absolute;top:304px'>above</p>
      <p style='position:absolute;top:400px'>hidden</p>
      <p style='position:absolute;top:400px;background:#fff'>opaque</p>
      <p style='opacity:.4'>faint</p><p style='opacity:.9'><span style='opacity:.9'>legible</span></p>
      <svg height=60><rect width=300 height=60 fill='#777'></rect><text x=9 y=20 fill='#ddd'>drawn</text>
      <text x=9 y=50 fill='#000'>black</text></svg>
      <button disabled style='color:#999'>disabled</button>
      <p style='width:2000px'>wide</p><p>good</p>"""
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><body>{bad}</body>")
    with offline_page() as page:
        page.goto((tmp_path / "bad.html").as_uri())
        found = layout_problems(page)
    words = (
        *("to the side", ": grey", ": through", ": faint", ": drawn"),
        *("11.0 pixels: small", "below over above"),
    )
    assert [word for word in words if not any(word in one for one in found)] == []
    assert len(found) == len(words), found
