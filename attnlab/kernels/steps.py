"""The steps of a run, and the protocol of a function that displays them."""

from typing import Protocol

STEPS = ("batch", "cache", "kernels", "reference", "compare")  # in the order of a run


class OnStep(Protocol):
    """A function that is called before each step of a run."""

    def __call__(self, step: str, done: int | None = None, total: int | None = None) -> None:
        """Display ``step``: one of STEPS, or a text about a part of one.

        ``done`` of ``total`` programs of the step have run, if the step counts them. The function may
        raise to end the run.
        """


def ignore_step(step: str, done: int | None = None, total: int | None = None) -> None:
    """Display nothing."""
