"""AITER's Triton attention, read from a clone or the wheel amd-aiter; run with e404860 of 2026-08-22."""

from dataclasses import replace
from functools import partial
from typing import Any

from attnlab.library.op import PATH, Op, Package, same

_COMPUTE_UNITS = 304  # of an MI300X; unified_attention splits long sequences over them
_TOP = "aiter/ops/triton"


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops ask of the machine that they run on."""
    return {"aiter.jit.utils.chip_info": {"get_cu_num": lambda: _COMPUTE_UNITS}}


PACKAGE = Package(
    name="aiter",
    title="AITER",
    distributions=("amd-aiter",),
    # Releases up to 0.1.7 have the ops and their kernels in the second and the fourth folder.
    folders=(
        f"{_TOP}/attention",
        _TOP,
        f"{_TOP}/_triton_kernels/attention",
        f"{_TOP}/_triton_kernels",
        f"{_TOP}/_triton_kernels/flash_attn_triton_amd",
        f"{_TOP}/_triton_kernels/quant",
        f"{_TOP}/utils",
        f"{_TOP}/utils/_triton",
    ),
    further=rf"{_TOP}/configs/[\w-]+-EXTEND_ATTENTION\.json",
    stubs=_stubs,
)
_AMD = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")
_op = partial(Op, library="aiter", platforms=_AMD)

# The op extend_attention_fwd: SGLang's of 2024, new tokens after a context whose slots are a list.
EXTEND_ATTENTION = _op(
    name="aiter_extend_attention",
    summary="attention of new tokens, from arguments, to a context whose slots are a list, and to themselves",
    module="extend_attention",
    python_name="extend_attention_fwd",
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
    kv_cache_dtypes=("auto",),  # it has no scales
)

# Decodes of AITER's flash_attn_with_kvcache: attention_forward_decode_triton_impl of fwd_decode.py.
FWD_DECODE = _op(
    name="aiter_fwd_decode",
    summary="attention of one new token per sequence over a paged cache, in parts that are merged",
    module="fwd_decode",
    python_name="attention_forward_decode_triton_impl",
    arguments={
        **{"q": "query[:, None]", "out": "output[:, None]", "sm_scale": "scale", **same("causal")},
        **{"k_cache": "flash_key_cache", "v_cache": "flash_value_cache"},
        **{"k_new": "None", "v_new": "None", "cache_batch_idx": "None", "layout": "'bshd'"},
        "softmax_lse": "float32[seqs, heads, 1]",
        **{"window_size_left": "window_left", "window_size_right": "window_right"},
        "alibi_slopes": "alibi_slopes if alibi_slopes is None else alibi_slopes[None].expand(seqs, -1)",
        "cache_seqlens": "seq_lens",
        **same("block_table"),
    },
    result="out[:, 0]",
    lse="softmax_lse[..., 0]",
    own_splits=(1, 2, 4, 8, 16, 32, 64),  # of get_split_k
    masks=("bidirectional",),  # one new token sees the same keys, by other code for a window
    left_out={
        "new keys and values, rotary embeddings": "the op writes the cache itself, in torch",
        "several new tokens, caches without pages": "a Case has one new token per sequence and pages",
        "q_descale, k_descale, v_descale": "scales of each sequence and head",
    },
    contract={"serves": "decode"},
    rounding={"query": True},
    kv_cache_dtypes=("auto",),
    prefill=False,
    frees_blocks=False,  # its callers do not say that a block table may have freed blocks
)

# The op decode_attention_fwd of mla_decode.py: a copy of vLLM's, whose pages must follow each other.
MLA_DECODE = _op(
    name="aiter_mla_decode",
    summary="attention of one new token per sequence, with the sequence cut into parts and merged",
    module="mla_decode",
    python_name="decode_attention_fwd",
    arguments={
        **{"q": "query", "k_buffer": "flash_key_cache", "v_buffer": "flash_value_cache"},
        **{"o": "output", "lse": "float32[seqs, heads]", "req_to_token": "block_table"},
        **{"b_seq_len": "seq_lens", "sm_scale": "scale", "page_size": "block_size"},
        **{"num_kv_splits": "splits", "logit_cap": "softcap or 0.0"},
        "attn_logits": "float32[seqs, heads, splits, head_size + 1]",
        **{"k_scale": "one(k_scale)", "v_scale": "one(v_scale)"},
    },
    lse="lse",
    neutral={"num_kv_splits": PATH},
    left_out={
        "values as a part of the keys": "MLA's latent cache is run by attnlab mla, of vLLM alone"
    },
    default_splits=4,  # the choice of attnlab
    contract={"softcap": "any", "serves": "decode"},
    rounding={"products": True},
    strided=False,
    prefill=False,
    min_splits=1,
)

# The op paged_attention_decode of pa_decode.py: one new token per sequence, heads before slots.
PA_DECODE = _op(
    name="aiter_pa_decode",
    summary="attention of one new token per sequence; sequences of more than 1,024 tokens in parts",
    module="pa_decode",
    python_name="paged_attention_decode",
    arguments={
        "key_cache": "flash_key_cache.transpose(1, 2)",
        "value_cache": "flash_value_cache.transpose(1, 2)",
        **{"block_tables": "block_table", "attn_scale": "scale", "compute_type": "triton_dtype"},
        **same("output query seq_lens max_seq_len alibi_slopes"),
        **{"k_scale": "one(k_scale)", "v_scale": "one(v_scale)"},
    },
    neutral={"max_seq_len": PATH},
    partition_size=1024,  # of calls with at most 512 query heads in all their sequences
    contract={"serves": "decode"},
    # It adds the weights of a page in their dtype.
    rounding={"products": True, "query": True, "terms": 8},
    strided=False,
    prefill=False,
)
# A cache of FP8 with scales has numbers that 4 bits hold exactly, so that only the op rounds.
PA_DECODE_PER_TOKEN = replace(
    PA_DECODE,
    name=f"{PA_DECODE.name}_per_token",
    summary=f"{PA_DECODE.summary}; keys and values in FP8 have a scale for each token and head",
    arguments={
        **PA_DECODE.arguments,
        **{
            f"{half}_cache": f"scaled(flash_{half}_cache).numbers.transpose(1, 2)"
            for half in ("key", "value")
        },
        **{
            f"{half[0]}_scale": f"scaled(flash_{half}_cache).scales[..., 0].transpose(1, 2)"
            for half in ("key", "value")
        },
    },
    left_out={"numbers between those of 4 bits": "a cache has numbers that FP8 holds exactly"},
    kv_cache_dtypes=("auto",),
    copies_cache=True,
    coarse=True,
)

# The op context_attention_fwd of pa_prefill.py: vLLM's of 2025, which reads the cache up to ctx_len only.
PA_PREFILL = _op(
    name="aiter_pa_prefill",
    summary="attention of new tokens to the cached context and to themselves",
    module="pa_prefill",
    python_name="context_attention_fwd",
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

# The op unified_attention: a copy of vLLM's that chooses its tiles and splits for AMD's GPUs itself.
UNIFIED_ATTENTION = _op(
    name="aiter_unified_attention",
    summary="attention of a mixed batch, with every key and value read from the cache",
    module="unified_attention",
    python_name="unified_attention",
    arguments={
        **{"q": "query", "k": "flash_key_cache", "v": "flash_value_cache", "out": "output"},
        **{"cu_seqlens_q": "query_start_loc", "max_seqlen_q": "max_query_len"},
        **{"seqused_k": "seq_lens", "softmax_scale": "scale"},
        # A caller may pass more, such as the longest sequence of the model; above 512 it uses the 3D kernel.
        "max_seqlen_k": "max(max_seq_len, 1024) if splits else max_seq_len",
        **{"window_size": "(window_left, window_right)", "softcap": "softcap or 0"},
        **same("block_table causal alibi_slopes sinks qq_bias"),
        **{"q_descale": "None", "k_descale": "one(k_scale)", "v_descale": "one(v_scale)"},
    },
    neutral={"max_seqlen_k": PATH},
    default_splits=0,
    masks=("tree",),
    left_out={
        "shuffled_kv_cache, skip_reduce": "another layout of the cache, and a part of the op alone",
        "q_scales, output_scale, an FP8 query": "attnlab passes them to vLLM's op alone",
    },
    contract={"alibi_from": "first new token", "sinks": "any", "softcap": "any"},
    sinks_with_alibi=True,
    hnd=True,
)
