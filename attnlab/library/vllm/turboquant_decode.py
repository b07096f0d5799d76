"""The op triton_turboquant_decode_attention, as vLLM's TurboQuant backend calls it (0.33.0)."""

from attnlab.library.op import PATH, Op, same

OP = Op(
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
    new_tokens_from="cache",
    cache_layout="flash",
    strided=False,
    prefill=False,
    kv_cache_dtypes=("auto",),
    min_splits=1,
)
