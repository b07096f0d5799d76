"""The op fill_kv_cache, which writes the cache."""

from dataclasses import replace

from attnlab.library.lmdeploy import LEFT_OUT, QUANTISED, affine
from attnlab.library.op import Op

OP = Op(
    name="lmdeploy_fill_kv_cache",
    summary="writing new keys and values to their slots of the cache, found in the block table",
    library="lmdeploy",
    module="fill_kv_cache",
    python_name="fill_kv_cache",
    arguments={
        **{"k_states": "key", "v_states": "value"},
        **{"k_caches": "flash_key_cache", "v_caches": "flash_value_cache"},
        **{"q_start_loc": "query_start_loc[:-1]", "q_seq_length": "query_lens"},
        **{"kv_seq_length": "seq_lens", "max_q_seq_length": "max_query_len"},
        "block_offsets": "block_table",
        **QUANTISED,
    },
    result="written_cache(k_caches, v_caches)",
    left_out=LEFT_OUT,
    contract={"block_sizes": (16, 32, 64, 128, 256)},
    scores=False,
    new_tokens_from="arguments",
    cache_layout="flash",
    fp8_inside=("FP8",),  # of QuantPolicy, since 0.14.0
    writes_cache=True,
    hnd=True,
)
_DECODED = (
    "decoded(k_caches, k_scales_zeros, flash_key_cache, 0)",
    "decoded(v_caches, v_scales_zeros, flash_value_cache, 1)",
)
INT8, INT4 = (
    replace(
        OP,
        name=f"{OP.name}_int{bits}",
        summary=f"{OP.summary}, as int{bits} with a scale and a zero point for each token and head",
        arguments={**OP.arguments, **affine(bits, "k_caches", "v_caches")},
        result=f"written_cache({', '.join(_DECODED)})",
        left_out={"numbers between the levels of the cache": "rounding to them is not checked"},
        kv_cache_dtypes=("auto",),
        hnd=False,
        strided=False,
        copies_cache=True,
        coarse=True,
    )
    for bits in (8, 4)
)
