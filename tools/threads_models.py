"""Calls of closed kernels, computed in torch with what a thread says is wrong: for tools/threads.py.

Each function of :data:`MODELS` makes the call of a library through a module with its signature, under
``attnlab.capture()``. With ``fault`` it computes what the thread describes, else what is right.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import attnlab
from attnlab.tensors.call import KernelCall

_BLOCK, _HEADS, _KV_HEADS, _SIZE = 16, 8, 2, 64


def _attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    lens: torch.Tensor,
    rows_of: Callable[[int], slice],
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention; keys and values have a table each, [num_seqs, pages]."""
    for seq, length in enumerate(lens.tolist()):
        rows = rows_of(seq)
        key, value = (
            cache[table[seq].long()].transpose(1, 2).flatten(0, 1)[:length].double()
            for cache, table in zip(caches, tables, strict=True)
        )
        key, value = (one.repeat_interleave(_HEADS // _KV_HEADS, 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key) * scale
        count = scores.shape[1]
        seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


def _decode_module(rows_with: Any, values_with: Any) -> Any:
    """Return flashinfer.decode with a function of the signature of its trtllm backend."""

    def trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
        bmm2_scale=1.0, window_left=-1, out=None, kv_layout="HND", q_len_per_req=1,
    ):  # fmt: skip
        tables = block_tables, values_with(block_tables)
        rows = rows_with(q_len_per_req, len(query))
        caches = kv_cache.unbind(1)
        out = torch.zeros_like(query)
        return _attend(query, caches, tables, seq_lens, rows, out, bmm1_scale)

    module = types.ModuleType("flashinfer.decode")
    trtllm_batch_decode_with_kv_cache.__module__ = module.__name__
    vars(module)["trtllm_batch_decode_with_kv_cache"] = trtllm_batch_decode_with_kv_cache
    return module


def _packed(count: int, total: int) -> Callable[[int], slice]:
    return lambda seq: slice(seq * count, (seq + 1) * count)


def _decode(rows_with: Any, values_with: Any, count: int) -> KernelCall:
    torch.manual_seed(0)
    lens = torch.tensor([100, 70, 130], dtype=torch.int32)
    table = torch.randperm(40)[:27].view(3, 9).int()
    cache = torch.randn(40, 2, _KV_HEADS, _BLOCK, _SIZE).half()
    query = torch.randn(3 * count, _HEADS, _SIZE).half()
    names = ("flashinfer", "flashinfer.decode")
    sys.modules.update(
        {names[0]: types.ModuleType(names[0]), names[1]: _decode_module(rows_with, values_with)}
    )
    try:
        with attnlab.capture() as calls:
            sys.modules[names[1]].trtllm_batch_decode_with_kv_cache(
                query,
                cache,
                torch.zeros(1),
                table,
                lens,
                144,
                bmm1_scale=0.125,
                q_len_per_req=count,
            )
        return calls[-1]
    finally:
        for name in names:
            del sys.modules[name]


def rows_of_later_requests(fault: bool) -> KernelCall:
    """Rows of requests after the first are taken and written with the offset of 8 rows per request."""

    def padded(count: int, total: int) -> Callable[[int], slice]:
        return lambda seq: slice(min(seq * 8, total), min(seq * 8 + count, total))

    return _decode(padded if fault else _packed, lambda table: table, 6)


def pages_of_values(fault: bool) -> KernelCall:
    """The pages of every second tile of 32 values are those of the tile after the next."""

    def advanced(table: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(table.shape[1])
        later = (columns + 2 * (columns // 2 % 2)).clamp(max=table.shape[1] - 1)
        return table[:, later]

    return _decode(_packed, advanced if fault else lambda table: table, 1)


def later_rows_unwritten(fault: bool) -> KernelCall:
    """Of several rows over a long context, only the first is written; the others hold NaN."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 64).half()
    key, value = torch.randn(2, 2, 4, 90, 64).half()
    original = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ):
        out = original(query, key, value, attn_mask, dropout_p, is_causal)
        if fault:
            out[:, :, 1:] = torch.nan
        return out

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        with attnlab.capture() as calls:
            torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return calls[-1]
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


def _flex(computed: Callable[..., torch.Tensor], scale: float) -> KernelCall:
    """Make a call of flex_attention with a mask that differs between batch elements."""
    from torch.nn.attention import flex_attention as module

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 40, 32).half() * scale for _ in range(3))
    ends = torch.tensor([40, 23])

    def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (column <= row) & (column < ends[batch])

    mask = module.create_block_mask(visible, 2, None, 40, 40, device="cpu")
    original = module.flex_attention

    def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None):
        seen = (torch.arange(40) <= torch.arange(40)[:, None]) & (
            torch.arange(40) < ends[:, None, None]
        )
        return computed(query, key, value, seen[:, None])

    module.flex_attention = flex_attention
    try:
        with attnlab.capture() as calls:
            module.flex_attention(query, key, value, block_mask=mask)
        return calls[-1]
    finally:
        module.flex_attention = original


def _dense(query: Any, key: Any, value: Any, seen: Any, dtype: torch.dtype) -> torch.Tensor:
    scores = (query.double() @ key.double().mT * query.shape[-1] ** -0.5).to(dtype).double()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.double()).to(query.dtype)


def scores_in_half(fault: bool) -> KernelCall:
    """Scores are rounded to the query's dtype."""
    dtype = torch.float16 if fault else torch.float64
    return _flex(lambda *tensors: _dense(*tensors, dtype), 4.0)


def nan_of_later_batches(fault: bool) -> KernelCall:
    """Batch elements after the first, whose mask differs, are NaN."""

    def computed(*tensors: torch.Tensor) -> torch.Tensor:
        out = _dense(*tensors, torch.float64)
        if fault:
            out[1:] = torch.nan
        return out

    return _flex(computed, 1.0)


MODELS = {
    one.__name__: one
    for one in (
        rows_of_later_requests,
        pages_of_values,
        later_rows_unwritten,
        scores_in_half,
        nan_of_later_batches,
    )
}


def make(name: str, fault: bool) -> KernelCall:
    """Return the call of a model, with or without its fault."""
    return MODELS[name](fault)
