"""Origin ``model``: the kernels' contracts in torch, on any machine."""

from collections.abc import Sequence

from attnlab.case.errors import KernelRejected
from attnlab.case.ops import DECODE_FWD, MERGE, PREFILL, UNIFIED, WRITE
from attnlab.contracts.dispatch import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.kernels.model.cache_write import reshape_and_cache_flash
from attnlab.kernels.model.merge import merge_attn_states
from attnlab.kernels.model.prefill import (
    context_attention_fwd,
    decode_attention_fwd,
    unified_attention,
)
from attnlab.kernels.model.rocm_decode import paged_attention_rocm
from attnlab.kernels.model.triton_decode import kernel_paged_attention_2d
from attnlab.tensors.call import KernelCall

_KERNELS = {
    PREFILL: context_attention_fwd,
    TRITON_DECODE: kernel_paged_attention_2d,
    ROCM_DECODE: paged_attention_rocm,
    UNIFIED: unified_attention,
    DECODE_FWD: decode_attention_fwd,
    MERGE: merge_attn_states,
    WRITE: reshape_and_cache_flash,
}


def run(call: KernelCall, target: Target, kernels: Sequence[str]) -> None:
    """Run the kernels in order; each writes its rows of ``call.output``.

    Raises KernelRejected where the real kernel raises; rows that an earlier kernel wrote stay written,
    as they do there.
    """
    for name in kernels:
        if name != ROCM_DECODE:
            _check_triton(call, target)
        _KERNELS[name](call, target)


def _check_triton(call: KernelCall, target: Target) -> None:
    """Raise KernelRejected where Triton cannot compile the kernel for the platform."""
    e4m3 = call.kv_cache_dtype in ("fp8", "fp8_e4m3")
    if e4m3 and not target.platform.triton_e4m3:
        raise KernelRejected(
            "type fp8e4nv not supported in this architecture (Triton needs compute capability 8.9)"
        )
