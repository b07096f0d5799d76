"""Extras: the optional packages of attnlab, and the error that names the extra to install."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from attnlab.case.errors import Unavailable

# The extra of pyproject.toml that installs each package that code of attnlab imports.
_PACKAGES = {
    "lab": (
        "IPython",
        "anywidget",
        "ipykernel",
        "ipywidgets",
        "jinja2",
        "matplotlib",
        "nbclient",
        "nbconvert",
        "nbformat",
        "papermill",
        "pygments",
        "traitlets",
    ),
    "triton": ("triton",),
    "vllm": ("vllm",),
    "ray": ("ray",),
}
EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages}


@contextmanager
def named_extra(what: str) -> Iterator[None]:
    """Raise Unavailable, with the extra to install, if the block misses a package of an extra.

    ``what`` is what needs it, for example "attnlab investigate".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        raise Unavailable(
            f"{what} needs the extra {extra}: pip install 'attnlab[{extra}]' ({error})"
        ) from error


def check_installed(package: str, what: str) -> None:
    """Raise Unavailable, with the extra to install, if a package is missing; do not import it."""
    with named_extra(what):
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # a folder of that name has no origin
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)
