"""Violations: where a call violates the contracts of the kernels that will run.

No kernel is run: violations follow from the call, the contracts and the cache's provenance.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from attnlab.case.shown import Document, Shown
from attnlab.contracts.contract import PARTITION_SIZE, ROCM_DECODE, Contract, Target, contracts_of
from attnlab.contracts.slot_states import (
    EMPTY,
    FOREIGN,
    ContractReads,
    cached_lens,
    contract_reads,
    default_scale,
    unwritten_rows,
)
from attnlab.tensors.cache import Provenance
from attnlab.tensors.call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation(Document):
    """One place, or run of places, where a call violates a contract. Fields that do not apply are None.

    - ``kind``: "index_dtype", "unsupported", "unwritten_slot", "foreign_slot", "unwritten_rows",
      "key_layout", "short_scratch" or "default_scale".
    - ``effect``: "rejected" (the kernel raises), "silent" (it runs, but its output is not what was asked
      for) or "harmless" (the kernel converts the argument).
    - ``kernel``: the kernel whose contract is violated; "" for rows that no kernel writes.
    - ``tensor``: the tensor at fault; "kv_cache" is the key and value cache. ``parameter``: the number,
      size or setting at fault. One of the two is given.
    - ``sequence``, ``position``, ``block``, ``slot``: the first place in the cache.
    - ``value``: what the call has; ``required``: what the contract requires, or what the kernel reads or
      uses instead.
    """

    _more = ("text",)

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
    "unsupported": lambda v: f"{v.subject} is {v.value}; {v.kernel} supports {v.required}",
    "key_layout": lambda v: (
        f"key_cache has x = {v.value}; {v.kernel} assumes x = {v.required} and reads other elements"
    ),
    "short_scratch": lambda v: (
        f"max_seq_len gives {v.kernel} scratch for {v.value} partitions of {PARTITION_SIZE} tokens; "
        f"sequence {v.sequence} needs {v.required}, so heads read each other's scratch"
    ),
    "default_scale": lambda v: (
        f"sm_scale is not passed; {v.kernel} uses 1 / sqrt({v.value}), by the number of heads, "
        f"instead of 1 / sqrt({v.required}), by the head size"
    ),
    "unwritten_rows": _unwritten_rows,
    "unwritten_slot": _slot,
    "foreign_slot": _slot,
}


_EFFECTS = {
    "accept": "harmless",
    "convert": "harmless",
    "reject": "rejected",
    "reinterpret": "silent",
}
_ORDER = ("rejected", "silent", "harmless")


def find_violations(
    call: KernelCall, target: Target, kernels: Sequence[str], provenance: Provenance | None = None
) -> Violations:
    """Return every violation of the call: rejections first, then silent ones, then harmless ones.

    ``kernels`` are those that the op runs (:func:`attnlab.contracts.dispatch.decide`). Without
    ``provenance``, as for a captured call, slots are not checked.
    """
    contracts = contracts_of(kernels, target, call.op)
    found = [one for contract in contracts for one in _of_contract(contract, call)]
    found += [*_default_scale(call, target), *_rows(contracts, call)]
    if provenance is not None:
        for reads in contract_reads(contracts, call, provenance, all_own=False):
            found += _slots(reads)
    return Violations(sorted(found, key=lambda violation: _ORDER.index(violation.effect)))


def _of_contract(contract: Contract, call: KernelCall) -> Iterator[Violation]:
    """Yield the violations of one kernel's contract by a call's arguments."""
    yield from _index_dtypes(contract, call)
    refused = partial(Violation, kind="unsupported", effect="rejected", kernel=contract.name)
    for name, value, allowed in _unsupported(contract, call):
        yield refused(parameter=name, value=value, required=allowed)
    if call.sinks is not None:
        if contract.sinks == "none":
            yield refused(tensor="sinks", value="given", required="none")
        elif contract.sinks == "without alibi" and call.alibi_slopes is not None:
            yield refused(
                tensor="sinks", value="given with alibi_slopes", required="one of the two"
            )
        elif contract.sink_dtypes and (dtype := _dtype(call.sinks)) not in contract.sink_dtypes:
            required = ", ".join(contract.sink_dtypes)
            yield refused(tensor="sinks", dtype=dtype, value=dtype, required=required)
    silent = partial(Violation, effect="silent", kernel=contract.name)
    x, bytes_ = call.key_cache.shape[4], call.key_cache.element_size()
    if contract.key_x_bytes and x * bytes_ != contract.key_x_bytes:
        own_x = contract.key_x_bytes // bytes_
        yield silent(kind="key_layout", tensor="key_cache", value=x, required=own_x)
    if contract.name == ROCM_DECODE:  # value and required are numbers of partitions
        lens = cached_lens(contract, call)
        partitions, needed = (-(-int(n) // PARTITION_SIZE) for n in (call.max_seq_len, lens.max()))
        if needed > partitions:
            yield silent(
                kind="short_scratch",
                parameter="max_seq_len",
                sequence=int(lens.argmax()),
                value=partitions,
                required=needed,
            )


def _index_dtypes(contract: Contract, call: KernelCall) -> Iterator[Violation]:
    """Yield a violation for each int64 index tensor that the kernel does not read as int64."""
    for name in ("block_table", "seq_lens", "query_start_loc"):
        reaction = contract.on_int64.get(name, "accept")
        tensor: torch.Tensor = getattr(call, name)
        if tensor.dtype != torch.int64 or reaction == "accept":
            continue
        value = required = None
        if reaction == "reinterpret":
            value = tuple(tensor.flatten()[:3].tolist())
            required = tuple(tensor.contiguous().view(torch.int32).flatten()[:6].tolist())
        yield Violation(
            kind="index_dtype",
            effect=_EFFECTS[reaction],
            kernel=contract.name,
            tensor=name,
            dtype=_dtype(tensor),
            value=value,
            required=required,
        )


def _unsupported(contract: Contract, call: KernelCall) -> Iterator[tuple[str, object, str]]:
    """Yield each size, dtype or option that the kernel does not support, and what it supports."""
    limits: list[tuple[str, object, tuple[object, ...]]] = [
        ("kv_cache_dtype", call.kv_cache_dtype, contract.kv_cache_dtypes),
        ("dtype", _dtype(call.query), contract.dtypes),
        ("head_size", call.query.shape[2], contract.head_sizes),
        ("block_size", call.block_size, contract.block_sizes),
    ]
    for name, value, allowed in limits:
        if allowed and value not in allowed:
            yield name, value, ", ".join(map(str, allowed))
    if call.softcap is not None and contract.softcap == "none":
        yield "softcap", call.softcap, "none"
    if call.block_size % contract.block_size_multiple:
        yield "block_size", call.block_size, f"multiples of {contract.block_size_multiple}"


def _default_scale(call: KernelCall, target: Target) -> Iterator[Violation]:
    """Yield a violation if sm_scale is not passed and the op derives it from the number of heads."""
    _, num_heads, head_size = call.query.shape
    if call.sm_scale is None and default_scale(call, target) != 1.0 / math.sqrt(head_size):
        yield Violation(
            kind="default_scale",
            effect="silent",
            kernel=call.op,
            parameter="sm_scale",
            value=num_heads,
            required=head_size,
        )


def _rows(contracts: Iterable[Contract], call: KernelCall) -> Iterator[Violation]:
    """Yield one violation for each sequence with output rows that no kernel writes."""
    unwritten = unwritten_rows(contracts, call)
    starts = call.query_start_loc.tolist() if unwritten.any() else []
    for seq, (first, end) in enumerate(pairwise(starts)):
        rows = torch.nonzero(unwritten[first:end]).flatten() + first
        if len(rows):
            yield Violation(
                kind="unwritten_rows",
                effect="silent",
                kernel="",
                tensor="output",
                row=int(rows[0]),
                last_row=int(rows[-1]),
                sequence=seq,
                count=len(rows),
                value=end - first,
            )


def _slots(reads: ContractReads) -> Iterator[Violation]:
    """Yield up to two violations for a sequence: slots without a token, and with another token."""
    for kind, states in (("unwritten_slot", EMPTY), ("foreign_slot", FOREIGN)):
        # state 0 is OWN
        if bool(reads.states.any()) and len(wrong := reads.having(states)):
            i = int(wrong[0])
            yield Violation(
                kind=kind,
                effect="silent",
                kernel=reads.kernel,
                tensor="kv_cache",
                sequence=reads.seq,
                position=int(reads.positions[i]),
                block=int(reads.blocks[i]),
                slot=int(reads.slots[i]),
                count=len(wrong),
            )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
