"""The record of a process: JSON lines that are written as things happen, so that a killed server leaves them.

A line is an object with "event": "started", "observation", "saved", "counts", "note" or "error".
docs/howto/capture.md describes them.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnlab.case.json import json_value

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
