"""The lab's errors: one small tree, so that a caller can catch exactly what it can handle."""


class AttnLabError(Exception):
    """Any error that the lab raises on purpose; its text is one line for a person."""


class OneLine(Exception):
    """An error that a notebook shows as its one line, where IPython would show every frame of the lab."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class InvalidCase(OneLine, AttnLabError, ValueError):
    """A Case, or what it is made from, breaks a rule; the text names the field."""


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
