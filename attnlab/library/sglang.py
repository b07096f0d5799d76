"""SGLang's Triton attention, read from a wheel or a checkout; run with 0.5.9 to 0.5.23."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from attnlab.library.op import PATH, Op, Package, same

# The defaults of settings that the ops read (sglang/srt/environ.py, 0.5.23).
ENVS = {
    "SGLANG_TRITON_COMPACT_EXTEND_ATTENTION": True,
    "SGLANG_TRITON_FP8_PREFILL_ATTN": True,
    "SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS": False,
    "SGLANG_MLA_DECODE_TUNE": False,
}


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what sglang.srt.utils answers on a platform: the ops ask it while they are imported."""
    is_hip = platform.is_rocm
    answers = {
        "is_hip": is_hip,
        "is_cuda": platform.family == "cuda",
        "is_cuda_alike": platform.family == "cuda" or is_hip,
        "is_npu": False,
        "is_xpu": False,
        "is_gfx95_supported": platform.name == "gfx950",
        "is_gfx1250_supported": False,
    }
    functions: dict[str, Any] = {
        name: lambda *args, found=found: found for name, found in answers.items()
    }
    settings = {
        name: SimpleNamespace(get=lambda found=found: found) for name, found in ENVS.items()
    }
    return {
        "sglang.srt.utils": functions,
        "sglang.srt.environ": {"envs": SimpleNamespace(**settings)},
    }


PACKAGE = Package(
    name="sglang",
    title="SGLang",
    distributions=("sglang",),
    # 0.5.23 has the first two, 0.5.9 the third.
    folders=(
        "sglang/kernels/ops/attention",
        "sglang/kernels/ops/kvcache",
        "sglang/srt/layers/attention/triton_ops",
    ),
    stubs=_stubs,
)
_op = partial(Op, library="sglang")

# The op launch_reshape_and_cache_flash of cache_ops.py, which writes the cache.
CACHE_OPS = _op(
    name="sglang_reshape_and_cache_flash",
    summary="writing new keys and values to their slots of the cache",
    module="cache_ops",
    python_name="launch_reshape_and_cache_flash",
    arguments={
        **same("key value"),
        "key_cache": "flash_key_cache",
        "value_cache": "flash_value_cache",
        "slot_mapping": "all_slots",
        "k_scale": "one(k_scale) if is_fp8 else None",
        "v_scale": "one(v_scale) if is_fp8 else None",
    },
    result="written_cache(key_cache, value_cache)",
    strides={"key": 1, "value": 1, "key_cache": 3, "value_cache": 3},
    index_dtypes={"slot_mapping": ("int64",)},
    left_out={"swa_slot_mapping": "a second table of slots, which no call of attnlab has"},
    scores=False,
    new_tokens_from="arguments",
    writes_cache=True,
    hnd=True,
)

# The op decode_attention_fwd of decode_attention.py: one new token per sequence, lists of token slots.
DECODE_ATTENTION = _op(
    name="sglang_decode_attention",
    summary="attention of one new token per sequence, whose slots are a list, in parts that are merged",
    module="decode_attention",
    python_name="decode_attention_fwd",
    arguments={
        **{"q": "query", "o": "output", "sm_scale": "scale"},
        "k_buffer": "flash_key_cache.flatten(0, 1)",
        "v_buffer": "flash_value_cache.flatten(0, 1)",
        **{"kv_indptr": "token_starts", "kv_indices": "token_slots", "page_size": "block_size"},
        "num_kv_splits": "int32([splits] * seqs)",
        "max_kv_splits": "splits",
        "attn_logits": "float32[seqs, heads, splits, value_size]",
        "attn_lse": "float32[seqs, heads, splits]",
        "logit_cap": "softcap or 0.0",
        **same("sinks k_scale v_scale"),
    },
    strides=dict.fromkeys(("q", "o", "k_buffer", "v_buffer"), 2),
    neutral=dict.fromkeys(("num_kv_splits", "max_kv_splits", "page_size"), PATH),
    default_splits=8,  # the choice of attnlab: SGLang computes a number for each sequence
    left_out={"num_kv_splits of each sequence": "every sequence has the same number of parts"},
    split_step=32,  # _MIN_BLOCK_KV
    parts={
        "kernel": "_fwd_kernel_stage2",
        "values": "Mid_O * v_scale",
        "logarithms": "Mid_O_1",
        "sinks": "sink_ptr",
    },
    contract={"softcap": "any", "sinks": "any", "serves": "decode"},
    rounding={"products": True, "to_cache": True},  # with several heads per KV head
    prefill=False,
    min_splits=1,
)

# The ops extend_attention_fwd and extend_attention_fwd_unified: new tokens after a context.

