"""The op paged_attention_decode of pa_decode.py: one new token per sequence, heads before slots."""

from attnlab.library.aiter import AMD
from attnlab.library.op import PATH, Op, same

OP = Op(
    name="aiter_pa_decode",
    summary="attention of one new token per sequence; sequences of more than 1,024 tokens in parts",
    library="aiter",
    module="pa_decode",
    python_name="paged_attention_decode",
    platforms=AMD,
    arguments={
        "key_cache": "flash_key_cache.transpose(1, 2)",
        "value_cache": "flash_value_cache.transpose(1, 2)",
        **{"block_tables": "block_table", "attn_scale": "scale", "compute_type": "triton_dtype"},
        **same("output query seq_lens max_seq_len alibi_slopes"),
        **{"k_scale": "one(k_scale)", "v_scale": "one(v_scale)"},
    },
    neutral={"max_seq_len": PATH},
    left_out={"scales per token": "attnlab passes them to vLLM's op alone"},
    contract={"serves": "decode"},
    rounding={
        "products": True,
        "query": True,
        "terms": 8,
    },  # it adds the weights of a page in their dtype
    new_tokens_from="cache",
    cache_layout="flash",
    strided=False,
    prefill=False,
)
