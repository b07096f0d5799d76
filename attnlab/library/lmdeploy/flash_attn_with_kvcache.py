"""The op flash_attn_with_kvcache of pagedattention.py: decodes, split into parts that are merged."""

from dataclasses import replace

from attnlab.library.lmdeploy import LEFT_OUT, QUANTISED, affine
from attnlab.library.op import Op, same

OP = Op(
    name="lmdeploy_paged_attention",
    summary="attention of one new token per sequence over a paged cache, in parts that are merged",
    library="lmdeploy",
    module="pagedattention",
    python_name="flash_attn_with_kvcache",
    arguments={
        **{"q": "query", "k_cache": "flash_key_cache", "v_cache": "flash_value_cache"},
        **{"cache_seqlens": "seq_lens", "page_table": "block_table", "softmax_scale": "sm_scale"},
        **same("alibi_slopes sinks softcap"),
        "window_size": "window_left",
        **QUANTISED,
    },
    result="returned",
    own_splits=(
        4,
        8,
        16,
    ),  # of _get_split_k, with the 16 multiprocessors of attnlab's simulated GPU
    split_step=None,
    left_out={
        **LEFT_OUT,
        "several query tokens per sequence": "they see each other, as blocks of a diffusion model do",
        "kv_layout bhsd, and one tensor of keys and values": "LMDeploy's other backends pass them",
    },
    # Blocks are the tiles of the kernel, which must have a power of two of slots.
    contract={
        **{"softcap": "any", "sinks": "any", "serves": "decode", "default_scale": "head_size"},
        **{"reads_tail": "value", "block_sizes": (16, 32, 64, 128, 256)},
    },
    new_tokens_from="cache",
    cache_layout="flash",
    fp8_inside=("FP8",),  # of QuantPolicy, since 0.14.0
    frees_blocks=False,  # window_block_manager.py removes them from the table, and their tokens from seq_lens
    min_window=2,  # window_size 0, which would show the token itself alone, means no window
    prefill=False,
    sinks_with_alibi=True,
)
# A cache of integers has numbers that 4 bits hold exactly, so that only the op rounds.
INT8, INT4 = (
    replace(
        OP,
        name=f"{OP.name}_int{bits}",
        summary=f"{OP.summary}, of int{bits} with a scale and a zero point for each token and head",
        arguments={**OP.arguments, **affine(bits, "k_cache", "v_cache")},
        left_out={"numbers between those of 4 bits": "they are what the cache write rounds"},
        kv_cache_dtypes=("auto",),
        strided=False,
        copies_cache=True,
        coarse=True,
    )
    for bits in (8, 4)
)
