"""The op launch_reshape_and_cache_flash of cache_ops.py, which writes the cache."""

from attnlab.library.op import Op, same

OP = Op(
    name="sglang_reshape_and_cache_flash",
    summary="writing new keys and values to their slots of the cache",
    library="sglang",
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
    cache_layout="flash",
    writes_cache=True,
    hnd=True,
)
