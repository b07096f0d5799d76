"""LMDeploy's Triton attention and cache writes, read from a wheel or a checkout; run with 0.18.0."""

import logging
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

from attnlab.library.op import UNREAD, Op, Package, same

# The arguments of a cache with one scale for all tokens, of one with a scale and a zero point for each token
# and head, and the cache that no call of attnlab can hold.
QUANTISED = {
    "quant_policy": "(17 if kv_cache_dtype == 'fp8_e5m2' else 16) if is_fp8 else 0",
    "k_scales_zeros": "one(k_scale) if is_fp8 else None",
    "v_scales_zeros": "one(v_scale) if is_fp8 else None",
}
LEFT_OUT = {
    "quant_policy 42 (TurboQuant)": "keys and values are rotated, and are numbers of a codebook"
}


def of_integers(op: Op, bits: int, caches: str, words: str, **changes: Any) -> Op:
    """Return an op with a cache of integers; ``caches``: the names of its halves, {} for k or v."""
    arguments = {**op.arguments, "quant_policy": str(bits)}
    for first, half in enumerate(("key", "value")):
        stored = f"affine(flash_{half}_cache, {bits}, {first})"
        arguments[caches.format(half[0])] = f"{stored}.numbers"
        arguments[f"{half[0]}_scales_zeros"] = f"{stored}.scales"
    return replace(
        op,
        name=f"{op.name}_int{bits}",
        summary=f"{op.summary}, {words} int{bits} with a scale and a zero point for each token and head",
        arguments=arguments,
        kv_cache_dtypes=("auto",),
        strided=False,
        strides={name: used for name, used in op.strides.items() if not name.endswith("caches")},
        copies_cache=True,
        coarse=True,
        **changes,
    )


class QuantPolicy(IntEnum):
    """The formats of a cache, with LMDeploy's numbers (lmdeploy/messages.py)."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


def _stubs(platform: Any) -> dict[str, dict[str, Any]]:
    """Return what the ops take from other modules of LMDeploy."""
    return {
        "lmdeploy.messages": {"QuantPolicy": QuantPolicy},
        "lmdeploy.utils": {"get_logger": logging.getLogger},
    }


PACKAGE = Package(
    name="lmdeploy",
    title="LMDeploy",
    distributions=("lmdeploy",),
    folders=("lmdeploy/pytorch/kernels/cuda",),
    stubs=_stubs,
)
_op = partial(Op, library="lmdeploy")

# The op fill_kv_cache, which writes the cache.
FILL_KV_CACHE = _op(
    name="lmdeploy_fill_kv_cache",
    summary="writing new keys and values to their slots of the cache, found in the block table",
    module="fill_kv_cache",
    python_name="fill_kv_cache",
    arguments={
        **{"k_states": "key", "v_states": "value"},
        **{"k_caches": "flash_key_cache", "v_caches": "flash_value_cache"},
        **{"q_start_loc": "query_start_loc[:-1]", "q_seq_length": "query_lens"},
        **{"kv_seq_length": "seq_lens", "max_q_seq_length": "max_query_len"},
        "block_offsets": "block_table",
        **QUANTISED,
    },
    result="written_cache(k_caches, v_caches)",
    strides={"k_states": 2, "v_states": 2, "k_caches": 4, "v_caches": 4, "block_offsets": 2},
    left_out=LEFT_OUT,
    contract={"block_sizes": (16, 32, 64, 128, 256)},
    scores=False,
    new_tokens_from="arguments",
    fp8_inside=("FP8",),  # of QuantPolicy, since 0.14.0
    writes_cache=True,
    hnd=True,
)
_DECODED = (
    "decoded(k_caches, k_scales_zeros, flash_key_cache, 0)",
    "decoded(v_caches, v_scales_zeros, flash_value_cache, 1)",
)
FILL_KV_CACHE_INT8, FILL_KV_CACHE_INT4 = (
    of_integers(
        FILL_KV_CACHE,
        bits,
        caches="{}_caches",
        words="as",
        left_out={"numbers near the middle of two levels": "those of a check are a quarter away"},
        result=f"written_cache({', '.join(_DECODED)})",
        hnd=False,
    )
    for bits in (8, 4)
)

# The op flash_attn_varlen_func of flashattention.py: prefill, with the keys of each sequence in a row.

# LMDeploy's flatten_kv_cache copies a paged cache to these keys and values before a prefill.
FLASH_ATTN_VARLEN_FUNC = _op(
    name="lmdeploy_flash_attention",
    summary="attention of a batch of new tokens to keys and values of whole sequences without pages",
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
    kv_cache_dtypes=("auto",),
    frees_blocks=False,  # window_block_manager.py removes them from the table, and their tokens from seq_lens
    min_window=2,  # window_size 0, which would show the token itself alone, means no window
    sinks_with_alibi=True,
)

# The op flash_attn_with_kvcache of pagedattention.py: decodes, split into parts that are merged.
FLASH_ATTN_WITH_KVCACHE = _op(
    name="lmdeploy_paged_attention",
    summary="attention of one new token per sequence over a paged cache, in parts that are merged",
    module="pagedattention",
    python_name="flash_attn_with_kvcache",
    arguments={
        **{"q": "query", "k_cache": "flash_key_cache", "v_cache": "flash_value_cache"},
        **{"cache_seqlens": "seq_lens", "page_table": "block_table", "softmax_scale": "sm_scale"},
        **same("alibi_slopes sinks softcap"),
        "window_size": "window_left",
        **QUANTISED,
    },
    result="returned",
    # Of _get_split_k, with the 16 multiprocessors of attnlab's simulated GPU.
    own_splits=(4, 8, 16),
    split_step=None,
    parts={
        "kernel": "_reduce_split_kernel",
        "values": "acc_ptr[..., :-2]",
        "logarithms": "acc_ptr[..., -2] * ln2",
        "sums": "acc_ptr[..., -1]",
        "sinks": "sinks_ptr",
    },
    left_out={
        **LEFT_OUT,
        "several query tokens per sequence": "they see each other, as blocks of a diffusion model do",
        "kv_layout bhsd, and one tensor of keys and values": "LMDeploy's other backends pass them",
    },
    # Blocks are the tiles of the kernel, which must have a power of two of slots.
    contract={
        **{"softcap": "any", "sinks": "any", "serves": "decode", "default_scale": "head_size"},
        **{"reads_tail": "value", "block_sizes": (16, 32, 64, 128, 256)},
    },
    fp8_inside=("FP8",),  # of QuantPolicy, since 0.14.0
    frees_blocks=False,  # window_block_manager.py removes them from the table, and their tokens from seq_lens
    min_window=2,  # window_size 0, which would show the token itself alone, means no window
    prefill=False,
    sinks_with_alibi=True,
)
# A cache of integers has numbers that 4 bits hold exactly, so that only the op rounds.
FLASH_ATTN_WITH_KVCACHE_INT8, FLASH_ATTN_WITH_KVCACHE_INT4 = (
    of_integers(
        FLASH_ATTN_WITH_KVCACHE,
        bits,
        caches="{}_cache",
        words="of",
        left_out={"numbers between those of 4 bits": "they are what the cache write rounds"},
    )
    for bits in (8, 4)
)
