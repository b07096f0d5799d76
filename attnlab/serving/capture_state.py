"""What the parts of a capture in one process share: the state, and the calls that it keeps."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlab.case.shown import json_value
from attnlab.serving.batch import LayerCall, Requests, Step
from attnlab.serving.settings import CaptureSettings
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import named_by

# Observation: something wrong that a process saw, as a line of its record.
#
# This module imports no torch: the command reads records without it.

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
    - ``layer``: the name of the layer in vLLM, of another library the op's function. ``step``: the number of
      the step, or of the call, from 0. ``rank``: of the process.
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


MOST_WRONG = 4  # calls of one layer that are kept because a check failed


class KeptCalls:
    """Saves calls in the folder of the records."""

    def __init__(self, records: RecordFile, max_bytes: int) -> None:
        self._records, self._max_bytes = records, max_bytes
        self._wrong: dict[str, int] = {}
        self._is_noted = False

    def keep_checked(
        self, call: KernelCall, wrong: Sequence[Observation], *, name: str, layer: str, step: int
    ) -> None:
        """Save a call that is wrong, or that was requested, and note the file in what is ``wrong``."""
        why = "wrong" if wrong else "requested"
        file = self.keep(call, why=why, name=name, layer=layer, step=step)
        for one in wrong:
            one.facts["call"] = file

    def keep(self, call: KernelCall, *, why: str, name: str, **facts: Any) -> str:
        """Save a call; return the path of its file in the folder, or "" if it was not kept."""
        layer = str(facts.get("layer", ""))
        if why == "wrong" and self._wrong.get(layer, 0) >= MOST_WRONG:
            return ""
        size = _bytes(call)
        if self._records.saved_bytes() + size > self._max_bytes:
            if not self._is_noted:
                self._is_noted = True
                text = f"a call of {size} bytes was not saved: max-bytes is {self._max_bytes}"
                self._records.write("note", {"text": text})
            return ""
        if why == "wrong":
            self._wrong[layer] = self._wrong.get(layer, 0) + 1
        path = Path(CALLS) / f"{name}.safetensors"
        target = self._records.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        call.with_named_blocks().save(target)
        self._records.write("saved", {"file": str(path), "why": why, "bytes": size, **facts})
        return str(path)


def _bytes(call: KernelCall) -> int:
    """Return the bytes of a call with only the blocks that its block table names; nothing is copied."""
    total = call.key_cache.shape[0]
    named = len(named_by(call.block_table, total))
    of_blocks = ("key_cache", "value_cache")
    return sum(
        one.numel() * one.element_size() * (named if name in of_blocks else total) // max(1, total)
        for name, one in call.tensors().items()
    )


_log = logging.getLogger("attnlab.serving")


class CaptureState:
    """The state of a capture.

    - ``step``: the batch that runs, None between steps. ``rank``: of the process.
    - ``metadata``: by layer name, the CommonAttentionMetadata of the step and its block size.
    - ``constructed``: by layer name, the arguments of the layer's constructor.
    - ``requests``, ``tally``: the engine's requests; counts, and what was observed.
    """

    def __init__(self, settings: CaptureSettings, records: RecordFile) -> None:
        self.settings, self.records = settings, records
        self.rank = 0
        self.step: Step | None = None
        self.metadata: dict[str, tuple[Any, int]] = {}
        self.constructed: dict[str, dict[str, Any]] = {}
        self.requests = Requests()
        self.tally = Tally(records)
        self._has_failed = False
        self._thread = threading.local()

    def failed(self, what: str, error: Exception) -> None:
        """Log and record the first error of the capture."""
        if self._has_failed:
            return
        self._has_failed = True
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
        _log.warning("attnlab failed in %s; the program continues without this check", text)
        with contextlib.suppress(OSError):
            self.records.write("error", {"text": text})

    @contextlib.contextmanager
    def guarded(self, what: str, on_error: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Run a part of the capture: no error leaves it, and no op in it is checked."""
        outer, self._thread.is_busy = getattr(self._thread, "is_busy", False), True
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            on_error()
            self.failed(what, error)
        finally:
            self._thread.is_busy = outer

    @property
    def call(self) -> LayerCall | None:
        """Return the layer's call that runs in this thread; None inside attnlab."""
        if getattr(self._thread, "is_busy", False):
            return None
        call: LayerCall | None = getattr(self._thread, "call", None)
        return call

    @call.setter
    def call(self, call: LayerCall | None) -> None:
        self._thread.call = call
