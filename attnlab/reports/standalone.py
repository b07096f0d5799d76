"""Make a piece of HTML self-contained: nothing is loaded, no script runs, no link is dead."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

_LOADERS = ["script", "link", "iframe", "frame", "object", "embed", "base", "meta"]
_LOADING = [
    "src",
    "srcset",
    "poster",
    "data",
    "background",
    "xlink:href",
    "action",
    "formaction",
    "ping",
]
_CSS_LOAD = re.compile(r"@import[^;]*;?|url\(\s*['\"]?(?!['\"]?(?:data:|#))[^)]*\)", re.I)
_NOTEBOOK_LINK = re.compile(r"(?:\./)?(\d\d-[\w.-]+)\.ipynb(#.*)?$")
_PAGE_LINK = re.compile(r"(https?:|mailto:|#)", re.I)
_NO_ALT = "No description has been provided for this image"


def self_contained(body: str, pages: Collection[str] = ()) -> "BeautifulSoup":
    """Return parsed HTML without loaders, scripts and dead links; every picture has an alternative text.

    A link to a notebook of ``pages`` becomes a link to its page. Links to the web and within the page
    stay. Every other link becomes plain text.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(body, "html.parser")
    for tag in soup.find_all(_LOADERS):
        tag.decompose()
    for tag in soup.find_all(True):
        for name in [name for name in tag.attrs if _is_loading(tag.name, name, str(tag[name]))]:
            del tag[name]
        if tag.name == "img":
            _clean_picture(tag)
        elif tag.name in ("a", "area") and tag.has_attr("href"):
            _clean_link(tag, pages)
        elif "style" in tag.attrs:
            tag["style"] = _CSS_LOAD.sub("none", str(tag["style"]))
        elif tag.name == "style":
            tag.string = _CSS_LOAD.sub("", tag.get_text())
    return soup


def headings(body: "BeautifulSoup") -> list[tuple[str, str]]:
    """Return the H2 headings of a body as (id, text)."""
    found = []
    for heading in body.find_all("h2"):
        if heading.get("id"):
            found.append((str(heading["id"]), heading.get_text().rstrip("¶ ")))
    return found


def lift_picture(body: "BeautifulSoup") -> str:
    """Remove the first picture from ``body`` and return it; "" if no picture precedes the first H2.

    A link to "#picture" takes its place. Changes ``body``.
    """
    found = body.find(["h2", "img"])
    if found is None or found.name != "img":
        return ""
    link = body.new_tag("a", href="#picture")
    link.string = "picture: at the top of the page"
    found.replace_with(link)
    return str(found)


def _clean_picture(picture: Any) -> None:
    """Replace a picture that is not embedded by its text; without a text it gets that of its heading."""
    alt = str(picture.get("alt") or "")
    if not picture.has_attr("src"):
        picture.replace_with(f"({alt or 'picture'}: not embedded)")
    elif not alt or alt == _NO_ALT:
        heading = picture.find_previous(["h1", "h2", "h3"])
        title = heading.get_text().rstrip("¶ ") if heading else ""
        picture["alt"] = f"Figure: {title}" if title else "Figure"


def _clean_link(link: Any, pages: Collection[str]) -> None:
    """Point a link to the page of a notebook, keep it, or remove its address."""
    address = str(link["href"]).strip()
    if found := _NOTEBOOK_LINK.match(address):
        if found[1] in pages:
            link["href"] = f"{found[1]}.html{found[2] or ''}"
        else:
            del link["href"]
    elif not _PAGE_LINK.match(address):
        del link["href"]


def _is_loading(tag: str, attribute: str, value: str) -> bool:
    """Answer whether an attribute fetches something or runs a script; a plain link does neither."""
    value = value.strip().lower()
    if attribute.startswith("on") or value.startswith("javascript:"):
        return True
    if attribute in _LOADING or (attribute == "href" and tag not in ("a", "area")):
        return not value.startswith(("data:", "#"))
    return False
