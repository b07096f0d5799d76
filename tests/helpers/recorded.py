"""A paged-attention op in Python, and modules with the signatures of FlashAttention and FlashInfer."""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KERNEL = '''
import torch

FACTOR = 1.0
REJECT = ""


def paged(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, scale=None, window=0):
    """Causal attention over a cache [num_blocks, block_size, num_kv_heads, head_size]."""
    if REJECT:
        raise ValueError(REJECT)
    starts, group = cu_seqlens_q.tolist(), q.shape[1] // k_cache.shape[2]
    for seq, length in enumerate(seq_lens.tolist()):
        rows, blocks = slice(starts[seq], starts[seq + 1]), block_table[seq].long()
        key, value = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        query = q[rows].double()
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or q.shape[2] ** -0.5) * FACTOR
        at = torch.arange(length - len(query), length)[:, None]
        hidden = torch.arange(length) > at
        if window:
            hidden |= torch.arange(length) <= at - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
'''


def write_module(folder: Path, name: str, text: str) -> None:
    """Write a module's file."""
    (folder / f"{name}.py").write_text(text)


def batch(num_blocks: int = 12) -> dict[str, torch.Tensor]:
    """Return arguments of ``paged``: a prefill of 5 and a decode; keys and values share their blocks."""
    torch.manual_seed(0)
    both = torch.randn(num_blocks, 2, 16, 2, 64).half()
    return {
        "q": torch.randn(6, 4, 64).half(),
        "k_cache": both[:, 0],
        "v_cache": both[:, 1],
        "block_table": torch.randperm(num_blocks)[:8].view(2, 4).int(),
        "seq_lens": torch.tensor([40, 33], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 5, 6], dtype=torch.int32),
        "out": torch.full((6, 4, 64), float("nan")).half(),
    }


_FLASH = (
    KERNEL
    + """

def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
    scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0,
    output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0,
):
    out = torch.empty_like(q)
    if block_table is None and cu_seqlens_k is None:
        return q
    if block_table is None:
        lens, longest = cu_seqlens_k.diff(), int(cu_seqlens_k.diff().max())
        table = cu_seqlens_k[:-1, None] + torch.arange(longest) % lens[:, None]
        paged(q, k[:, None], v[:, None], table, lens, cu_seqlens_q, out, softmax_scale)
        return out
    paged(q, k, v, block_table, seqused_k, cu_seqlens_q, out, softmax_scale, window_size[0] + 1)
    return (out, torch.zeros(q.shape[1], len(q))) if return_softmax_lse else out
"""
)
_TRTLLM = {
    "decode": (
        KERNEL
        + """

def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0,
    bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None,
    sinks=None, kv_layout="HND", enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0,
    mask=None, max_q_len=None, cum_seq_lens_q=None,
):
    key, value = kv_cache.unbind(1)
    if kv_layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    out = torch.empty_like(query)
    starts = torch.arange(len(query) + 1)
    paged(query, key, value, block_tables, seq_lens, starts, out, bmm1_scale)
    return out
"""
    ),
    "prefill": (
        KERNEL
        + """

def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale,
    bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None,
    o_sf_scale=None, o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None,
):
    key, value = kv_cache
    if kv_layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    out = torch.empty_like(query)
    paged(query, key, value, block_tables, seq_lens, cum_seq_lens_q, out, bmm1_scale)
    return out
"""
    ),
}


@contextlib.contextmanager
def module_of(name: str, text: str, run: Any) -> Iterator[types.ModuleType]:
    """Have a module of this text in sys.modules, with ``run`` that calls its op."""
    module = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(module))
    parents = [name.rsplit(".", n)[0] for n in range(name.count("."), 0, -1)]
    added = [parent for parent in parents if parent not in sys.modules]
    sys.modules.update({parent: types.ModuleType(parent) for parent in added})
    sys.modules[name] = module
    module.run = functools.partial(run, module)  # type: ignore[attr-defined]
    try:
        yield module
    finally:
        for one in (name, *added):
            del sys.modules[one]


def flash_attention_module(name: str) -> Any:
    """Have flash_attn_varlen_func with vllm_flash_attn's parameters (0.33.0); computes with a window."""

    def run(module: types.ModuleType, with_lse: bool = False, paged: bool = True) -> None:
        given = batch()
        starts, lens = given["cu_seqlens_q"], given["seq_lens"]
        module.flash_attn_varlen_func(
            *(given["q"], given["k_cache"], given["v_cache"], 5, starts, 40),
            seqused_k=lens,
            causal=True,
            window_size=(11, 0),
            block_table=given["block_table"] if paged else None,
            return_softmax_lse=with_lse,
        )

    return module_of(name, _FLASH, run)


