"""The op decode_attention_fwd of mla_decode.py: a copy of vLLM's, whose pages must follow each other."""

from attnlab.library.aiter import AMD
from attnlab.library.op import PATH, Op

OP = Op(
    name="aiter_mla_decode",
    summary="attention of one new token per sequence, with the sequence cut into parts and merged",
    library="aiter",
    module="mla_decode",
    python_name="decode_attention_fwd",
    platforms=AMD,
    arguments={
        **{"q": "query", "k_buffer": "flash_key_cache", "v_buffer": "flash_value_cache"},
        **{"o": "output", "lse": "float32[seqs, heads]", "req_to_token": "block_table"},
        **{"b_seq_len": "seq_lens", "sm_scale": "scale", "page_size": "block_size"},
        **{"num_kv_splits": "splits", "logit_cap": "softcap or 0.0"},
        "attn_logits": "float32[seqs, heads, splits, head_size + 1]",
        **{"k_scale": "one(k_scale)", "v_scale": "one(v_scale)"},
    },
    lse="lse",
    neutral={"num_kv_splits": PATH},
    left_out={
        "values as a part of the keys": "MLA's latent cache is run by attnlab mla, of vLLM alone"
    },
    default_splits=4,  # the choice of attnlab
    contract={"softcap": "any", "serves": "decode"},
    rounding={"products": True},
    new_tokens_from="cache",
    cache_layout="flash",
    strided=False,
    prefill=False,
    min_splits=1,
)
