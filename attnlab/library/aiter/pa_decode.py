"""The op paged_attention_decode of pa_decode.py: one new token per sequence, heads before slots."""

from dataclasses import replace

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
# A cache of FP8 with scales has numbers that 4 bits hold exactly, so that only the op rounds.
PER_TOKEN = replace(
    OP,
    name=f"{OP.name}_per_token",
    summary=f"{OP.summary}; keys and values in FP8 have a scale for each token and head",
    arguments={
        **OP.arguments,
        **{
            f"{half}_cache": f"scaled(flash_{half}_cache).numbers.transpose(1, 2)"
            for half in ("key", "value")
        },
        **{
            f"{half[0]}_scale": f"scaled(flash_{half}_cache).scales[..., 0].transpose(1, 2)"
            for half in ("key", "value")
        },
    },
    left_out={"numbers between those of 4 bits": "a cache has numbers that FP8 holds exactly"},
    kv_cache_dtypes=("auto",),
    copies_cache=True,
    coarse=True,
)
