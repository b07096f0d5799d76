"""The line of a panel that says what is under way, with a button that ends it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape

import ipywidgets as ipw

from attnlab.show.panels.latest import Job, Outdated

_SOON_S, _OFTEN_S = 0.4, 0.1  # when progress is first shown, and how often it changes
_STEPS = ("batch", "cache", "kernels", "reference", "compare", "picture")


class Progress:
    """A bar, the name of the step and a button to cancel; there only while something takes long.

    ``state`` is "working", or "idle" once it ended, for whoever waits for it in a browser.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._bar = ipw.FloatProgress(max=1.0, layout={"width": "160px"})
        self._button = ipw.Button(description="Cancel", layout={"width": "80px"})
        self._button.on_click(lambda button: on_cancel())
        self._text = ipw.HTML()
        self._working = [self._bar, self._button]
        self._turn: Job | None = None  # the one whose progress may show
        self.widget = ipw.HBox([*self._working, self._text]).add_class("attnlab-progress")
        self.end("")

    def begin(self) -> None:
        """Say that something is under way; the bar comes with its first step after a moment."""
        self._bar.value = 0.0
        self._say("", "working")

    def end(self, text: str) -> None:
        """Say that nothing is under way any more, and how it ended."""
        self._turn = None
        for part in self._working:
            part.layout.display = "none"
        self._say(text, "idle")

    def steps(self, turn: Job) -> Callable[[str], None]:
        """Return what is called before each step of a turn; it ends a turn that is outdated."""
        shown, last = turn.started + _SOON_S - _OFTEN_S, ""

        def step(name: str) -> None:
            nonlocal shown, last
            turn.check()
            last = name
            if time.perf_counter() - shown >= _OFTEN_S:
                shown = time.perf_counter()
                turn.give(lambda: self._show(name))

        def first() -> None:
            """Show the step that is long; a timer's, since that step calls nobody."""
            with suppress(Outdated):
                turn.give(lambda: self._show(last) if self._turn is turn else None)

        self._turn = turn
        timer = threading.Timer(_SOON_S, first)
        timer.daemon = True
        timer.start()
        return step

    def _show(self, name: str) -> None:
        for part in self._working:
            part.layout.display = ""
        self._bar.value = share_done(name, self._bar.value)
        self._say(name, "working")

    def _say(self, text: str, state: str) -> None:
        self._text.value = f'<span data-state="{state}">{escape(text)}</span>'


def share_done(step: str, before: float) -> float:
    """Return how much of the work is done when a step begins, never less than ``before``."""
    at = next((i for i, name in enumerate(_STEPS) if step.startswith(name)), None)
    if at is None:
        return before
    words = step.split()
    within = 0.0
    if words[-2:-1] == ["of"] and words[-1].isdigit() and int(words[-1]):  # "program 3 of 8"
        within = int(words[-3]) / int(words[-1])
    return max(before, (at + within) / len(_STEPS))