_SHARED = {
    **{"max_len_extend": "max_query_len", "logit_cap": "softcap or 0.0", "is_causal": "causal"},
    **{"page_size": "block_size", "sliding_window_size": "window_left"},
    "k_buffer": "flash_key_cache.flatten(0, 1)",
    "v_buffer": "flash_value_cache.flatten(0, 1)",
    "qo_indptr": "query_start_loc.int()",
    **same("sm_scale sinks k_scale v_scale"),
}
_LEFT_OUT = {"score_mod, xai_temperature_len": "attnlab has no reference for them"}
# The context is a list of slots from the first key that the first new token sees, as SGLang's Triton backend
# passes it; a tree is a mask of bytes, whose rows have all keys.
EXTEND_ATTENTION = _op(
    name="sglang_extend_attention",
    summary="attention of new tokens, from arguments, to a context whose slots are a list, and to themselves",
    module="extend_attention",
    python_name="extend_attention_fwd",
    arguments={
        **_SHARED,
        **{"q_extend": "query", "k_extend": "key", "v_extend": "value", "o_extend": "output"},
        **{"kv_indptr": "context_starts", "kv_indices": "context_slots"},
        "custom_mask": "None if qq_bias is None else seen(window_starts * 0)",
        "mask_indptr": "None if qq_bias is None else sums(query_lens * seq_lens)",
        "window_kv_offsets": "None if qq_bias is None else window_starts",
        "lse_extend": "float32[tokens, heads]",
        "extend_seq_lens_cpu": "query_lens.tolist()",  # as SGLang's Triton backend passes them
    },
    strides=dict.fromkeys(
        ("q_extend", "o_extend", "k_extend", "v_extend", "k_buffer", "v_buffer"), 2
    ),
    lse="lse_extend if sinks is None else None",
    neutral={"page_size": PATH},
    masks=("bidirectional", "tree"),
    two_sided=True,
    adds_bias=False,
    left_out={
        **_LEFT_OUT,
        "skip_prefix_custom_mask": "no mask of a Case that the op has hides keys of the context",
        "skip_prefix, skip_extend": "a part of the attention alone",
        "the log-sum-exp with sinks": "the op counts the sink in it",
    },
    contract={"default_scale": "head_size", "softcap": "any", "sinks": "any"},
    rounding={"to_cache": True},
    new_tokens_from="arguments",
)
EXTEND_ATTENTION_UNIFIED = replace(
    EXTEND_ATTENTION,
    name="sglang_extend_attention_unified",
    summary="attention of new tokens to all tokens of their sequence, whose slots are a list",
    python_name="extend_attention_fwd_unified",
    arguments={
        **_SHARED,
        **{"q": "query", "o": "output", "kv_indptr": "token_starts", "kv_indices": "token_slots"},
        "prefix_lens": "context_lens - window_starts",
        "window_start_pos": "window_starts if sliding_window else None",
        "custom_mask": "None if qq_bias is None else seen(window_starts)",
        "mask_indptr": "None if qq_bias is None else sums(query_lens * (seq_lens - window_starts))",
    },
    strides=dict.fromkeys(("q", "o", "k_buffer", "v_buffer"), 2),
    lse=None,
    left_out=_LEFT_OUT,
    new_tokens_from="cache",
)

# The op merge_state_triton; the lab computes its inputs, attention over the cache and new tokens.
MERGE_STATE = _op(
    name="sglang_merge_state",
    summary="merge of two attention outputs over disjoint keys, by the logarithms of their sums",
    module="merge_state",
    python_name="merge_state_triton",
    arguments={
        "output": "output",
        "prefix_output": "partials.prefix_output",
        "prefix_lse": "partials.prefix_lse.T.contiguous()",
        "suffix_output": "partials.suffix_output",
        "suffix_lse": "partials.suffix_lse.T.contiguous()",
        "output_lse": "nan_like(partials.prefix_lse.T.contiguous())",
    },
    lse="output_lse",
    left_out={"gaps between tokens or heads": "the kernel computes addresses from shapes"},
    contract={"kv_cache_dtypes": ()},
    rounding={"parts": 1},
    scores=False,
    new_tokens_from="arguments",
    cache_layout=None,
)

# The op context_attention_fwd of prefill_attention.py: whole sequences without a cache.
PREFILL_ATTENTION = _op(
    name="sglang_prefill_attention",
    summary="attention of whole sequences to themselves without a cache",
    module="prefill_attention",
    python_name="context_attention_fwd",
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output", "is_causal": "causal"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens", "sm_scale": "sm_scale"},
        "max_input_len": "max_query_len",
    },
    strides={"q": 2, "k": 2, "v": 2, "o": 2},
    masks=("bidirectional",),
    contract={"default_scale": "head_size"},
    new_tokens_from="arguments",
    cache_layout=None,
    context=False,
    kv_cache_dtypes=("auto",),
)
