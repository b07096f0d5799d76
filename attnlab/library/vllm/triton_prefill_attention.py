"""The op of encoders, context_attention_fwd of triton_prefill_attention.py (0.33.0); it reads no cache."""

from attnlab.library.op import Op, same

OP = Op(
    name="triton_prefill_attention",
    summary="attention of whole sequences to themselves without a cache, as in an encoder",
    module="triton_prefill_attention",
    python_name="context_attention_fwd",
    backends=("model", "vllm"),
    releases=("0.33.0",),
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens"},
        **same("sinks"),
        "max_input_len": "max_query_len",
        "softmax_scale": "sm_scale",
        "is_causal": "causal",
        # has_window: vit_attn_wrappers.py passes none to a bidirectional call without one.
        "sliding_window_q": "window_left if has_window else default",
        "sliding_window_k": "window_right if has_window else default",
    },
    strides={"q": 2, "k": 2, "v": 2, "o": 2},
    contract={"default_scale": "head_size", "sinks": "any"},
    new_tokens_from="arguments",
    cache_layout=None,
    context=False,
    kv_cache_dtypes=("auto",),
)