def flashinfer_module(kind: str) -> Any:
    """Have a stateless call of FlashInfer's trtllm backend, ``kind`` "decode" or "prefill"."""

    def run(module: types.ModuleType, layout: str) -> None:
        given = batch()
        both = torch.stack([given["k_cache"], given["v_cache"]], 1)
        both = both.transpose(2, 3) if layout == "HND" else both
        work, table, lens = torch.zeros(1), given["block_table"], given["seq_lens"]
        if kind == "decode":
            arguments = (given["q"][:2], both, work, table, lens, 40, 0.125)
            module.trtllm_batch_decode_with_kv_cache(*arguments, kv_layout=layout)
            return
        lengths = (lens, 5, 40, 0.125, 1.0, 2, given["cu_seqlens_q"], lens)
        module.trtllm_batch_context_with_kv_cache(
            given["q"], both.unbind(1), work, table, *lengths, kv_layout=layout
        )

    return module_of(f"flashinfer.{kind}", _TRTLLM[kind], run)


# FlashInfer's wrappers, and ops with a query for each sequence, computed in torch. ``FAULT`` plants one.
_WRAPPER = (
    KERNEL
    + """
FAULT = False

class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self._kv_layout = kv_layout

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim_qk, page_size, causal=False, sm_scale=None, window_left=-1):
        counts = paged_kv_indptr.diff()
        table = torch.zeros(len(counts), int(counts.max())).int()
        for row, pages in zip(table, paged_kv_indices.split(counts.tolist())):
            row[: len(pages)] = pages
        self.given = table, (counts - 1) * page_size + paged_kv_last_page_len, qo_indptr, sm_scale

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None, return_lse=False):
        key, value = paged_kv_cache.unbind(1)
        table, lens, starts, scale = self.given
        out = torch.empty_like(q)
        paged(q, key, value, table.flip(1) if FAULT else table, lens, starts, out, scale)
        return out


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1)):
    out, starts = torch.empty_like(q).flatten(0, 1), torch.arange(len(q) + 1) * q.shape[1]
    lens = cache_seqlens - 1 if FAULT else cache_seqlens
    paged(q.flatten(0, 1), k_cache, v_cache, block_table, lens, starts, out, softmax_scale)
    return out.view_as(q)


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
                           num_splits, softmax_scale=None, causal=False):
    starts, out = torch.arange(len(q) + 1) * q.shape[1], torch.empty_like(q).flatten(0, 1)
    value = k_cache.flip(0) if FAULT else k_cache
    paged(q.flatten(0, 1), k_cache, value, block_table, cache_seqlens, starts, out, softmax_scale)
    out = out[..., :head_dim_v].view(*q.shape[:3], -1)
    return out, torch.zeros(len(q), q.shape[2], q.shape[1])


def trtllm_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,
                                          qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
                                          bmm1_scale=1.0, bmm2_scale=1.0):
    cache = kv_cache[:, :, None]
    return flash_mla_with_kvcache(
        query, cache, block_tables, seq_lens, kv_lora_rank, None, None, softmax_scale=bmm1_scale
    )[0]
"""
)


def planned_wrapper(fault: bool) -> Any:
    """Have FlashInfer's wrapper for prefills over pages; ``run`` plans and runs it."""

    def run(module: types.ModuleType) -> None:
        given = batch()
        module.FAULT = fault
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1))
        lens, size = given["seq_lens"], given["k_cache"].shape[1]
        counts = -(-lens // size)
        pages = [row[:n] for row, n in zip(given["block_table"], counts, strict=True)]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        last = lens - (counts - 1) * size
        cache = (given["cu_seqlens_q"], starts, torch.cat(pages), last)
        wrapper.plan(*cache, 4, 2, 64, size, causal=True, sm_scale=0.125)
        wrapper.run(given["q"], torch.stack([given["k_cache"], given["v_cache"]], 1))

    return module_of("flashinfer.prefill", _WRAPPER, run)


def decode_module(function: str, fault: bool) -> Any:
    """Have a call of decodes whose query has four dimensions, with a latent cache or a plain one."""
    module_name = {
        "flash_attn_with_kvcache": "flash_attn.flash_attn_interface",
        "flash_mla_with_kvcache": "flash_mla.flash_mla_interface",
        "trtllm_batch_decode_with_kv_cache_mla": "flashinfer.mla",
    }[function]

    def run(module: types.ModuleType) -> None:
        given = batch()
        module.FAULT = fault
        query, key = given["q"][:2, None], given["k_cache"]
        table, lens = given["block_table"], given["seq_lens"]
        if "mla" in function:
            key = key[:, :, :1].contiguous()
        if function.startswith("trtllm"):
            sizes = (32, 32, 32)
            module.trtllm_batch_decode_with_kv_cache_mla(
                query, key[:, :, 0], torch.zeros(1), *sizes, table, lens, 64, bmm1_scale=0.125
            )
            return
        options = {"softmax_scale": 0.125, "causal": True}
        if "mla" in function:
            module.flash_mla_with_kvcache(query, key, table, lens, 32, None, None, **options)
            return
        module.flash_attn_with_kvcache(
            query, key, given["v_cache"], cache_seqlens=lens, block_table=table, **options
        )

    return module_of(module_name, _WRAPPER, run)
