"""The op triton_bf16_mla_sparse_interface of vLLM's sparse MLA backend for Intel's GPUs (0.33.0)."""

from attnlab.library.op import Op

OP = Op(
    name="xpu_mla_sparse",
    summary="attention to the tokens of a list for each row, with values that are a part of the keys (MLA)",
    module="xpu_mla_sparse",
    python_name="triton_bf16_mla_sparse_interface",
    backends=("model", "vllm"),
    releases=("0.33.0",),
    # A latent of 512 elements has the value, then half of the key; 64 more elements have the other half.
    arguments={
        **{"q": "latent_query", "kv": "latent_cache", "indices": "seen_slots"},
        **{"sm_scale": "scale", "block_dpe": "64"},
    },
    # The op has one KV head: those of a call are rows of their own.
    result="returned[0][..., :value_size].reshape(tokens, heads, value_size)",
    lse="returned[2].reshape(tokens, heads)",
    neutral={"d_v": "It must be 512."},
    index_dtypes={"indices": ("int32",)},
    copies_cache=True,
    left_out={
        "other lists than the tokens that a causal row sees": "the list is an input of the op",
        "block_dpe 0": "no part of the key apart",
    },
    contract={"dtypes": ("bfloat16",), "head_sizes": (16, 32, 64, 128)},
    rounding={"products": True},
    new_tokens_from="cache",
    cache_layout="flash",
    strided=False,
    kv_cache_dtypes=("auto",),
)
