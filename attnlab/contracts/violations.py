"""Violations: where a call and the contracts of the kernels that will take it disagree.

Nothing is run: everything here follows from the call, the contracts and the cache's provenance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from attnlab.case.shown import Shown
from attnlab.contracts.contract import (
    PARTITION_SIZE,
    Contract,
    cached_lens,
    contract,
    default_scale,
    unwritten_rows,
)
from attnlab.contracts.dispatch import ROCM_DECODE, Target
from attnlab.tensors.cache import NOBODY, Provenance
from attnlab.tensors.call import KernelCall

_EFFECTS = {
    "accept": "harmless",
    "convert": "harmless",
    "reject": "rejected",
    "reinterpret": "silent",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One disagreement between a call and a contract.

    - ``kind``: "index_dtype", "unsupported", "unwritten_slot", "foreign_slot", "unwritten_rows",
      "key_layout", "short_scratch" or "default_scale".
    - ``effect``: "rejected" (the kernel raises), "silent" (it runs, and what it writes, or leaves, is
      not what was asked for) or "harmless" (converted on the way).
    - ``kernel``: whose contract; "" where no kernel of the op does what was needed.
    - ``subject``: the tensor, or the rows.
    - ``text``: what is the case, in one sentence, places included.
    """

    kind: str
    effect: str
    kernel: str
    subject: str
    text: str


class Violations(Shown, list[Violation]):
    """A list of violations, which shows itself as a table."""

    __slots__ = ()


def find_violations(
    call: KernelCall, target: Target, kernels: Sequence[str], provenance: Provenance | None = None
) -> Violations:
    """Return every violation of the call, in the order in which a person would want to know them.

    ``kernels`` are those that the op runs (:func:`attnlab.contracts.dispatch.decide`). Without ``provenance``,
    as for a call that was captured elsewhere, nothing is said of who wrote which slot.
    """
    contracts = [contract(name, target, call.op) for name in kernels]
    violations: list[Violation] = []
    for terms in contracts:
        violations += _index_dtypes(terms, call)
        violations += _unsupported(terms, call)
        violations += _layout(terms, call)
    violations += _default_scale(call, target) + _unwritten_rows(contracts, call)
    if provenance is not None:
        for terms in contracts:
            violations += _slots(terms, call, provenance)
    order = ("rejected", "silent", "harmless")
    return Violations(sorted(violations, key=lambda violation: order.index(violation.effect)))


def _index_dtypes(terms: Contract, call: KernelCall) -> list[Violation]:
    """Return a violation for each int64 index tensor that the kernel does not read as such."""
    words = {
        "reject": "rejects it: expected scalar type Int but found Long",
        "convert": "converts it to int32",
        "reinterpret": "reads its bytes as int32 without a check: ",
    }
    found = []
    for name in ("block_table", "seq_lens", "query_start_loc"):
        reaction = terms.on_int64.get(name, "accept")
        tensor: torch.Tensor = getattr(call, name)
        if tensor.dtype != torch.int64 or reaction == "accept":
            continue
        text = f"{name} is int64; {terms.name} {words[reaction]}"
        if reaction == "reinterpret":
            seen = tensor.contiguous().view(torch.int32).flatten()[:6].tolist()
            text += f"{', '.join(map(str, tensor.flatten()[:3].tolist()))}, … becomes "
            text += f"{', '.join(map(str, seen))}, …"
        found.append(
            Violation(
                kind="index_dtype",
                effect=_EFFECTS[reaction],
                kernel=terms.name,
                subject=name,
                text=text,
            )
        )
    return found


def _unsupported(terms: Contract, call: KernelCall) -> list[Violation]:
    """Return a violation for each size or dtype that the kernel does not take."""
    asked: list[tuple[str, object, tuple[object, ...]]] = [
        ("kv_cache_dtype", call.kv_cache_dtype, terms.kv_cache_dtypes),
        ("dtype", str(call.query.dtype).removeprefix("torch."), terms.dtypes),
        ("head_size", call.query.shape[2], terms.head_sizes),
        ("block_size", call.block_size, terms.block_sizes),
    ]
    found = [
        (name, value, ", ".join(map(str, allowed)))
        for name, value, allowed in asked
        if allowed and value not in allowed
    ]
    if call.softcap is not None and terms.softcap == "none":
        found.append(("softcap", call.softcap, "none"))
    if call.sinks is not None:
        found += _sinks(terms, call, call.sinks)
    if call.block_size % terms.block_size_multiple:
        found.append(("block_size", call.block_size, f"multiples of {terms.block_size_multiple}"))
    return [
        Violation(
            kind="unsupported",
            effect="rejected",
            kernel=terms.name,
            subject=name,
            text=f"{name} is {value}; {terms.name} takes {takes}",
        )
        for name, value, takes in found
    ]


