"""What the parts of a capture in one process share: the state, and the calls that it keeps."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from attnlab.serving.batch import LayerCall, Requests, Step
from attnlab.serving.record import CALLS, RecordFile, Tally
from attnlab.serving.settings import CaptureSettings
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import named_by

# KeptCalls: saves calls to files, up to a number of bytes.

MOST_WRONG = 4  # calls of one layer that are kept because a check failed


class KeptCalls:
    """Saves calls in the folder of the records."""

    def __init__(self, records: RecordFile, max_bytes: int) -> None:
        self._records, self._max_bytes = records, max_bytes
        self._wrong: dict[str, int] = {}
        self._is_noted = False

    def keep(self, call: KernelCall, *, why: str, name: str, **facts: Any) -> str:
        """Save a call; return the path of its file in the folder, or "" if it was not kept.

        ``why``: "requested" or "wrong". ``name``: of the file, without suffix.
        """
        layer = call.origin.layer or ""
        if why == "wrong" and self._wrong.get(layer, 0) >= MOST_WRONG:
            return ""
        size = _bytes(call)
        if self._records.saved_bytes() + size > self._max_bytes:
            self._note_refusal(size)
            return ""
        if why == "wrong":
            self._wrong[layer] = self._wrong.get(layer, 0) + 1
        path = Path(CALLS) / f"{name}.safetensors"
        target = self._records.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        call.with_named_blocks().save(target)
        self._records.write("saved", {"file": str(path), "why": why, "bytes": size, **facts})
        return str(path)

    def _note_refusal(self, size: int) -> None:
        """Write once that a call was too large. Smaller calls that follow may still fit."""
        if not self._is_noted:
            self._is_noted = True
            text = f"a call of {size} bytes was not saved: max-bytes is {self._max_bytes}"
            self._records.write("note", {"text": text})


def _bytes(call: KernelCall) -> int:
    """Return the bytes of a call with only the blocks that its block table names; nothing is copied."""
    total = call.key_cache.shape[0]
    named = len(named_by(call.block_table, total))
    of_blocks = ("key_cache", "value_cache")
    return sum(
        one.numel() * one.element_size() * (named if name in of_blocks else total) // max(1, total)
        for name, one in call.tensors().items()
    )


# CaptureState: what the parts of a capture in one process share.

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
