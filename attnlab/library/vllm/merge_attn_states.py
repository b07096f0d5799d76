"""The op merge_attn_states; the lab computes its two inputs, attention over the cache and over new tokens."""

from attnlab.library.op import Op

OP = Op(
    name="merge_attn_states",
    summary="merge of two attention outputs over disjoint keys, by the logarithms of their sums",
    module="triton_merge_attn_states",
    arguments={
        "output": "output",
        "prefix_output": "partials.prefix_output",
        "prefix_lse": "partials.prefix_lse",
        "suffix_output": "partials.suffix_output",
        "suffix_lse": "partials.suffix_lse",
        "output_lse": "nan_like(partials.prefix_lse)",
    },
    lse="None if output_lse is None else output_lse.T",
    strides={
        **{"output": 2, "prefix_output": 2, "suffix_output": 2},
        **{"prefix_lse": 2, "suffix_lse": 2, "output_lse": 2},
    },
    contract={"kv_cache_dtypes": ()},
    rounding={"parts": 1},
    scores=False,
    new_tokens_from="arguments",
    cache_layout=None,
)
