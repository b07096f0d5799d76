"""CaptureSettings: what a capture checks and keeps, and its text in the environment."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.library.op import libraries, ops_of

MAX_BYTES = 2 << 30
SETTINGS = "settings.json"  # the file of a capture's settings in its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What a capture does.

    - ``out``: the folder of the records and the saved calls.
    - ``layer``, ``step``, ``rank``: the calls that are kept on request. Each is None for all, or a range
      (first, end). If ``layer`` and ``step`` are None, none is kept on request. ``rank`` also limits what
      is checked.
    - ``max_bytes``: the size of all saved calls together.
    - ``sample``: the share of all calls whose values are checked, above 0 and up to 1.
    - ``rows``, ``heads``: how many rows and query heads of such a call are compared; None for all.
    - ``library``: whose ops are checked, a module of attnlab/library; None for vLLM with its engine. Its
      calls have no layers, and their number in a process is their step.

    Raises InvalidCase for a wrong value.
    """

    out: str
    layer: tuple[int, int] | None = None
    step: tuple[int, int] | None = None
    rank: tuple[int, int] | None = None
    max_bytes: int = MAX_BYTES
    sample: float = 1 / 16
    rows: int | None = 4
    heads: int | None = 4
    library: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.out, str) or not self.out:
            refuse("out", "the path of a folder", self.out)
        for name in ("layer", "step", "rank"):
            self._check_range(name)
        if type(self.max_bytes) is not int or self.max_bytes < 0:
            refuse("max-bytes", "a number of bytes from 0", self.max_bytes)
        if type(self.sample) not in (int, float) or not 0 < self.sample <= 1:
            refuse("sample", "above 0 and at most 1", self.sample)
        for name in ("rows", "heads"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                refuse(name, "a whole number from 1, or all", count)
        if self.library is not None and self.library not in captured_libraries():
            refuse("library", f"one of {', '.join(captured_libraries())}", self.library)
        if self.library is not None and self.layer is not None:
            refuse("layer", "left out with a library, whose layers are not known", self.layer)

    def _check_range(self, name: str) -> None:
        span: Any = getattr(self, name)
        if span is None:
            return
        is_pair = isinstance(span, (tuple, list)) and len(span) == 2
        if not is_pair or any(type(one) is not int for one in span) or not 0 <= span[0] < span[1]:
            refuse(name, "a number or a range FIRST:END", span)
        object.__setattr__(self, name, (span[0], span[1]))

    def to_json(self) -> str:
        """Return the settings as the text that :meth:`of_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "CaptureSettings":
        """Return the settings of a JSON document, or of the file at a path. Raises InvalidCase."""
        source = "ATTNLAB_CAPTURE"
        try:
            if not text.lstrip().startswith("{"):
                source, text = text, Path(text).read_text()
            values = json.loads(text)
            return cls(**values)
        except (OSError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            raise InvalidCase(f"{source} must hold settings of a capture: {why}") from error

    def is_requested(self, layer: int | None, step: int) -> bool:
        """Answer whether the call of a layer in a step is kept whatever the check finds."""
        if self.layer is None and self.step is None:
            return False
        in_layer = self.layer is None or (layer is not None and layer in range(*self.layer))
        return in_layer and (self.step is None or step in range(*self.step))


def captured_libraries() -> list[str]:
    """Return the libraries whose attention is checked without an engine's hooks: those with records of it."""
    return [name for name in libraries() if name != "vllm" and ops_of(name)]


def parse_range(name: str, text: str) -> tuple[int, int]:
    """Return the range "3" or "40:60". Raises InvalidCase."""
    first, colon, end = text.partition(":")
    try:
        begin = int(first)
        return begin, int(end) if colon else begin + 1
    except ValueError:
        refuse(name, "a number or a range FIRST:END", text)


_UNITS = {
    "": 1,
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMG", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMG", 1)},
}


def parse_bytes(name: str, text: str) -> int:
    """Return the size "2GiB", "500MB" or "4096". Raises InvalidCase."""
    number = text.rstrip("BbIiKkMmGg")
    unit = text[len(number) :].strip().upper()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        refuse(name, "a size such as 2GiB or 500MB", text)


def parse_count(name: str, text: str) -> int | None:
    """Return a number, or None for "all". Raises InvalidCase."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        refuse(name, "a whole number from 1, or all", text)


def parse_share(name: str, text: str) -> float:
    """Return the share "1/16" or "0.5". Raises InvalidCase."""
    above, slash, below = text.partition("/")
    try:
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        refuse(name, "a share such as 1/16 or 0.5", text)
