"""A headless Chromium for the tests: where it is, and a page that cannot reach the network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str:
    """Return the program: $ATTNLAB_CHROMIUM, or the first on the PATH; skip the test where there is none."""
    named = os.environ.get("ATTNLAB_CHROMIUM")
    found = [named] if named else [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no Chromium on the PATH ({', '.join(NAMES)}) and none in $ATTNLAB_CHROMIUM")
    return found[0]


@contextmanager
def offline_page(**options: Any) -> Iterator[Any]:
    """Give a page of a browser that is offline; what it asks of any network, and its complaints, are noted.

    `page.asked` are the addresses that it asked for, but for files; `page.complaints` what the console,
    a script or a failed request said. `options` are those of Playwright's new_context.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        context = browser.new_context(offline=True, **options)
        page = context.new_page()
        page.asked, page.complaints = [], []
        context.route("http://**", lambda route: route.abort())
        context.route("https://**", lambda route: route.abort())
        page.on("request", lambda one: _note(page.asked, one.url))
        page.on("requestfailed", lambda one: page.complaints.append(f"failed: {one.url[:200]}"))
        page.on("console", lambda one: page.complaints.append(f"{one.type}: {one.text}"))
        page.on("pageerror", lambda one: page.complaints.append(f"error: {one}"))
        try:
            yield page
        finally:
            browser.close()


def _note(asked: list[str], url: str) -> None:
    if not url.startswith(("file:", "data:")):
        asked.append(url)
