"""The lab's errors: one small tree, so that a caller can catch exactly what it can handle."""


class AttnLabError(Exception):
    """Any error that the lab raises on purpose; its text is one line for a person."""


class InvalidCase(AttnLabError, ValueError):
    """A Case, or what it is made from, breaks a rule; the text names the field."""

    def _render_traceback_(self) -> list[str]:
        """Show the one line in a notebook, where IPython would show every frame of the lab."""
        return [f"{type(self).__name__}: {self}"]


class InvalidCall(AttnLabError, ValueError):
    """A KernelCall, or a file that should hold one, is not well formed."""


class KernelRejected(AttnLabError, RuntimeError):
    """The kernel refuses its arguments, with the text that the real op raises."""


class KernelFailed(KernelRejected):
    """The kernel broke while it ran: it left its memory, stood still, or would have ended the process."""


class Unavailable(AttnLabError, RuntimeError):
    """What was asked for cannot run here; the text says why and what would help."""


class VerdictFailed(AttnLabError, AssertionError):
    """A notebook's verdict differs from what the notebook expects."""
