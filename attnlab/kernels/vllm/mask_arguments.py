"""How the mask of a call is passed to vLLM's ops (:mod:`attnlab.tensors.visibility`)."""

from typing import Any

from attnlab.case.ops import ENCODER, PREFILL, WRAPPER
from attnlab.tensors.call import KernelCall

Arguments = dict[str, Any]


def mask_arguments(call: KernelCall) -> Arguments:
    """Return the arguments of an op that state which keys its rows see; of unified_attention with its window.

    Source: unified_attention and context_attention_fwd, vLLM 0.33.0. The windows are those that its
    Triton backend passes (vllm/v1/attention/backends/triton_attn.py).
    """
    if call.op in (WRAPPER, PREFILL):
        return {"causal": call.causal}
    window = call.sliding_window - 1 if call.sliding_window else -1
    if call.op == ENCODER:
        windows = {"sliding_window_q": window, "sliding_window_k": _right(call)}
        if not call.causal and not call.sliding_window:  # as vit_attn_wrappers.py calls it
            windows = {}
        return {"is_causal": call.causal, **windows}
    given: Arguments = {"causal": call.causal, "window_size": (window, _right(call))}
    if call.mm_prefix_range is not None:
        given["mm_prefix_range"] = call.mm_prefix_range
        given["mm_prefix_clamp_sliding_window"] = call.mm_prefix_clamp_sliding_window
    if call.rswa_prefix_lens is not None:
        given["rswa_prefix_lens"] = call.rswa_prefix_lens
        given["rswa_window"] = call.sliding_window
        given["window_size"] = (-1, -1)
    if call.chunk_lookback > -1:
        given["chunk_lookback"] = call.chunk_lookback
    return given if call.qq_bias is None else {**given, "qq_bias": call.qq_bias}


def _right(call: KernelCall) -> int:
    """Return the window to the right, 0 for causal rows; unified_attention takes the left one for it."""
    if not call.sliding_window:
        return -1
    return 0 if call.causal is True or call.window_right is None else call.window_right
