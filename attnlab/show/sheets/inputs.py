"""Sheets of what is fed to a kernel: Case, Batch, PagedCache, KernelCall, Decision and Contract."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab.show.sheets.sheet import Bar, Facts, Folded, Grid, Lines, Part, Row, Sheet, Tone, Words
from attnlab.show.terminal import describe

if TYPE_CHECKING:
    import torch

    from attnlab.case.case import Case
    from attnlab.contracts.contract import Contract
    from attnlab.contracts.dispatch import Decision
    from attnlab.tensors.batch import Batch
    from attnlab.tensors.cache import PagedCache, Provenance
    from attnlab.tensors.call import KernelCall

_FEW = 16  # elements of an index tensor that are written out
_NAN_LOOKED_AT = 1 << 24  # elements of a tensor with NaN whose other elements are looked at, too


def case(one: "Case") -> Sheet:
    """Return what differs from the defaults, the command line, and every knob, folded."""
    changes = one.changes()
    changed = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    parts: list[Part] = [Facts([(name, _knob(value)) for name, value in changes.items()])]
    if not changes:
        parts = [Lines([Words("every knob has its default", "quiet")])]
    return Sheet(
        kind="Case",
        line=f"Case({changed})",
        head=describe(one),
        parts=[
            *parts,
            Lines([Words(one.to_cli(), code=True)]),
            Folded("lengths", [lengths_grid(one.lengths.query_lens, one.lengths.ctx_lens)]),
            Folded("every knob", [_knobs(one)]),
        ],
    )


def _knobs(one: "Case") -> Grid:
    rows: list[Row] = []
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        tone: Tone = "warn" if value != field.default else ""
        meaning = Words(field.metadata["help"], "quiet")
        rows.append([field.name, Words(_knob(value), tone), meaning])
    return Grid(["knob", "value", "is"], rows, most=len(rows))


def _knob(value: object) -> str:
    """Return a knob's value, a long list of numbers cut."""
    if isinstance(value, tuple) and len(value) > _FEW:
        return f"{', '.join(map(str, value[:_FEW]))}, … ({len(value)} in all)"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def batch(one: "Batch") -> Sheet:
    """Return the lengths and the tensors of a batch."""
    lens = one.lengths
    heads, kv_heads = one.query.shape[1], one.key.shape[1]
    told = (
        f"{len(lens.query_lens)} sequences, {lens.num_tokens} new tokens on {sum(lens.ctx_lens)} of "
        f"context; {heads} heads of {one.query.shape[2]}, {heads // kv_heads} a KV head, "
        f"{_dtype(one.query)}"
    )
    return Sheet(
        kind="Batch",
        line=f"<Batch: {told}>",
        head=told,
        parts=[lengths_grid(lens.query_lens, lens.ctx_lens), _tensors(one)],
    )


def lengths_grid(query_lens: Sequence[int], ctx_lens: Sequence[int]) -> Grid:
    """Return a row for each sequence, with a bar of its context and its new tokens."""
    longest = max(q + c for q, c in zip(query_lens, ctx_lens, strict=True))
    rows: list[Row] = [
        [i, c, q, q + c, Bar(c, q, longest, f"{c} tokens of context, {q} new")]
        for i, (q, c) in enumerate(zip(query_lens, ctx_lens, strict=True))
    ]
    return Grid(["sequence", "context", "new", "seq_len", "context, then new"], rows)


def provenance(one: "Provenance") -> Sheet:
    """Return how many slots are written, and by whom."""
    written = int((one.seq >= 0).sum())
    told = f"{written} of {one.seq.numel()} slots written, {len(one.block_table)} sequences"
    return Sheet(
        kind="Provenance",
        line=f"<Provenance: {told}>",
        head=told,
        parts=[_owners(one), _tensors(one)],
    )


def cache(one: "PagedCache") -> Sheet:
    """Return a cache's layout, format and scales, and who wrote how much of it."""
    num_blocks, kv_heads, _, block_size, x = one.key.shape
    written = int((one.provenance.seq >= 0).sum())
    told = (
        f"{num_blocks} blocks of {block_size} tokens, {kv_heads} KV heads of {one.value.shape[2]}, "
        f"x = {x}, {one.format.name}; {written} of {num_blocks * block_size} slots written"
    )
    size = sum(t.numel() * t.element_size() for t in (one.key, one.value))
    facts = Facts(
        [
            ("scales", f"k_scale {one.k_scale:g}, v_scale {one.v_scale:g}"),
            ("memory", f"{size / 1e6:.3g} MB"),
        ]
    )
    return Sheet(
        kind="PagedCache",
        line=f"<PagedCache: {told}>",
        head=told,
        parts=[facts, _owners(one.provenance), _tensors(one)],
    )


