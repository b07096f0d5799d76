"""The op context_attention_fwd of pa_prefill.py: vLLM's of 2025, which reads the cache up to ctx_len only."""

from attnlab.library.aiter import AMD
from attnlab.library.op import Op, same

OP = Op(
    name="aiter_pa_prefill",
    summary="attention of new tokens to the cached context and to themselves",
    library="aiter",
    module="pa_prefill",
    python_name="context_attention_fwd",
    platforms=AMD,
    arguments={
        **{"q": "query", "k": "key", "v": "value", "o": "output"},
        "k_cache": "key_cache.view(cache_dtype)",
        "v_cache": "value_cache.view(cache_dtype)",
        **{"b_loc": "block_table", "b_start_loc": "query_start_loc", "b_seq_len": "seq_lens"},
        **same("kv_cache_dtype alibi_slopes sliding_window sm_scale"),
        **{"max_input_len": "max_query_len", "k_scale": "one(k_scale)", "v_scale": "one(v_scale)"},
    },
    contract={"default_scale": "head_size"},
    new_tokens_from="arguments",
    cache_layout="x-split",
)
