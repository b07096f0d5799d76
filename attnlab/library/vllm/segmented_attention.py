"""The op segmented_attention of vLLM's backend for Radeon GPUs (rocm_segmented_attn.py, 0.33.0)."""

from attnlab.library.op import Op, same

OP = Op(
    name="segmented_attention",
    summary="attention of a mixed batch, with sequences cut into parts and merged, for Radeon GPUs",
    module="segmented_attention",
    # segmented_attention itself calls unified_attention for tensors that are not on a GPU.
    python_name="run_segmented_attention",
    backends=("model", "vllm"),
    releases=("0.33.0",),
    arguments={
        **{"q": "query", "kc": "flash_key_cache", "vc": "flash_value_cache", "out": "output"},
        **{"table": "block_table", "starts": "query_start_loc", "lengths": "seq_lens"},
        **{"k_scale": "one(k_scale)", "v_scale": "one(v_scale)", "scale": "scale"},
        **same("max_query_len max_seq_len causal sinks"),
        "sliding_window": "window_left",
    },
    neutral={
        "max_seq_len": "It chooses tiles and the number of parts; the result is the same.",
        "config": "It chooses tiles; the result is the same.",
        "workspace": "The op allocates it if it gets none.",
    },
    own_splits=(1, 2, 4, 8, 16, 32, 64),
    left_out={
        "config": "tiles that a tuner found",
        "rows of more than 8192 new tokens": "the caller computes them with unified_attention",
    },
    # It has powers of two; its backend has 64, 128 and 256.
    contract={"sinks": "any", "head_sizes": (16, 32, 64, 128, 256)},
    new_tokens_from="cache",
    cache_layout="flash",
    hnd=True,
)
