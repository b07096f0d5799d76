"""Decodes of AITER's flash_attn_with_kvcache: attention_forward_decode_triton_impl of fwd_decode.py."""

from attnlab.library.aiter import AMD
from attnlab.library.op import Op, same

OP = Op(
    name="aiter_fwd_decode",
    summary="attention of one new token per sequence over a paged cache, in parts that are merged",
    library="aiter",
    module="fwd_decode",
    python_name="attention_forward_decode_triton_impl",
    platforms=AMD,
    arguments={
        **{"q": "query[:, None]", "out": "output[:, None]", "sm_scale": "scale", "causal": "True"},
        **{"k_cache": "flash_key_cache", "v_cache": "flash_value_cache"},
        **{"k_new": "None", "v_new": "None", "cache_batch_idx": "None", "layout": "'bshd'"},
        "softmax_lse": "float32[seqs, heads, 1]",
        **{"window_size_left": "window_left", "window_size_right": "window_right"},
        "alibi_slopes": "alibi_slopes if alibi_slopes is None else alibi_slopes[None].expand(seqs, -1)",
        "cache_seqlens": "seq_lens",
        **same("block_table"),
    },
    result="out[:, 0]",
    lse="softmax_lse[..., 0]",
    own_splits=(1, 2, 4, 8, 16, 32, 64),  # of get_split_k
    left_out={
        "new keys and values, rotary embeddings": "the op writes the cache itself, in torch",
        "several new tokens, caches without pages": "a Case has one new token per sequence and pages",
        "q_descale, k_descale, v_descale": "scales of each sequence and head",
    },
    contract={"serves": "decode"},
    rounding={"query": True},
    new_tokens_from="cache",
    cache_layout="flash",
    kv_cache_dtypes=("auto",),
    prefill=False,
    frees_blocks=False,  # its callers do not say that a block table may have freed blocks
)
