"""The op decode_attention_fwd, as vLLM's Triton MLA backend calls it, with separate keys and values."""

from attnlab.library.op import PATH, Op

OP = Op(
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
    contract={"softcap": "any", "serves": "decode"},
    rounding={"products": True},
    new_tokens_from="cache",
    cache_layout="flash",
    prefill=False,
    min_splits=1,
)