def _owners(one: "Provenance") -> Grid:
    """Return a row for each sequence: how many tokens the cache holds of it, and in which blocks."""
    block_size = one.seq.shape[1]
    counts = [int((one.seq == seq).sum()) for seq in range(len(one.block_table))]
    rows: list[Row] = []
    for seq, count in enumerate(counts):
        blocks = one.block_table[seq, : -(-count // block_size)].tolist()
        shown = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
        bar = Bar(count, 0, max(counts), f"{count} tokens in the cache")
        rows.append([seq, count, len(blocks), shown, bar])
    return Grid(["sequence", "tokens in the cache", "blocks", "the first", ""], rows)


def call(one: "KernelCall") -> Sheet:
    """Return a call's tensors, with dtypes and strides, and its other arguments."""
    told = (
        f"{one.op}: {len(one.seq_lens)} sequences, {one.query.shape[0]} new tokens, "
        f"{one.query.shape[1]} heads of {one.query.shape[2]}, {one.num_queries_per_kv} a KV head"
    )
    scalars = [
        (field.name, _scalar(field.name, getattr(one, field.name)))
        for field in dataclasses.fields(one)
        if field.name != "op" and not hasattr(getattr(one, field.name), "shape")
    ]
    return Sheet(
        kind="KernelCall",
        line=f"<KernelCall: {told}>",
        head=told,
        parts=[_tensors(one), Facts(scalars)],
    )


def _scalar(name: str, value: object) -> str:
    left = {"sm_scale": "None: left to the op", "alibi_slopes": "None: no ALiBi"}
    left |= {"sinks": "None: no sinks", "softcap": "None: no soft cap"}
    return left.get(name, "None") if value is None else str(value)


def _tensors(noun: Any) -> Grid:
    """Return a row for each tensor field of a noun: shape, dtype, strides, and what is in it."""
    rows: list[Row] = []
    for field in dataclasses.fields(noun):
        tensor = getattr(noun, field.name)
        if hasattr(tensor, "stride"):
            strides = Words(", ".join(map(str, tensor.stride())), "quiet")
            shape = " × ".join(map(str, tensor.shape))
            rows.append([field.name, shape, _dtype(tensor), strides, contents(tensor)])
    return Grid(["tensor", "shape", "dtype", "strides", "holds"], rows)


def _dtype(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def contents(tensor: "torch.Tensor") -> str:
    """Return a short one-dimensional tensor's numbers, or the range of any other's."""
    if tensor.numel() == 0:
        return "nothing"
    if tensor.dim() == 1 and tensor.numel() <= _FEW:
        numbers = tensor.tolist()
        return ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers)
    if not tensor.is_floating_point():
        return f"{int(tensor.min())} to {int(tensor.max())}"
    least, most = (float(value) for value in tensor.aminmax())
    if least == most == 0:
        return "zeros"
    if least == least:
        return f"{least:.3g} to {most:.3g}"
    return _beside_nan(tensor)


def _beside_nan(tensor: "torch.Tensor") -> str:
    if tensor.numel() > _NAN_LOOKED_AT:
        return "NaN among others"
    there = tensor.isnan()
    if bool(there.all()):
        return "NaN everywhere"
    numbers = tensor[~there]
    return f"{float(numbers.min()):.3g} to {float(numbers.max()):.3g}; {int(there.sum())} NaN"


def decision(one: "Decision") -> Sheet:
    """Return which kernels run, and the predicate term by term."""
    told = f"{', then '.join(one.kernels)} on {one.platform}"
    rows: list[Row] = [
        [
            Words("yes", "good") if term.holds else Words("no", "bad"),
            term.name,
            term.value,
            term.allowed,
        ]
        for term in one.terms
    ]
    columns = ["", "term", "is", "allowed for the ROCm kernel"]
    reasons = [Words(reason) for reason in one.reasons]
    return Sheet(
        kind="Decision",
        line=f"<Decision: {told}>",
        head=told,
        parts=[
            *([Grid(columns, rows, most=len(rows))] if rows else []),
            Lines([*reasons, Words(one.source, "quiet")]),
        ],
    )


def contract(one: "Contract") -> Sheet:
    """Return the terms of a contract, empty ones left out."""
    fields = [f.name for f in dataclasses.fields(one) if f.name not in ("name", "source")]
    terms = {name: getattr(one, name) for name in fields}
    rows = [(name, _term(term)) for name, term in terms.items() if term not in (None, (), {})]
    return Sheet(
        kind="Contract",
        line=f"<Contract: {one.name}, {one.source}>",
        head=one.name,
        parts=[Facts(rows), Lines([Words(one.source, "quiet")])],
    )


def _term(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {what}" for name, what in value.items())
    return _knob(value)
