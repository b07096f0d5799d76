"""The op flash_attn_varlen_func of flashattention.py: prefill, with the keys of each sequence in a row."""

from attnlab.library.op import UNREAD, Op, same

# LMDeploy's flatten_kv_cache copies a paged cache to these keys and values before a prefill.
OP = Op(
    name="lmdeploy_flash_attention",
    summary="attention of a batch of new tokens to keys and values of whole sequences without pages",
    library="lmdeploy",
    module="flashattention",
    python_name="flash_attn_varlen_func",
    arguments={
        **{"q": "query", "k": "flat_keys", "v": "flat_values", "softmax_scale": "sm_scale"},
        **{"cu_seqlens_q": "query_start_loc", "max_seqlen_q": "max_query_len"},
        **{"cu_seqlens_k": "flat_starts", "max_seqlen_k": "max_seq_len"},
        **same("causal alibi_slopes sinks softcap"),
        "window_size": "window_left",
    },
    result="returned",
    left_out={
        "block_sparse_size": "rows that see whole blocks, as of a diffusion model",
        "flatten_kv_cache": "the copy of a paged cache to these keys and values is not checked",
    },
    masks=("bidirectional",),
    neutral={"max_seqlen_k": UNREAD},
    contract={"softcap": "any", "sinks": "any", "default_scale": "head_size"},
    new_tokens_from="cache",
    cache_layout="flash",
    kv_cache_dtypes=("auto",),
    frees_blocks=False,  # window_block_manager.py removes them from the table, and their tokens from seq_lens
    min_window=2,  # window_size 0, which would show the token itself alone, means no window
    sinks_with_alibi=True,
)
