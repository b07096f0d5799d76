"""The op flash_attn_with_kvcache of pagedattention.py: decodes, split into parts that are merged."""

from attnlab.library.op import Op, same

OP = Op(
    name="lmdeploy_paged_attention",
    summary="attention of one new token per sequence over a paged cache, in parts that are merged",
    library="lmdeploy",
    module="pagedattention",
    python_name="flash_attn_with_kvcache",
    arguments={
        **{"q": "query", "k_cache": "flash_key_cache", "v_cache": "flash_value_cache"},
        **{"cache_seqlens": "seq_lens", "page_table": "block_table", "softmax_scale": "sm_scale"},
        **same("alibi_slopes sinks softcap"),
        "window_size": "window_left",
        "quant_policy": "(17 if kv_cache_dtype == 'fp8_e5m2' else 16) if is_fp8 else 0",
        "k_scales_zeros": "one(k_scale) if is_fp8 else None",
        "v_scales_zeros": "one(v_scale) if is_fp8 else None",
    },
    result="returned",
    # Blocks are the tiles of the kernel, which must have a power of two of slots.
    contract={
        **{"softcap": "any", "sinks": "any", "serves": "decode", "default_scale": "head_size"},
        **{"reads_tail": "value", "block_sizes": (16, 32, 64, 128, 256)},
    },
    new_tokens_from="cache",
    cache_layout="flash",
    min_window=2,  # window_size 0, which would show the token itself alone, means no window
    prefill=False,
    sinks_with_alibi=True,
)
