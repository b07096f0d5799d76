"""The op decode_attention_fwd of decode_attention.py: one new token per sequence, lists of token slots."""

from attnlab.library.op import PATH, Op, same

OP = Op(
    name="sglang_decode_attention",
    summary="attention of one new token per sequence, whose slots are a list, in parts that are merged",
    library="sglang",
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
    split_step=32,  # _MIN_BLOCK_KV
    contract={"softcap": "any", "sinks": "any", "serves": "decode"},
    rounding={"products": True, "to_cache": True},  # with several heads per KV head
    new_tokens_from="cache",
    cache_layout="flash",
    prefill=False,
    min_splits=1,
)
