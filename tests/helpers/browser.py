"""A headless Chromium for the tests, and a page without network access."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What sticks out of the page to the right: boxes wider than the window that no scroll bar of their own holds.
OVERHANG = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Text whose colour is too near to what lies under it, by WCAG's ratio for text.
FAINT = """() => {
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const under = node => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) layers.push(getComputedStyle(one).backgroundColor);
    return layers.reverse().reduce((below, text) => {
      const [r, g, b, a = 1] = channels(text);
      return below.map((v, i) => v * (1 - a) + [r, g, b][i] * a);
    }, [255, 255, 255]);
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({opacityProperty: true})) continue;
    if (node.closest("svg")) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(under(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 3) found.add(node.outerHTML.slice(0, 120));
  }
  return [...found];
}"""


def find_chromium() -> str:
    """Return $ATTNLAB_CHROMIUM or the first Chromium on the PATH; skip the test if there is none."""
    named = os.environ.get("ATTNLAB_CHROMIUM")
    found = [named] if named else [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no Chromium on the PATH ({', '.join(NAMES)}) and none in $ATTNLAB_CHROMIUM")
    return found[0]


@contextmanager
def offline_page(**options: Any) -> Iterator[Any]:
    """Yield a page of an offline browser that records network requests and errors.

    ``page.asked`` lists the requested URLs except files and data URLs; ``page.complaints`` lists console
    messages, script errors and failed requests. ``options`` go to Playwright's new_context.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        context = browser.new_context(offline=True, **options)
        page = context.new_page()
        page.asked, page.complaints = [], []
        context.route("http://**", lambda route: route.abort())
        context.route("https://**", lambda route: route.abort())
        page.on("request", lambda request: _record(page.asked, request.url))
        page.on(
            "requestfailed", lambda request: page.complaints.append(f"failed: {request.url[:200]}")
        )
        page.on("console", lambda text: page.complaints.append(f"{text.type}: {text.text}"))
        page.on("pageerror", lambda error: page.complaints.append(f"error: {error}"))
        try:
            yield page
        finally:
            browser.close()


def _record(asked: list[str], url: str) -> None:
    if not url.startswith(("file:", "data:")):
        asked.append(url)
