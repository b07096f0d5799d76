"""CaptureState: what the parts of a capture in one process share."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnlab.serving.batch import Step
from attnlab.serving.layer_call import LayerCall
from attnlab.serving.record_file import RecordFile
from attnlab.serving.requests import Requests
from attnlab.serving.settings import CaptureSettings
from attnlab.serving.tally import Tally

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
