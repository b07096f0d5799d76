"""The op extend_attention_fwd: SGLang's of 2024, new tokens after a context whose slots are a list."""

from attnlab.library.aiter import AMD
from attnlab.library.op import Op, same

OP = Op(
    name="aiter_extend_attention",
    summary="attention of new tokens, from arguments, to a context whose slots are a list, and to themselves",
    library="aiter",
    module="extend_attention",
    python_name="extend_attention_fwd",
    platforms=AMD,
    arguments={
        **{"q_extend": "query", "k_extend": "key", "v_extend": "value", "o_extend": "output"},
        "k_buffer": "flash_key_cache.flatten(0, 1)",
        "v_buffer": "flash_value_cache.flatten(0, 1)",
        **{"qo_indptr": "query_start_loc.int()", "max_len_extend": "max_query_len"},
        **{"kv_indptr": "context_starts", "kv_indices": "context_slots", "is_causal": "causal"},
        "custom_mask": "None if qq_bias is None else seen(window_starts * 0)",
        "mask_indptr": "None if qq_bias is None else sums(query_lens * seq_lens)",
        **{"logit_cap": "softcap or 0.0", **same("sm_scale")},
    },
    masks=("bidirectional", "tree"),
    adds_bias=False,
    contract={"default_scale": "head_size", "softcap": "any"},
    new_tokens_from="arguments",
    cache_layout="flash",
    kv_cache_dtypes=("auto",),  # it has no scales
)