def _sinks(terms: Contract, call: KernelCall, sinks: torch.Tensor) -> list[tuple[str, object, str]]:
    """Return what the kernel does not take of a call's attention sinks: subject, value, what it takes."""
    dtype = str(sinks.dtype).removeprefix("torch.")
    if terms.sinks == "none":
        return [("sinks", "given", "none")]
    if terms.sinks == "without alibi" and call.alibi_slopes is not None:
        return [("sinks", "given beside alibi_slopes", "one of the two")]
    if terms.sink_dtypes and dtype not in terms.sink_dtypes:
        return [("sinks", dtype, ", ".join(terms.sink_dtypes))]
    return []


def _layout(terms: Contract, call: KernelCall) -> list[Violation]:
    """Return the violations of what the ROCm kernel takes for granted: x, and max_seq_len."""
    found = []
    x = call.key_cache.shape[4]
    if terms.key_x_bytes and x * call.key_cache.element_size() != terms.key_x_bytes:
        found.append(
            Violation(
                kind="key_layout",
                effect="silent",
                kernel=terms.name,
                subject="key_cache",
                text=f"key_cache has x = {x}; {terms.name} takes it for "
                f"{terms.key_x_bytes // call.key_cache.element_size()} and reads other elements",
            )
        )
    if terms.name == ROCM_DECODE:
        partitions = -(-call.max_seq_len // PARTITION_SIZE)
        lens = cached_lens(terms, call)
        needed = -(-int(lens.max()) // PARTITION_SIZE)
        if needed > partitions:
            found.append(
                Violation(
                    kind="short_scratch",
                    effect="silent",
                    kernel=terms.name,
                    subject="max_seq_len",
                    text=f"max_seq_len is {call.max_seq_len}, room for {partitions} partitions; "
                    f"sequence {int(lens.argmax())} needs {needed}, so heads read each other's",
                )
            )
    return found


def _default_scale(call: KernelCall, target: Target) -> list[Violation]:
    """Return a violation where the scale is left to an op that takes it from the number of heads."""
    _, num_heads, head_size = call.query.shape
    if call.sm_scale is not None or default_scale(call, target) == 1.0 / math.sqrt(head_size):
        return []
    return [
        Violation(
            kind="default_scale",
            effect="silent",
            kernel=call.op,
            subject="sm_scale",
            text=f"sm_scale is left to {call.op}, which takes 1 / sqrt({num_heads}), by the number of "
            f"heads, for 1 / sqrt({head_size}), by the head size",
        )
    ]


def _unwritten_rows(contracts: list[Contract], call: KernelCall) -> list[Violation]:
    """Return one violation for each run of output rows that none of the kernels writes."""
    unwritten = unwritten_rows(contracts, call)
    starts = call.query_start_loc.tolist()
    found = []
    for seq, (first, last) in enumerate(pairwise(starts)):
        rows = torch.nonzero(unwritten[first:last]).flatten() + first
        if len(rows) == 0:
            continue
        span = f"row {int(rows[0])}" if len(rows) == 1 else f"rows {int(rows[0])}–{int(rows[-1])}"
        found.append(
            Violation(
                kind="unwritten_rows",
                effect="silent",
                kernel="",
                subject="output",
                text=f"{span} of output (sequence {seq}, query_len {last - first}) is written by "
                f"nobody and keeps what the buffer held",
            )
        )
    return found


def _slots(terms: Contract, call: KernelCall, provenance: Provenance) -> list[Violation]:
    """Return a violation for each sequence of which the kernel needs slots that lack its token; what lies
    before the window of its first new token it does not need."""
    found = []
    first_rows = (call.seq_lens.long() - call.query_lens).tolist()
    for seq, length in enumerate(cached_lens(terms, call).tolist()):
        begin = max(0, first_rows[seq] - call.sliding_window + 1) if call.sliding_window else 0
        length = min(length, call.block_table.shape[1] * call.block_size)
        positions = torch.arange(begin, max(begin, length))
        blocks = call.block_table[seq, positions // call.block_size].long()
        offsets = positions % call.block_size
        owner = provenance.seq[blocks, offsets]
        right = (owner == seq) & (provenance.pos[blocks, offsets] == positions)
        for kind, wrong in (
            ("unwritten_slot", owner == NOBODY),
            ("foreign_slot", ~right & (owner != NOBODY)),
        ):
            if not wrong.any():
                continue
            i = int(torch.nonzero(wrong)[0])
            more = int(wrong.sum()) - 1
            holds = "nobody wrote" if kind == "unwritten_slot" else "holds another token"
            found.append(
                Violation(
                    kind=kind,
                    effect="silent",
                    kernel=terms.name,
                    subject="key_cache, value_cache",
                    text=f"{terms.name} reads sequence {seq}, position {begin + i}: block {int(blocks[i])}, "
                    f"offset {int(offsets[i])}, which {holds}"
                    + (f" (and {more} more positions)" if more else ""),
                )
            )
    return found
