"""Observation: something wrong that a process of vLLM saw, as a line of its record.

This module imports no torch: the command reads records without it."""

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnlab.case.shown import json_value

# Kinds, and what each of them says. The order is that of a report.
KINDS = {
    "value": "an output differs from the reference by more than rounding allows",
    "not_finite": "an output has NaN or Inf",
    "never_written": "a slot was read that no token was written to",
    "recycled": "a slot was read that holds a token of a request that gave up the block",
    "other_sequence": "a slot was read that holds a token of another running request",
    "other_position": "a slot was read that holds another position, or other token ids",
    "misplaced": "a new token was written to another slot than the one it is read from",
    "outside": "a slot outside the cache was written or read",
    "arguments": "an argument of the op contradicts the batch that the scheduler made",
    "intent": "an argument of the op contradicts the layer",
}

SLOTS = "slots"
# A wrong slot may be seen as one of these in one step, and as another one in the next.
SLOT_KINDS = ("never_written", "recycled", "other_sequence", "other_position", "misplaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Something wrong at one place.

    - ``kind``: a name of :data:`KINDS`. ``text``: one sentence.
    - ``layer``: the name of the layer in vLLM. ``step``: the number of the step, from 0. ``rank``: of the
      process.
    - ``request``: vLLM's request id. ``seq``: its row in the batch. ``position``: of the first token.
      ``block``: the cache block, as the op numbers it. ``argument``: the argument of the op. Each may be
      None.
    - ``facts``: the values, by name.
    """

    kind: str
    text: str
    layer: str
    step: int
    rank: int = 0
    request: str | None = None
    seq: int | None = None
    position: int | None = None
    block: int | None = None
    argument: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what is equal for observations of the same fault in later steps."""
        kind = SLOTS if self.kind in SLOT_KINDS else self.kind
        request = None if self.kind == "intent" else self.request
        return (kind, self.layer, self.rank, request, self.block, self.argument)


# The record of a process: JSON lines that are written as things happen, so that a killed server leaves
# them.
#
# A line is an object with "event": "started", "observation", "saved", "counts", "note" or "error".
# docs/howto/capture.md describes them.

SUFFIX = ".record.jsonl"
CALLS = "calls"  # the folder of saved calls


class RecordFile:
    """Writes the lines of this process; a forked process gets a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append a line. Raises OSError if it cannot be written."""
        line = json.dumps({"event": event, **json_value(dict(facts))}, allow_nan=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{socket.gethostname()}-{os.getpid()}{SUFFIX}"
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def saved_bytes(self) -> int:
        """Return the size of the calls that all processes saved."""
        total = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder / CALLS):
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
        return total


def read_records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each process by the name of its file. A line that was cut off is left out."""
    return {
        path.name.removesuffix(SUFFIX): list(_lines(path))
        for path in sorted(folder.glob(f"*{SUFFIX}"))
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


# Tally: the counts and the observations of a capture in one process.

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
                self._records.write("observation", asdict(one))

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
