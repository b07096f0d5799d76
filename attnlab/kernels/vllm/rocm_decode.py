"""What replaces ``ops.paged_attention_rocm`` in vLLM's Python code."""

import dataclasses
from typing import Any

import torch

from attnlab.contracts.target import Target
from attnlab.kernels.model.rocm_decode import paged_attention_rocm
from attnlab.kernels.rocm import backend as rocm_source
from attnlab.kernels.vllm.source import Source
from attnlab.tensors.call import KernelCall


def rocm_decode(
    call: KernelCall,
    target: Target,
    source: Source,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Replace ``ops.paged_attention_rocm``: call its source, or the lab's model of it.

    The names of its first parameters are the same since vLLM 0.9: out, exp_sum, max_logits, tmp_out, query,
    key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, query_start_loc, block_size,
    max_seq_len, alibi_slopes, kv_cache_dtype, … (vllm/_custom_ops.py).
    """
    first = ("out", "exp_sum", "max_logits", "tmp_out", "query", "key_cache", "value_cache")
    rest = ("num_kv_heads", "scale", "block_tables", "seq_lens", "query_start_loc", "block_size")
    last = ("max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale")
    given = {**dict(zip(first + rest + last, args, strict=False)), **kwargs}
    tensors = {
        name: given[name].cpu()
        for name in ("query", "key_cache", "value_cache", "seq_lens", "query_start_loc")
    }
    if "fp8" in given["kv_cache_dtype"]:
        tensors |= {name: tensors[name].view(torch.uint8) for name in ("key_cache", "value_cache")}
    slopes = given["alibi_slopes"]
    translated = dataclasses.replace(
        call,
        **tensors,
        output=given["out"].cpu(),
        block_table=given["block_tables"].cpu(),
        alibi_slopes=None if slopes is None else slopes.cpu(),
        key=call.key.cpu(),
        value=call.value.cpu(),
        max_seq_len=given["max_seq_len"],
        kv_cache_dtype=given["kv_cache_dtype"],
        k_scale=float(given["k_scale"]),
        v_scale=float(given["v_scale"]),
        sm_scale=given["scale"],
    )
    if rocm_source.emulates(source, target.platform):
        rocm_source.run(translated, target, source)
    else:
        paged_attention_rocm(translated, target)
    given["out"].copy_(translated.output)
