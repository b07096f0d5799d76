"""The op chunked_prefill_paged_decode: vLLM's wrapper of a prefill kernel and a decode kernel."""

from attnlab.library.op import UNREAD, Op, same

# The default scale is 1 / sqrt(query.shape[1]), the number of heads, up to 0.11.2, and from query.shape[2],
# the head size, since then. The two kernels together serve every row.
OP = Op(
    name="chunked_prefill_paged_decode",
    summary="attention of a mixed batch: prefill rows by context_attention_fwd, decode rows by a "
    "paged decode kernel",
    module="chunked_prefill_paged_decode",
    arguments={
        **same("query key value output kv_cache_dtype key_cache value_cache block_table"),
        **same("query_start_loc seq_lens max_seq_len max_query_len alibi_slopes sliding_window"),
        **same("sm_scale sinks causal"),
        "use_interleaved_v_cache": "interleave_v",
        "k_scale": "one(k_scale)",
        "v_scale": "one(v_scale)",
        "output_scale": "one(output_scale)",
    },
    strides={
        **{"query": 2, "key": 3, "value": 3, "output": 2},
        **{"key_cache": 5, "value_cache": 4, "block_table": 1},
    },
    neutral={"max_seq_len": UNREAD},
    contract={"default_scale": "head_size", "sinks": "any", "kv_cache_dtypes": ()},
    contract_of={"0.11.2": {"default_scale": "num_heads"}},
    new_tokens_from="by query_len",
    cache_layout="x-split",
    interleave_v_releases=("0.33.0",),
)
