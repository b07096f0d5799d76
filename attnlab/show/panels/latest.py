"""Latest: work in the background of which only the last question's answer counts."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

Q = TypeVar("Q")


class Outdated(BaseException):
    """Ends work that nobody waits for; no Exception, so that no kernel's own handler keeps it."""


@dataclass(slots=True)
class Job:
    """One question's turn: what its work says and gives goes out only while the question is the last."""

    generation: int
    latest: "LatestOnly[object]"
    started: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Raise Outdated where a later question was asked, or the work was cancelled."""
        if self.generation != self.latest.generation:
            raise Outdated

    def give(self, publish: Callable[[], None]) -> None:
        """Call ``publish`` unless the question is outdated; nobody can ask or cancel meanwhile."""
        with self.latest.lock:
            self.check()
            publish()


class LatestOnly(Generic[Q]):
    """Answers questions one at a time, in a thread, each once it has been the last for ``quiet_s``.

    ``answer(question, turn)`` does the work. It is to call ``turn.check()`` often, and to hand out what it
    finds through ``turn.give``. What it raises goes to ``on_error(question, error)``, by the same rule.
    """

    def __init__(
        self,
        answer: Callable[[Q, Job], None],
        on_error: Callable[[Q, Exception], None],
        quiet_s: float = 0.03,
    ) -> None:
        self._answer, self._on_error, self._quiet_s = answer, on_error, quiet_s
        self._question: list[Q] = []  # at most one, not yet taken
        self._asked = 0.0
        self._thread: threading.Thread | None = None
        self._working = False
        self.generation = 0
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    def ask(self, question: Q) -> None:
        """Answer this question next, and no earlier one any more."""
        with self._changed:
            self._drop()
            self._question = [question]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, daemon=True, name="attnlab-panel"
                )
                self._thread.start()

    def cancel(self) -> None:
        """Answer nothing: what is under way ends at its next check, and its answer is not given."""
        with self._changed:
            self._drop()

    def _drop(self) -> None:
        self.generation += 1
        self._asked = time.perf_counter()
        self._question = []
        self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Answer whether the last question still waits for its answer, or is worked on."""
        return bool(self._question) or self._working

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way; answer whether that came within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def _work(self) -> None:
        while True:
            question, turn = self._take()
            with suppress(Outdated):
                try:
                    self._answer(question, turn)
                except Exception as error:
                    turn.give(partial(self._on_error, question, error))
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _take(self) -> tuple[Q, Job]:
        """Wait for a question that has been the last for long enough, and take it."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._question)
                left = self._asked + self._quiet_s - time.perf_counter()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._working = True
            return self._question.pop(), Job(generation=self.generation, latest=self)  # type: ignore[arg-type]
