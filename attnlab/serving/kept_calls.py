"""KeptCalls: saves calls to files, up to a number of bytes."""

from pathlib import Path
from typing import Any

from attnlab.serving.record_file import CALLS, RecordFile
from attnlab.tensors.call import KernelCall

MOST_WRONG = 4  # calls of one layer that are kept because a check failed


class KeptCalls:
    """Saves calls in the folder of the records."""

    def __init__(self, records: RecordFile, max_bytes: int) -> None:
        self._records, self._max_bytes = records, max_bytes
        self._wrong: dict[str, int] = {}
        self._is_full = False

    def keep(self, call: KernelCall, *, why: str, name: str, **facts: Any) -> str:
        """Save a call; return the path of its file in the folder, or "" if it was not kept.

        ``why``: "requested" or "wrong". ``name``: of the file, without suffix.
        """
        layer = call.origin.layer or ""
        if self._is_full or (why == "wrong" and self._wrong.get(layer, 0) >= MOST_WRONG):
            return ""
        call = call.with_named_blocks()
        size = sum(one.untyped_storage().nbytes() for one in _storages(call))
        if self._records.saved_bytes() + size > self._max_bytes:
            self._is_full = True
            self._records.write(
                "note", {"text": f"no more calls are saved: max-bytes is {self._max_bytes}"}
            )
            return ""
        if why == "wrong":
            self._wrong[layer] = self._wrong.get(layer, 0) + 1
        path = Path(CALLS) / f"{name}.safetensors"
        target = self._records.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        call.save(target)
        self._records.write("saved", {"file": str(path), "why": why, "bytes": size, **facts})
        return str(path)


def _storages(call: KernelCall) -> list[Any]:
    """Return one tensor for each storage of a call."""
    return list({one.untyped_storage().data_ptr(): one for one in call.tensors().values()}.values())
