"""Store: the outcomes of tasks in a folder, so that an interrupted run can continue, and shards be merged.

header.json      what the outcomes are of: the command, its options, the sources and versions
outcomes.jsonl   one outcome per line, appended as it arrives; the last one of a key counts
lock             held while a process writes to the folder
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.fields import refuse
from attnlab.case.output_file import make_output_folder, write_text
from attnlab.tasks.task import NOT_RUN, STATUSES, Outcome, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part ``index`` of ``count``, counted from 1."""

    index: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard of a text such as "2/3"; raise InvalidCase for another text."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            refuse("shard", "i/n with 1 ≤ i ≤ n, for example 1/3", text)
        return cls(index=int(match[1]), count=int(match[2]))

    def of(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of this shard, in their order.

        The division depends only on the tasks and their costs. Starting with the most expensive, each
        task goes to the shard with the least cost so far, so the shards take about the same time.
        """
        if self.count == 1:
            return [*tasks]
        loads, owner = [0.0] * self.count, dict[str, int]()
        for task in sorted(tasks, key=lambda task: (-task.cost_s, task.key)):
            least = min(range(self.count), key=lambda i: (loads[i], i))
            loads[least] += task.cost_s
            owner[task.key] = least
        return [task for task in tasks if owner[task.key] == self.index - 1]


ALL = Shard()


FORMAT = 1
_HEADER, _OUTCOMES, _LOCK = "header.json", "outcomes.jsonl", "lock"
Header = dict[str, Any]


class Store:
    """A store that this process writes to. Use it as a context manager, which holds the lock.

    ``outcomes``: by key, those of earlier runs that need not run again. A task that was not started,
    because the machine lacked something, may run now.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        """Create the folder, or open one that was made with the same header."""
        wanted: Header = json.loads(json.dumps({"format": FORMAT, **header}))
        check_store_folder(folder)
        self._folder, self._lock = folder, FileLock(folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise InvalidCase(f"out must not be in use by another process, got {folder}") from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            self.outcomes = self._opened(wanted)
        except BaseException:
            self._lock.release()
            raise

    def _opened(self, header: Header) -> dict[str, Outcome]:
        """Read or write the header, and return the outcomes that count."""
        if (self._folder / _HEADER).exists():
            difference = difference_of(read_header(self._folder), header)
            if difference:
                text = f"out must be a store of the same command, got {self._folder}, where {difference}"
                raise InvalidCase(text)
        else:
            write_text(self._folder / _HEADER, json.dumps(header) + "\n")
        outcomes, size = _read_outcomes(self._folder)
        path = self._folder / _OUTCOMES
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.ftruncate(self._file, size)  # drops a line that was cut off
            os.lseek(self._file, size, os.SEEK_SET)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        self._size = size
        return {key: found for key, found in outcomes.items() if found.status != NOT_RUN}

    def append(self, outcome: Outcome) -> None:
        """Write an outcome. Raises Unavailable if that is impossible; the store then lacks only this one."""
        line = (json.dumps(outcome.to_dict(), allow_nan=False) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            # A line that was cut off is dropped by the next reader.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise _unwritable(self._folder, error) from error
        self._size += len(line)

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def read_store(folder: Path) -> tuple[Header, dict[str, Outcome]]:
    """Return the header and the outcomes of a store. Raises InvalidCase if the folder is none."""
    return read_header(folder), _read_outcomes(folder)[0]


def check_store_folder(folder: Path) -> None:
    """Create the folder of a store. Raises InvalidCase for one that has files but is no store."""
    if not folder.is_dir():
        make_output_folder(folder, "out")
    if (folder / _HEADER).exists():
        return
    others = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
    if others:
        text = f"out must be a new folder, an empty one or a store, got {folder} with {others[0]}"
        raise InvalidCase(text)


def check_can_store(folder: Path) -> None:
    """Raise InvalidCase if a store can neither be made in a folder nor be continued there."""
    is_new = not folder.exists()
    check_store_folder(folder)
    if is_new:  # what would use it may fail before
        folder.rmdir()


def difference_of(stored: Any, wanted: Any, name: str = "") -> str:
    """Return the first difference of two headers in words, such as "seed is 1, not 0"; "" if none.

    The path of a source, and flags that have it, may differ; its digest must not.
    """
    if name in ("source", "flags"):
        return ""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in {**stored, **wanted}:
            text = difference_of(stored.get(key), wanted.get(key), key)
            if text:
                return text
        return ""
    return "" if stored == wanted else f"{name} is {stored}, not {wanted}"


def read_header(folder: Path, field: str = "out") -> Header:
    """Return the header of a store. Raises InvalidCase, for ``field``, if the folder is none."""
    path = folder / _HEADER
    try:
        header = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InvalidCase(f"{folder} must be a store: it has no {_HEADER}", field=field) from error
    except (OSError, ValueError) as error:
        raise InvalidCase(f"{path} cannot be read: {error}", field=field) from error
    found = header.get("format") if isinstance(header, dict) else None
    if found != FORMAT:
        text = f"{folder} must be a store of format {FORMAT}, got format {found}"
        raise InvalidCase(text, field=field)
    return dict(header)


def _read_outcomes(folder: Path) -> tuple[dict[str, Outcome], int]:
    """Return the outcomes by key, and the size of the file up to the end of the last complete line."""
    path = folder / _OUTCOMES
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InvalidCase(f"{path} cannot be read: {error.strerror}", field="out") from error
    size = data.rfind(b"\n") + 1
    outcomes = {}
    for number, line in enumerate(data[:size].splitlines(), 1):
        try:
            outcome = Outcome(**json.loads(line))
            if outcome.status not in STATUSES:
                raise ValueError(outcome.status)
        except (ValueError, TypeError) as error:
            raise InvalidCase(f"{path}, line {number}, is not an outcome", field="out") from error
        outcomes[outcome.key] = outcome
    return outcomes, size


def _unwritable(folder: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{folder} cannot be written: {error.strerror or error}")


def merged_stores(folders: Sequence[Path]) -> tuple[Header, dict[str, Outcome]]:
    """Return the header that all stores share, with shard "1/1", and the outcomes of all."""
    stores = {folder: read_store(folder) for folder in folders}
    if len(stores) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise InvalidCase(f"{twice} must be given once", field="dir")
    first, (header, _) = next(iter(stores.items()))
    outcomes: dict[str, Outcome] = {}
    owners: dict[str, Path] = {}
    for folder, (other, found) in stores.items():
        difference = difference_of({**other, "shard": None}, {**header, "shard": None})
        if difference:
            text = f"{folder} must be a shard of the same check as {first}: its {difference}"
            raise InvalidCase(text, field="dir")
        if other["shard"] in owners:
            text = (
                f"shard {other['shard']} must be given once: {owners[other['shard']]} and {folder}"
            )
            raise InvalidCase(text, field="dir")
        owners[other["shard"]] = folder
        outcomes |= found
    _check_complete(list(owners))
    return {**header, "shard": "1/1"}, outcomes


def _check_complete(given: Sequence[str]) -> None:
    """Raise InvalidCase if shards are missing or belong to different divisions."""
    shards = [Shard.parse(text) for text in given]
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        text = f"the shards must be parts of one division, got {', '.join(given)}"
        raise InvalidCase(text, field="dir")
    count = counts.pop()
    missing = sorted(set(range(1, count + 1)) - {shard.index for shard in shards})
    if missing:
        names = ", ".join(f"{index}/{count}" for index in missing)
        raise InvalidCase(f"every shard must be given, missing {names}", field="dir")
