"""The arguments of triton_prefill_attention, the op of encoders."""

from typing import Any

from attnlab.contracts.target import Target
from attnlab.kernels.vllm.mask_arguments import mask_arguments
from attnlab.tensors.call import KernelCall


def encoder_arguments(call: KernelCall, target: Target) -> dict[str, Any]:
    """Return the arguments by the names of context_attention_fwd in triton_prefill_attention.py (0.33.0)."""
    return {
        "q": call.query,
        "k": call.key,
        "v": call.value,
        "o": call.output,
        "b_start_loc": call.query_start_loc,
        "b_seq_len": call.seq_lens,
        "max_input_len": call.max_query_len,
        "softmax_scale": call.sm_scale,
        "sinks": call.sinks,
        **mask_arguments(call),
    }
