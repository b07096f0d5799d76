"""The op context_attention_fwd of prefill_attention.py: whole sequences without a cache."""

from attnlab.library.op import Op

OP = Op(
    name="sglang_prefill_attention",
    summary="attention of whole sequences to themselves without a cache",
    library="sglang",
    module="prefill_attention",
    python_name="context_attention_fwd",
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output", "is_causal": "causal"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens", "sm_scale": "sm_scale"},
        "max_input_len": "max_query_len",
    },
    strides={"q": 2, "k": 2, "v": 2, "o": 2},
    masks=("bidirectional",),
    contract={"default_scale": "head_size"},
    new_tokens_from="arguments",
    cache_layout=None,
    context=False,
    kv_cache_dtypes=("auto",),
)
