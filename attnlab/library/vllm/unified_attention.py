"""The op unified_attention, as vLLM's Triton backend calls it (backends/triton_attn.py, 0.33.0)."""

from attnlab.library.op import PATH, UNREAD, Op, same

# The 3D path splits a sequence: with vLLM's threshold if a call states no number of parts
# (MIN_LAUNCH_GRID_SIZE_2D is 128), otherwise whenever the op can use it, or never (0 parts).
_SEGMENTS = "tokens, heads, splits or 1"
OP = Op(
    name="unified_attention",
    summary="attention of a mixed batch, with every key and value read from the cache",
    module="triton_unified_attention",
    arguments={
        **{"q": "query", "k": "flash_key_cache", "v": "flash_value_cache", "out": "output"},
        **{"cu_seqlens_q": "query_start_loc", "max_seqlen_q": "max_query_len"},
        **{"seqused_k": "seq_lens", "max_seqlen_k": "max_seq_len", "softmax_scale": "scale"},
        "window_size": "(-1, -1) if has_rswa else (window_left, window_right)",
        **same("block_table causal alibi_slopes sinks"),
        "mm_prefix_range": "given(mm_prefix_range)",
        "mm_prefix_clamp_sliding_window": "mm_prefix_clamp_sliding_window or default",
        "rswa_prefix_lens": "given(rswa_prefix_lens)",
        "rswa_window": "rswa_window if rswa_prefix_lens is not None else default",
        "chunk_lookback": "chunk_lookback if chunk_lookback > -1 else default",
        "qq_bias": "given(qq_bias)",
        "softcap": "softcap or 0",
        "q_descale": "one(q_scale) if query.element_size() == 1 else None",
        "output_scale": "one(output_scale)",
        "k_descale": "one(k_scale)",
        "v_descale": "one(v_scale)",
        "kv_quant_mode": "int(is_fp8)",
        "num_par_softmax_segments": "splits or 1",
        "softmax_segm_output": f"float32[{_SEGMENTS}, power_of_2(head_size)]",
        "softmax_segm_max": f"float32[{_SEGMENTS}]",
        "softmax_segm_expsum": f"float32[{_SEGMENTS}]",
        "seq_threshold_3D": "(128 // kv_heads if num_splits is None else tokens) if splits else 0",
    },
    strides={
        **{"q": 2, "out": 2, "k": 4, "v": 4, "block_table": 1},
        **{"k_scale_cache": 3, "v_scale_cache": 3},
    },
    neutral={
        **dict.fromkeys(("max_seqlen_k",), UNREAD),
        **dict.fromkeys(("seq_threshold_3D", "num_par_softmax_segments", "use_td"), PATH),
    },
    index_dtypes=dict.fromkeys(("causal", "mm_prefix_range", "rswa_prefix_lens"), ("int32",)),
    default_splits=16,  # NUM_PAR_SOFTMAX_SEGMENTS
    # Until vLLM PR #56579 it computed the soft cap from two exponentials, which overflow.
    contract={"alibi_from": "first new token", "sinks": "any", "softcap": "any"},
    contract_of={"0.11.2": {"softcap": "overflows"}},
    rounding={"fp8": True},
    new_tokens_from="cache",
    cache_layout="flash",
    sinks_with_alibi=True,
    hnd=True,
    splits_are_powers_of_two=True,
    split_releases=("0.33.0",),
)
