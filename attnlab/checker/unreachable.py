"""Parts of vLLM's ops that no hostile case reaches, each with its reason.

The list is checked: a part that a case does reach is reported as such, so that the entry is removed.
"""

from dataclasses import dataclass

from attnlab.case.ops import WRAPPER


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """An outcome of a branch that no hostile case reaches, with the block that then runs.

    - ``function``: its function. ``text``: the condition, or what a loop runs over, as ``ast.unparse`` writes
      it. ``outcome``: True or False; of a loop, whether it has an iteration.
    - ``block``: how the first line of the block begins, if the text alone is ambiguous.
    - ``op``: the op whose cases do not reach it; "" for all.
    """

    function: str
    text: str
    outcome: bool
    reason: str
    block: str = ""
    op: str = ""


_REFUSED = "The op raises an error that its contract states."
_OTHER_FP8 = "A Case has no other FP8 dtype; the op raises an error."
_BLACKWELL = "It needs compute capability 10, which is no platform of attnlab."
_NOT_EMPTY = "The condition before the loop excludes an empty one."
_WRAPPER = "The wrapper always passes another value."

UNREACHABLE = (
    Unreachable(
        function="kernel_paged_attention_2d",
        text="filter_by_query_len",
        outcome=False,
        reason="The only caller passes True.",
    ),
    Unreachable(
        function="chunked_prefill_paged_decode",
        text="kv_cache_dtype == 'fp8_e5m2'",
        outcome=False,
        reason=_OTHER_FP8,
    ),
    Unreachable(
        function="context_attention_fwd",
        text="kv_cache_dtype == 'fp8_e5m2'",
        outcome=False,
        reason=_OTHER_FP8,
    ),
    Unreachable(
        function="context_attention_fwd",
        text="IS_TURING and q_dtype_is_f32",
        outcome=True,
        reason="It needs compute capability 7.5, which is no platform of attnlab.",
    ),
    Unreachable(
        function="context_attention_fwd",
        text="k_cache.dtype == torch.uint8 or (v_cache.dtype == torch.uint8 and kv_cache_dtype == 'auto')",
        outcome=True,
        reason=_REFUSED,
    ),
    Unreachable(
        function="context_attention_fwd",
        text="alibi_slopes is not None",
        outcome=True,
        reason=_REFUSED,
        block="raise NotImplementedError",
    ),
    Unreachable(
        function="context_attention_fwd",
        text="sm_scale is None",
        outcome=True,
        reason=_WRAPPER,
        op=WRAPPER,
    ),
    Unreachable(
        function="context_attention_fwd",
        text="is_block_table_ptr",
        outcome=True,
        reason="The wrapper does not pass it on, which is a finding of its own.",
        op=WRAPPER,
    ),
    Unreachable(
        function="context_attention_fwd",
        text="max_seq_len is None",
        outcome=True,
        reason=_WRAPPER,
        op=WRAPPER,
    ),
    *(
        Unreachable(
            function=function,
            text="range(MAX_MM_RANGES)",
            outcome=False,
            reason="A tensor of ranges has at least one range.",
        )
        for function in ("compute_tile_loop_bounds", "compute_kv_seq_mask")
    ),
    Unreachable(
        function="reduce_segments",
        text="seq_len <= 0",
        outcome=True,
        reason="A sequence with new tokens has a seq_len of at least 1.",
    ),
    Unreachable(
        function="unified_attention",
        text="mm_prefix_range.ndim == 3",
        outcome=False,
        reason=_REFUSED,
    ),
    *(
        Unreachable(function="unified_attention", text=text, outcome=True, reason=_BLACKWELL)
        for text in (
            "tuned_large_head",
            "launch_num_warps is not None",
            "launch_num_stages is not None",
        )
    ),
    Unreachable(
        function="_fwd_kernel_stage1",
        text="range(split_kv_start, split_kv_end, BLOCK_N)",
        outcome=False,
        reason=_NOT_EMPTY,
    ),
    Unreachable(
        function="_fwd_grouped_kernel_stage1",
        text="tl.range(split_kv_start, split_kv_end, BLOCK_N)",
        outcome=False,
        reason=_NOT_EMPTY,
    ),
    Unreachable(
        function="_decode_att_m_fwd",
        text="kv_group_num != 1",
        outcome=True,
        reason="The only caller has one query head per KV head.",
    ),
    Unreachable(
        function="_fwd_kernel_stage2",
        text="range(0, NUM_KV_SPLITS)",
        outcome=False,
        reason="The number of splits is at least 1.",
    ),
    Unreachable(
        function="_fwd_kernel_stage2",
        text="OUTPUT_FP16",
        outcome=True,
        reason="No caller passes it.",
    ),
    Unreachable(
        function="_is_supported_kv_cache_dtype",
        text="not (kv_cache_dtype in _NATIVE_KV_CACHE_DTYPES or is_quantized_kv_cache(kv_cache_dtype))",
        outcome=True,
        reason=_REFUSED,
    ),
    Unreachable(
        function="triton_reshape_and_cache_flash",
        text="interleaved_v_pack_factor and (not use_head_major_layout)",
        outcome=True,
        reason=_REFUSED,
    ),
)
