"""A headless Chromium for the tests, and a page without network access."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What is wrong with the layout of a page, or of the part of it that a selector names: what scrolls to the
# side; a label of the part that is cut off; text below 12 pixels; text whose contrast with what lies under it
# is below 4.5 to 1, by WCAG, with opacity and in SVG, but of controls that are disabled; text over other text
# that nothing opaque covers.
PROBLEMS = """(within) => {
  const root = document.documentElement, found = new Set();
  const IDLE = ":disabled, [aria-disabled=true]";
  const top = within ? document.querySelector(within) : document.body;
  if (!top?.getClientRects().length) return [`${within || "the page"} is not shown`];
  const scrolled = within ? [...top.querySelectorAll("*")] : [];
  for (let one = within && top; one; one = one.parentElement) scrolled.push(one);
  const wide = one => one.scrollWidth - one.clientWidth;
  const scrolls = one => one === root || /auto|scroll/.test(getComputedStyle(one).overflowX);
  for (const one of [root, ...scrolled.filter(scrolls)])
    if (wide(one) > 0) found.add(`${one.className || "the page"} scrolls ${wide(one)} pixels to the side`);
  for (const one of within ? top.querySelectorAll("label") : [])
    if (one.offsetParent && wide(one) > 1) found.add(`cut off: ${one.textContent}`);
  const channels = text => {
    const numbers = (text.match(/[\\d.]+/g) || []).map(Number);
    return text.startsWith("color(srgb") ? numbers.map((v, i) => i < 3 ? v * 255 : v) : numbers;
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const mix = (below, [r, g, b, a = 1], part = 1) =>
    below.map((v, i) => v * (1 - a * part) + [r, g, b][i] * a * part);
  const shapes = "rect, path, circle, ellipse, polygon";
  const under = (node, x, y) => {  // the fill of the shape on which the text of an SVG is
    if (!node.closest("svg")) return [0, 0, 0, 0];
    const found = document.elementsFromPoint(x, y).find(one => one.matches(shapes));
    const style = found && getComputedStyle(found);
    if (!style || style.fill === "none") return [0, 0, 0, 0];
    const [r, g, b, a = 1] = channels(style.fill);
    return [r, g, b, a * parseFloat(style.fillOpacity)];
  };
  const painted = (node, x, y) => {  // the colours of a text and of what is under it, as a reader sees them
    const chain = [];
    for (let one = node; one; one = one.parentElement) chain.unshift(getComputedStyle(one));
    const last = chain.at(-1), ink = channels(node.closest("svg") ? last.fill : last.color);
    const paint = (i, below) => {
      const own = mix(below, channels(chain[i].backgroundColor));
      const bottom = mix(own, under(node, x, y));
      const all = i + 1 < chain.length ? paint(i + 1, own) : [mix(bottom, ink), bottom];
      return all.map(one => mix(below, one, parseFloat(chain[i].opacity)));
    };
    return paint(0, [255, 255, 255]);
  };
  const seen = (node, box) => {  // the part of a box that no scrolling parent cuts off
    let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
    for (let one = node; one && one !== document.body; one = one.parentElement) {
      if (getComputedStyle(one).overflow === "visible") continue;
      const own = one.getBoundingClientRect();
      [left, top] = [Math.max(left, own.left), Math.max(top, own.top)];
      [right, bottom] = [Math.min(right, own.right), Math.min(bottom, own.bottom)];
    }
    return {left, top, right, bottom};
  };
  const boxes = [], walker = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, node = text.parentElement, words = text.data.trim().slice(0, 40);
    if (!words || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (node.closest("option, title")) continue;
    if (node.closest("details:not([open])") && !node.closest("summary")) continue;  // it takes no place
    const range = document.createRange();
    range.selectNodeContents(text);
    const all = [...range.getClientRects()].map(box => seen(node, box))
      .filter(box => box.right - box.left > 2 && box.bottom - box.top > 2);
    if (!all.length) continue;
    const scale = node.closest("svg") && node.getScreenCTM ? node.getScreenCTM().d : 1;
    const style = getComputedStyle(node), size = parseFloat(style.fontSize) * scale;
    if (size < 11.99) found.add(`${size.toFixed(1)} pixels: ${words}`);
    const [{left, right, top: above, bottom}] = all;
    const [a, b] = painted(node, (left + right) / 2, (above + bottom) / 2).map(light).sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5 && !node.closest(IDLE)) found.add(`contrast ${ratio.toFixed(2)}: ${words}`);
    for (const box of all) boxes.push({...box, text, node, words});
  }
  const covers = (node, other, x, y) => {  // something opaque is between two texts
    for (const one of document.elementsFromPoint(x, y)) {
      if (one === node || one === other) {
        const [, , , alpha = 1] = channels(getComputedStyle(one).backgroundColor);
        return alpha > 0.99;
      }
      const [, , , alpha = 1] = channels(getComputedStyle(one).backgroundColor);
      if (alpha > 0.99) return true;
    }
    return true;  // outside of the window
  };
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((one, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < one.bottom; j++) {
      const other = boxes[j];
      if (other.text === one.text) continue;
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (wide < 3 || high < 0.4 * Math.min(one.bottom - one.top, other.bottom - other.top)) continue;
      const x = Math.max(one.left, other.left) + wide / 2, y = Math.max(one.top, other.top) + high / 2;
      if (!covers(one.node, other.node, x, y)) found.add(`${one.words} over ${other.words}`);
    }
  });
  return [...found];
}"""
WIDTHS = {"a phone": 390, "a screen": 1280, "a wide screen": 1920}


def layout_problems(page: Any) -> list[str]:
    """Return what is wrong with the layout of a page, all of which the window then shows."""
    size = page.viewport_size
    height = page.evaluate("() => document.documentElement.scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(max(height, 200), 30_000)})
    try:
        return list(page.evaluate(PROBLEMS))
    finally:
        page.set_viewport_size(size)


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
