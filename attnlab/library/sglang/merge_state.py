"""The op merge_state_triton; the lab computes its inputs, attention over the cache and new tokens."""

from attnlab.library.op import Op

OP = Op(
    name="sglang_merge_state",
    summary="merge of two attention outputs over disjoint keys, by the logarithms of their sums",
    library="sglang",
    module="merge_state",
    python_name="merge_state_triton",
    arguments={
        "output": "output",
        "prefix_output": "partials.prefix_output",
        "prefix_lse": "partials.prefix_lse.T.contiguous()",
        "suffix_output": "partials.suffix_output",
        "suffix_lse": "partials.suffix_lse.T.contiguous()",
        "output_lse": "nan_like(partials.prefix_lse.T.contiguous())",
    },
    lse="output_lse",
    left_out={"gaps between tokens or heads": "the kernel computes addresses from shapes"},
    contract={"kv_cache_dtypes": ()},
    rounding={"parts": 1},
    scores=False,
    new_tokens_from="arguments",
    cache_layout=None,
)
