"""The errors that the lab raises on purpose; all derive from AttnLabError."""

from typing import Any


class AttnLabError(Exception):
    """Any error that the lab raises on purpose; its text is one line for a person."""


class OneLine(Exception):
    """An error that a notebook shows as its one line, where IPython would show every frame of the lab."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class InvalidCase(OneLine, AttnLabError, ValueError):
    """A field of a Case, a flag or a parameter has a value that is not allowed.

    ``field`` is the name of that field, as in the text; None if the text is about no single field.
    """

    def __init__(self, text: str, *, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return _invalid_case, (str(self), self.field)


def _invalid_case(text: str, field: str | None) -> InvalidCase:
    """Restore an InvalidCase that another process raised."""
    return InvalidCase(text, field=field)


class InvalidCall(AttnLabError, ValueError):
    """A KernelCall, or a file that should hold one, is not well formed."""


class KernelRejected(AttnLabError, RuntimeError):
    """The kernel refuses its arguments, with the text that the real op raises."""


class KernelFailed(KernelRejected):
    """The kernel broke while it ran: it left its memory, stood still, or would have ended the process."""


class DeviceLost(AttnLabError, RuntimeError):
    """A kernel broke the GPU's context: this process can run nothing on it any more."""


class Unavailable(OneLine, AttnLabError, RuntimeError):
    """What was asked for cannot run here; the text says why and what would help."""


class VerdictFailed(OneLine, AttnLabError, AssertionError):
    """A notebook's verdict differs from what the notebook expects."""
