"""The op unified_attention: a copy of vLLM's that chooses its tiles and splits for AMD's GPUs itself."""

from attnlab.library.aiter import AMD
from attnlab.library.op import PATH, Op, same

OP = Op(
    name="aiter_unified_attention",
    summary="attention of a mixed batch, with every key and value read from the cache",
    library="aiter",
    module="unified_attention",
    python_name="unified_attention",
    platforms=AMD,
    arguments={
        **{"q": "query", "k": "flash_key_cache", "v": "flash_value_cache", "out": "output"},
        **{"cu_seqlens_q": "query_start_loc", "max_seqlen_q": "max_query_len"},
        **{"seqused_k": "seq_lens", "softmax_scale": "scale"},
        # A caller may pass more, such as the longest sequence of the model; above 512 it uses the 3D kernel.
        "max_seqlen_k": "max(max_seq_len, 1024) if splits else max_seq_len",
        **{"window_size": "(window_left, window_right)", "softcap": "softcap or 0"},
        **same("block_table causal alibi_slopes sinks qq_bias"),
        **{"q_descale": "None", "k_descale": "one(k_scale)", "v_descale": "one(v_scale)"},
    },
    neutral={"max_seqlen_k": PATH},
    default_splits=0,
    masks=("tree",),
    left_out={
        "shuffled_kv_cache, skip_reduce": "another layout of the cache, and a part of the op alone",
        "q_scales, output_scale, an FP8 query": "attnlab passes them to vLLM's op alone",
    },
    contract={"alibi_from": "first new token", "sinks": "any", "softcap": "any"},
    new_tokens_from="cache",
    cache_layout="flash",
    sinks_with_alibi=True,
    hnd=True,
)
