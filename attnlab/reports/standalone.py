"""Take out of a page what would load something, run something, or lead to what is not there."""

import re
from collections.abc import Collection
from typing import Any

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


def self_contained(body: str, pages: Collection[str] = ()) -> str:
    """Return HTML that loads nothing, runs no script, and links to nothing that it does not bring along.

    A link to a notebook of `pages` becomes one to its page, a link to the web or inside the page stays,
    and of any other the text stays.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(body, "html.parser")
    for tag in soup.find_all(_LOADERS):
        tag.decompose()
    for tag in soup.find_all(True):
        for name in [name for name in tag.attrs if _is_loading(tag.name, name, str(tag[name]))]:
            del tag[name]
        if tag.name == "img" and not tag.has_attr("src"):
            tag.replace_with(f"({tag.get('alt') or 'picture'}: not embedded)")
        elif tag.name in ("a", "area") and tag.has_attr("href"):
            _mend_link(tag, pages)
        elif "style" in tag.attrs:
            tag["style"] = _CSS_LOAD.sub("none", str(tag["style"]))
        elif tag.name == "style":
            tag.string = _CSS_LOAD.sub("", tag.get_text())
    return str(soup)


def _mend_link(link: Any, pages: Collection[str]) -> None:
    """Lead a link to the page of a notebook, leave it, or take its address away."""
    address = str(link["href"]).strip()
    if found := _NOTEBOOK_LINK.match(address):
        if found[1] in pages:
            link["href"] = f"{found[1]}.html{found[2] or ''}"
        else:
            del link["href"]
    elif not _PAGE_LINK.match(address):
        del link["href"]


def _is_loading(tag: str, attribute: str, value: str) -> bool:
    """Say whether an attribute fetches something or runs a script; a plain link does neither."""
    value = value.strip().lower()
    if attribute.startswith("on") or value.startswith("javascript:"):
        return True
    if attribute in _LOADING or (attribute == "href" and tag not in ("a", "area")):
        return not value.startswith(("data:", "#"))
    return False
