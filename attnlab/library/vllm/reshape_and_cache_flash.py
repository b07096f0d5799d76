"""The op reshape_and_cache_flash, which writes the cache."""

from attnlab.library.op import Op, same

OP = Op(
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
    cache_layout="flash",
    writes_cache=True,
    hnd=True,
)
