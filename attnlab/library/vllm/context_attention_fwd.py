"""The op context_attention_fwd of prefix_prefill.py, which reads the cache up to ctx_len only."""

from attnlab.library.op import UNREAD, Op, same

OP = Op(
    name="context_attention_fwd",
    summary="attention of new tokens to the cached context and to themselves",
    module="prefix_prefill",
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output"},
        **{"k_cache": "key_cache", "v_cache": "value_cache", "b_loc": "block_table"},
        **{"b_start_loc": "query_start_loc", "b_seq_len": "seq_lens"},
        "b_ctx_len": "seq_lens - query_start_loc.diff()",  # up to 0.7
        **same("kv_cache_dtype max_seq_len alibi_slopes sliding_window sm_scale sinks causal"),
        "max_input_len": "max_query_len",
        "fp8_out_scale": "one(output_scale)",
        "interleaved_v_pack_factor": "interleave_v * 16 // value_cache.element_size()",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
    },
    strides={"q": 3, "k": 3, "v": 3, "o": 3, "k_cache": 5, "v_cache": 4, "b_loc": 2},
    # The op asserts that there are no sinks with ALiBi.
    neutral={"max_seq_len": UNREAD},
    contract={"default_scale": "head_size", "sinks": "without alibi"},
    new_tokens_from="arguments",
    cache_layout="x-split",
    interleave_v_releases=("0.33.0",),
)
