"""KeptCalls: saves calls to files, up to a number of bytes."""

from pathlib import Path
from typing import Any

from attnlab.serving.record_file import CALLS, RecordFile
from attnlab.tensors.call import KernelCall
from attnlab.tensors.named_blocks import named_by

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
