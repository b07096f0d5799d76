"""The ops extend_attention_fwd and extend_attention_fwd_unified: new tokens after a context."""

from attnlab.library.op import PATH, Op, same

_SHARED = {
    **{"max_len_extend": "max_query_len", "logit_cap": "softcap or 0.0", "is_causal": "causal"},
    **{"page_size": "block_size", "sliding_window_size": "window_left"},
    "k_buffer": "flash_key_cache.flatten(0, 1)",
    "v_buffer": "flash_value_cache.flatten(0, 1)",
    "qo_indptr": "query_start_loc.int()",
    **same("sm_scale sinks k_scale v_scale"),
}
_LEFT_OUT = {"score_mod, xai_temperature_len": "attnlab has no reference for them"}
_CONTRACT = {"default_scale": "head_size", "softcap": "any", "sinks": "any"}
# The context is a list of slots from the first key that the first new token sees, as SGLang's Triton backend
# passes it; a tree is a mask of bytes, whose rows have all keys.
OP = Op(
    name="sglang_extend_attention",
    summary="attention of new tokens, from arguments, to a context whose slots are a list, and to themselves",
    library="sglang",
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
    contract=_CONTRACT,
    rounding={"to_cache": True},
    new_tokens_from="arguments",
    cache_layout="flash",
)
UNIFIED = Op(
    name="sglang_extend_attention_unified",
    summary="attention of new tokens to all tokens of their sequence, whose slots are a list",
    library="sglang",
    module="extend_attention",
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
    neutral={"page_size": PATH},
    masks=("bidirectional", "tree"),
    two_sided=True,
    adds_bias=False,
    left_out=_LEFT_OUT,
    contract=_CONTRACT,
    rounding={"to_cache": True},
    new_tokens_from="cache",
    cache_layout="flash",
)
