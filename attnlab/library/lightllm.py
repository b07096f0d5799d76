"""LightLLM's Triton attention, read from a checkout; run with fc72ffa of 2025-07-11."""

from dataclasses import replace
from functools import partial
from typing import Any

from attnlab.library.op import Op, Package


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops ask of the machine that they run on."""
    return {"lightllm.utils.device_utils": {"is_tesla": lambda: False}}


PACKAGE = Package(
    name="lightllm",
    title="LightLLM",
    distributions=("lightllm",),
    # Models have ops of the same name, so that a module is a path from the first folder.
    folders=(
        "lightllm/models",
        *(f"lightllm/models/{one}/triton_kernel" for one in ("llama", "phi3", "mistral", "bloom")),
    ),
    stubs=_stubs,
)
_INDICES = ("b_req_idx", "b_start_loc", "b_seq_len", "b_prompt_cache_len", "b_ready_cache_len")
_TABLES = ("req_to_token_indexs", "req_to_tokens")
_op = partial(
    Op,
    library="lightllm",
    index_dtypes=dict.fromkeys((*_INDICES, *_TABLES), ("int32",)),
    kv_cache_dtypes=("auto",),
    frees_blocks=False,
)

# A request has a row of slots, and a batch the numbers of its rows.
_TABLE = "request_table"
_REQUESTS = {"b_req_idx": "request_index", "b_seq_len": "seq_lens"}
_CACHE = {"k": "flash_key_cache.flatten(0, 1)", "v": "flash_value_cache.flatten(0, 1)"}
_ALL = dict.fromkeys("qkvo", 3)  # the kernels use all strides
_PREFILL = {
    **{"q": "query", "o": "output", "b_start_loc": "query_start_loc[:-1]"},
    "max_input_len": "max_query_len",
}
_CONTEXT = {
    **_PREFILL,
    **_REQUESTS,
    **_CACHE,
    **{"b_prompt_cache_len": "context_lens", "req_to_token_indexs": _TABLE},
}
_SCALE: dict[str, Any] = {"default_scale": "head_size"}
_UP_TO_128, _UP_TO_256 = (16, 32, 64, 128), (16, 32, 64, 128, 256)
_QUERIES = "attention of new tokens to all tokens of their sequence"
_WHOLE = "attention of whole sequences to themselves without a cache"
_LLAMA, _PHI3, _MISTRAL, _BLOOM = (
    f"{model}/triton_kernel/context_flashattention_nopad"
    for model in ("llama", "phi3", "mistral", "bloom")
)

# The ops context_attention_fwd: new tokens, whose keys and values are in the cache, too.
_context = partial(_op, python_name="context_attention_fwd", arguments=_CONTEXT, strides=_ALL)
LLAMA_CONTEXT = _context(
    name="lightllm_llama_context",
    summary=f"{_QUERIES}, whose slots are a row of a table",
    module=_LLAMA,
    contract={**_SCALE, "head_sizes": _UP_TO_256},
)
PHI3_CONTEXT = _context(
    name="lightllm_phi3_context",
    summary=f"{_QUERIES}, whose slots are a row of a table, with any head size",
    module=_PHI3,
    contract=_SCALE,
)
# It has no groups of query heads, so that the cache has the KV head of each.
BLOOM_CONTEXT = _context(
    name="lightllm_bloom_context",
    summary=f"{_QUERIES}, whose slots are a row of a table, with ALiBi",
    module=_BLOOM,
    arguments={
        **_CONTEXT,
        "k": "flash_key_cache.repeat_interleave(heads // kv_heads, 2).flatten(0, 1)",
        "v": "flash_value_cache.repeat_interleave(heads // kv_heads, 2).flatten(0, 1)",
        "b_ready_cache_len": "context_lens",
        "alibi": "query.new_zeros(heads).float() if alibi_slopes is None else alibi_slopes",
    },
    contract={**_SCALE, "head_sizes": _UP_TO_128},
    copies_cache=True,
)
# Its name has int8, but its caller passes keys and values of 16 bits, sequence after sequence.
LLAMA_CONTEXT_INT8KV = _op(
    name="lightllm_llama_context_int8kv",
    summary=f"{_QUERIES}, which are in a tensor of sequences without pages",
    module=_LLAMA,
    python_name="context_attention_fwd_ppl_int8kv",
    arguments={
        **_PREFILL,
        "k": "flash_key_cache[block_table.long()].flatten(1, 2).transpose(1, 2)",
        "v": "flash_value_cache[block_table.long()].flatten(1, 2).transpose(1, 2)",
        **{"b_seq_len": "seq_lens", "b_prompt_cache_len": "context_lens"},
    },
    strides={**_ALL, "k": 4, "v": 4},
    contract={**_SCALE, "head_sizes": _UP_TO_256},
    copies_cache=True,
)

# Prefill without a prompt cache: keys and values are arguments.
LLAMA_PREFILL = _op(
    name="lightllm_llama_prefill",
    summary=_WHOLE,
    module=_LLAMA,
    python_name="context_attention_fwd_no_prompt_cache",
    arguments={**_PREFILL, **{"k": "key", "v": "value", "b_seq_len": "seq_lens"}},
    strides=_ALL,
    contract={**_SCALE, "head_sizes": _UP_TO_256},
    new_tokens_from="arguments",
    cache_layout=None,
    context=False,
)
PHI3_PREFILL = replace(
    LLAMA_PREFILL,
    name="lightllm_phi3_prefill",
    summary=f"{_WHOLE}, with any head size",
    module=_PHI3,
    contract=_SCALE,
)
MISTRAL_PREFILL = replace(
    LLAMA_PREFILL,
    name="lightllm_mistral_prefill",
    summary=f"{_WHOLE}, with a sliding window",
    module=_MISTRAL,
    python_name="context_attention_fwd",
    arguments={
        **LLAMA_PREFILL.arguments,
        "sliding_window": "sliding_window or max_seq_len",  # a window is required
    },
    contract={**_SCALE, "head_sizes": _UP_TO_128},
)

# The op gqa_decode_attention_fwd of a mode of llama's decode; a program has all query heads of a KV head.
LLAMA_GQA_DECODE = _op(
    name="lightllm_llama_gqa_decode",
    summary="attention of one new token per sequence, whose slots are a row of a table",
    module="llama/triton_kernel/gqa_decode_flashattention_nopad",
    python_name="gqa_decode_attention_fwd",
    arguments={**{"q": "query", "o": "output"}, **_CACHE, **_REQUESTS, "req_to_tokens": _TABLE},
    strides=dict.fromkeys("qkvo", 2),
    contract={**_SCALE, "serves": "decode", "head_sizes": _UP_TO_128},
    prefill=False,
)
