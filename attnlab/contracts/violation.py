"""Violation: one place where a call violates a contract, and the sentence that displays it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnlab.case.shown import Shown
from attnlab.contracts.contract import PARTITION_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One place, or run of places, where a call violates a contract. Fields that do not apply are None.

    - ``kind``: "index_dtype", "unsupported", "unwritten_slot", "foreign_slot", "unwritten_rows",
      "key_layout", "short_scratch" or "default_scale".
    - ``effect``: "rejected" (the kernel raises), "silent" (it runs, but its output is not what was asked
      for) or "harmless" (the kernel converts the argument).
    - ``kernel``: the kernel whose contract is violated; "" for rows that no kernel writes.
    - ``tensor``: the tensor at fault; "kv_cache" is the key and value cache. ``parameter``: the number,
      size or setting at fault. One of the two is given.
    - ``dtype``: the tensor's dtype, where the dtype is the fault.
    - ``row``, ``last_row``: the first and last output row.
    - ``sequence``, ``position``, ``block``, ``slot``: the first place in the cache.
    - ``count``: how many rows or positions of the sequence are affected.
    - ``value``: what the call has; ``required``: what the contract requires, or what the kernel reads or
      uses instead.
    """

    kind: str
    effect: str
    kernel: str
    tensor: str | None = None
    parameter: str | None = None
    dtype: str | None = None
    row: int | None = None
    last_row: int | None = None
    sequence: int | None = None
    position: int | None = None
    block: int | None = None
    slot: int | None = None
    count: int | None = None
    value: Any = None
    required: Any = None

    @property
    def subject(self) -> str:
        """Return the name of the tensor or parameter at fault."""
        return self.tensor or self.parameter or ""

    @property
    def text(self) -> str:
        """Return the violation as one sentence, for display only."""
        return _TEXTS[self.kind](self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sentence as JSON-able values."""
        return {**dataclasses.asdict(self), "text": self.text}


class Violations(Shown, list[Violation]):
    """A list of violations that displays itself as a table."""

    __slots__ = ()


def _index_dtype(v: Violation) -> str:
    if v.effect == "rejected":
        reaction = "rejects it: expected scalar type Int but found Long"
    elif v.effect == "harmless":
        reaction = "converts it to int32"
    else:
        given, read = (", ".join(map(str, numbers)) for numbers in (v.value, v.required))
        reaction = f"reads its bytes as int32 without a check: {given}, … becomes {read}, …"
    return f"{v.tensor} is {v.dtype}; {v.kernel} {reaction}"


def _unsupported(v: Violation) -> str:
    return f"{v.subject} is {v.value}; {v.kernel} supports {v.required}"


def _key_layout(v: Violation) -> str:
    return (
        f"key_cache has x = {v.value}; {v.kernel} assumes x = {v.required} and reads other elements"
    )


def _short_scratch(v: Violation) -> str:
    return (
        f"max_seq_len gives {v.kernel} scratch for {v.value} partitions of {PARTITION_SIZE} tokens; "
        f"sequence {v.sequence} needs {v.required}, so heads read each other's scratch"
    )


def _default_scale(v: Violation) -> str:
    return (
        f"sm_scale is not passed; {v.kernel} uses 1 / sqrt({v.value}), by the number of heads, "
        f"instead of 1 / sqrt({v.required}), by the head size"
    )


def _unwritten_rows(v: Violation) -> str:
    rows = f"row {v.row}" if v.row == v.last_row else f"rows {v.row}–{v.last_row}"
    verb = "is" if v.row == v.last_row else "are"
    return (
        f"{rows} of output (sequence {v.sequence}, query_len {v.value}) {verb} written by no kernel "
        f"and keep{'s' * (verb == 'is')} what the buffer held"
    )


def _slot(v: Violation) -> str:
    holds = "which was never written" if v.kind == "unwritten_slot" else "which holds another token"
    more = (v.count or 1) - 1
    return (
        f"{v.kernel} reads sequence {v.sequence}, position {v.position}: block {v.block}, "
        f"slot {v.slot}, {holds}" + (f" (and {more} more positions)" if more else "")
    )


_TEXTS: dict[str, Callable[[Violation], str]] = {
    "index_dtype": _index_dtype,
    "unsupported": _unsupported,
    "key_layout": _key_layout,
    "short_scratch": _short_scratch,
    "default_scale": _default_scale,
    "unwritten_rows": _unwritten_rows,
    "unwritten_slot": _slot,
    "foreign_slot": _slot,
}
