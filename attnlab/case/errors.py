"""The errors that the lab raises on purpose. All derive from AttnLabError."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class AttnLabError(Exception):
    """An error that the lab raises on purpose; its text is one line."""


class OneLine(Exception):
    """An error that a notebook shows as one line, without IPython's traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


_NAMED = re.compile(r"([\w-]+)(?:[.[]\S*)? must ")


class InvalidValue(AttnLabError, ValueError):
    """A value is not allowed.

    ``field`` is the name of the field or argument, without an index: the first word of a text "name must …"
    unless it is given; None if there is no single one.
    """

    def __init__(self, text: str, *, field: str | None = None) -> None:
        super().__init__(text)
        match = _NAMED.match(text)
        self.field = match[1] if field is None and match else field

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), str(self), self.field)


def _restore(kind: Callable[..., InvalidValue], text: str, field: str | None) -> InvalidValue:
    """Restore an InvalidValue that another process raised."""
    return kind(text, field=field)


class InvalidCase(OneLine, InvalidValue):
    """A field of a Case, a flag or a parameter has a value that is not allowed."""


class InvalidCall(InvalidValue):
    """A KernelCall, or a file that should hold one, is not well formed."""


class KernelRejected(AttnLabError, RuntimeError):
    """The kernel refuses its arguments; the text is that of the real op."""


class KernelFailed(KernelRejected):
    """The kernel failed while it ran: it accessed foreign memory, did not end, or ended its process."""


class NotDeterministic(AttnLabError, RuntimeError):
    """Equal runs of a kernel give different outputs, so no statement can rest on the comparison of runs."""


class DeviceLost(AttnLabError, RuntimeError):
    """A kernel broke the GPU's context: this process can no longer run anything on the GPU."""


class Unavailable(OneLine, AttnLabError, RuntimeError):
    """Something cannot run here; the text states why and what would help."""


class Unsupported(Unavailable):
    """A kernel or a release states itself that it does not support this: a limit, no fault."""


class OutOfMemory(Unavailable):
    """A device has not enough memory for what was tried."""


class VerdictFailed(OneLine, AttnLabError, AssertionError):
    """A notebook's verdict differs from the expected one."""


# The extra of pyproject.toml that installs each package that code of attnlab imports.
_PACKAGES = {
    "lab": (
        *("IPython", "anywidget", "ipykernel", "ipywidgets", "jinja2", "matplotlib"),
        *("nbclient", "nbconvert", "nbformat", "papermill", "pygments", "traitlets"),
    ),
    "triton": ("triton",),
    "vllm": ("vllm",),
    "ray": ("ray",),
}
EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages}


@contextmanager
def named_extra(what: str) -> Iterator[None]:
    """Raise Unavailable, with the extra to install, if the block misses a package of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        raise Unavailable(
            f"{what} needs the extra {extra}: pip install 'attnlab[{extra}]' ({error})"
        ) from error


def check_installed(what: str, *packages: str) -> None:
    """Raise Unavailable, with the extra to install, if a package is missing; do not import them."""
    for package in packages:
        with named_extra(what):
            found = importlib.util.find_spec(package)
            if found is None or found.origin is None:  # a folder of that name has no origin
                raise ModuleNotFoundError(f"No module named '{package}'", name=package)
