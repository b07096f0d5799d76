"""Sheets of tensors: Batch, Provenance, PagedCache and KernelCall."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab.show.sheets.sheet import Bar, Facts, Grid, Row, Sheet, Words

if TYPE_CHECKING:
    import torch

    from attnlab.tensors.batch import Batch
    from attnlab.tensors.cache import PagedCache, Provenance
    from attnlab.tensors.call import KernelCall

_MOST_ELEMENTS = 16  # of an index tensor that are written out
_MOST_WITH_NAN = 1 << 24  # elements of a tensor with NaN whose range is computed
_NONE_TEXT = {
    "sm_scale": "None: the op's default",
    "alibi_slopes": "None: no ALiBi",
    "sinks": "None: no sinks",
    "softcap": "None: no soft cap",
    "output": "None: not recorded",
}
_RARE = (
    "before",
    "slot_mapping",
    "lse",
    "q_scale",
    "output_scale",
    "block_ids",
    "unmodelled",
    "unknown_arguments",
    "read_as",
)  # shown if given


def batch(one: "Batch") -> Sheet:
    """Return the lengths and the tensors of a batch."""
    lens = one.lengths
    heads, kv_heads = one.query.shape[1], one.key.shape[1]
    text = (
        f"{len(lens.query_lens)} sequences, {lens.num_tokens} new tokens, {sum(lens.ctx_lens)} tokens of "
        f"context; {heads} heads of {one.query.shape[2]}, {heads // kv_heads} per KV head, "
        f"{_dtype(one.query)}"
    )
    return Sheet(
        kind="Batch",
        line=f"<Batch: {text}>",
        head=text,
        parts=[lengths_grid(lens.query_lens, lens.ctx_lens), _tensors(one)],
    )


def lengths_grid(query_lens: Sequence[int], ctx_lens: Sequence[int]) -> Grid:
    """Return a row for each sequence, with a bar of its context and its new tokens."""
    longest = max(q + c for q, c in zip(query_lens, ctx_lens, strict=True))
    rows: list[Row] = [
        [i, c, q, q + c, Bar(c, q, longest, f"{c} tokens of context, {q} new")]
        for i, (q, c) in enumerate(zip(query_lens, ctx_lens, strict=True))
    ]
    return Grid(["sequence", "ctx_len", "query_len", "seq_len", "context, then new tokens"], rows)


def provenance(one: "Provenance") -> Sheet:
    """Return how many slots are written, and by which sequence."""
    written = int((one.seq >= 0).sum())
    text = f"{written} of {one.seq.numel()} slots written, {len(one.block_table)} sequences"
    return Sheet(
        kind="Provenance",
        line=f"<Provenance: {text}>",
        head=text,
        parts=[_owners(one), _tensors(one)],
    )


def cache(one: "PagedCache") -> Sheet:
    """Return a cache's layout, format and scales, and how many slots each sequence wrote."""
    num_blocks, kv_heads, _, block_size, x = one.key.shape
    written = int((one.provenance.seq >= 0).sum())
    text = (
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
        line=f"<PagedCache: {text}>",
        head=text,
        parts=[facts, _owners(one.provenance), _tensors(one)],
    )


def _owners(one: "Provenance") -> Grid:
    """Return a row for each sequence: its tokens in the cache, and their blocks."""
    block_size = one.seq.shape[1]
    counts = [int((one.seq == seq).sum()) for seq in range(len(one.block_table))]
    rows: list[Row] = []
    for seq, count in enumerate(counts):
        blocks = one.block_table[seq, : -(-count // block_size)].tolist()
        shown = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
        bar = Bar(count, 0, max(counts), f"{count} tokens in the cache")
        rows.append([seq, count, len(blocks), shown, bar])
    columns = ["sequence", "tokens in the cache", "blocks", "first blocks", "tokens"]
    return Grid(columns, rows)


def call(one: "KernelCall") -> Sheet:
    """Return a call's tensors, with dtypes and strides, and its other arguments."""
    text = (
        f"{one.op}: {len(one.seq_lens)} sequences, {one.query.shape[0]} new tokens, "
        f"{one.query.shape[1]} heads of {one.query.shape[2]}, {one.num_queries_per_kv} per KV head"
    )
    scalars = [
        (field.name, _scalar(field.name, getattr(one, field.name)))
        for field in dataclasses.fields(one)
        if field.name != "op"
        and not hasattr(getattr(one, field.name), "shape")
        and (field.name not in _RARE or getattr(one, field.name) not in (None, (), ""))
    ]
    return Sheet(
        kind="KernelCall",
        line=f"<KernelCall: {text}>",
        head=text,
        parts=[_tensors(one), Facts(scalars)],
    )


def _scalar(name: str, value: object) -> str:
    return _NONE_TEXT.get(name, "None") if value is None else str(value)


def _tensors(noun: Any) -> Grid:
    """Return a row for each tensor field of a noun: shape, dtype, strides and contents."""
    rows: list[Row] = []
    for field in dataclasses.fields(noun):
        tensor = getattr(noun, field.name)
        if hasattr(tensor, "stride"):
            strides = Words(", ".join(map(str, tensor.stride())), "quiet")
            shape = " × ".join(map(str, tensor.shape))
            rows.append([field.name, shape, _dtype(tensor), strides, contents(tensor)])
    return Grid(["tensor", "shape", "dtype", "strides", "contents"], rows)


def _dtype(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def contents(tensor: "torch.Tensor") -> str:
    """Return the numbers of a short one-dimensional tensor, or the range of any other."""
    if tensor.numel() == 0:
        return "no elements"
    if tensor.dim() == 1 and tensor.numel() <= _MOST_ELEMENTS:
        numbers = tensor.tolist()
        return ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers)
    if not tensor.is_floating_point():
        return f"{int(tensor.min())} to {int(tensor.max())}"
    if tensor.element_size() == 1:  # FP8 has no minimum in torch
        tensor = tensor.float()
    least, most = (float(value) for value in tensor.aminmax())
    if least == most == 0:
        return "zeros"
    if least == least:
        return f"{least:.3g} to {most:.3g}"
    return _contents_with_nan(tensor)


def _contents_with_nan(tensor: "torch.Tensor") -> str:
    if tensor.numel() > _MOST_WITH_NAN:
        return "NaN and other numbers"
    is_nan = tensor.isnan()
    if bool(is_nan.all()):
        return "NaN everywhere"
    numbers = tensor[~is_nan]
    return f"{float(numbers.min()):.3g} to {float(numbers.max()):.3g}; {int(is_nan.sum())} NaN"
