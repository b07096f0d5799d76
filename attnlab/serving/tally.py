"""Tally: the counts and the observations of a capture in one process."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attnlab.serving.observation import Observation
from attnlab.serving.record_file import RecordFile

_INTERVAL_S = 1.0  # between two lines of counts


class Tally:
    """Counts, and observations without repetition.

    - ``counts``: of steps, tokens, calls, compared rows and so on. ``unchecked``: what was not checked, and
      how often. ``worst``: the largest error as a multiple of its bound.
    """

    def __init__(self, records: RecordFile) -> None:
        self.counts: Counter[str] = Counter()
        self.unchecked: Counter[str] = Counter()
        self.worst = 0.0
        self._records = records
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._last: dict[tuple[Any, ...], int] = {}
        self._written_at = 0.0

    def observe(self, found: Sequence[Observation]) -> None:
        """Record observations; of one that was made before, only the number changes."""
        for one in found:
            key = one.key
            self._seen[key] += 1
            self._last[key] = one.step
            if self._seen[key] == 1:
                self._records.write("observation", one.to_dict())

    def write_sometimes(self) -> None:
        """Append the counts so far to the record, at most once a second."""
        if time.monotonic() - self._written_at > _INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Append the counts so far to the record; an error is ignored, because it was reported before."""
        self._written_at = time.monotonic()
        if not self.counts["steps"]:
            return
        repeated = [
            {"key": list(key), "times": times, "last_step": self._last[key]}
            for key, times in self._seen.items()
            if times > 1
        ]
        facts = {
            "counts": dict(self.counts),
            "unchecked": dict(self.unchecked),
            "worst": self.worst,
            "repeated": repeated,
        }
        with contextlib.suppress(OSError):
            self._records.write("counts", facts)
