"""Page: a strict reader of the HTML that the lab produces."""

from html.parser import HTMLParser
from typing import Any

VOID = {"br", "hr", "img", "rect", "input"}


class Page(HTMLParser):
    """Parse HTML, assert that tags match and nothing is loaded or run, and keep its texts and rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "rect":
            return
        assert all(
            not name.startswith("on") and "url(" not in (value or "") for name, value in attrs
        )
        assert tag not in ("script", "link", "iframe", "img", "object")
        self.open += [tag] if tag not in VOID else []
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag == "rect" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)
            if {"td", "th"} & {*self.open}:
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """Return all text, with single spaces."""
        return " ".join(" ".join(self.texts).split())
