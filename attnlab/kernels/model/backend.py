"""Backend ``model``: the kernels' contracts in torch, on any machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnlab.case.errors import KernelRejected
from attnlab.case.masks import MASKS
from attnlab.case.ops import (
    DECODE_FWD,
    ENCODER,
    MERGE,
    PREFILL,
    RELEASES,
    TRITON_OPS,
    UNIFIED,
    WRITE,
)
from attnlab.contracts.target import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.kernels.backend import Backend, RunOptions, RunOutput
from attnlab.kernels.model.cache_write import reshape_and_cache_flash
from attnlab.kernels.model.merge import merge_attn_states
from attnlab.kernels.model.prefill import (
    context_attention_fwd,
    decode_attention_fwd,
    encoder_attention,
    unified_attention,
)
from attnlab.kernels.model.rocm_decode import paged_attention_rocm
from attnlab.kernels.model.triton_decode import kernel_paged_attention_2d
from attnlab.tensors.call import KernelCall

_KERNELS = {
    PREFILL: context_attention_fwd,
    ENCODER: encoder_attention,
    TRITON_DECODE: kernel_paged_attention_2d,
    ROCM_DECODE: paged_attention_rocm,
    UNIFIED: unified_attention,
    DECODE_FWD: decode_attention_fwd,
    MERGE: merge_attn_states,
    WRITE: reshape_and_cache_flash,
}


def run(call: KernelCall, target: Target, kernels: Sequence[str]) -> None:
    """Run the models of the kernels in order; each writes its rows of ``call.output``.

    Raises KernelRejected if the real kernel raises. Rows of earlier kernels stay written, as in vLLM.
    """
    for name in kernels:
        if name != ROCM_DECODE:
            _check_triton(call, target)
        _KERNELS[name](call, target)


def _check_triton(call: KernelCall, target: Target) -> None:
    """Raise KernelRejected if Triton cannot compile the kernel for the platform."""
    e4m3 = call.kv_cache_dtype in ("fp8", "fp8_e4m3")
    if e4m3 and not target.platform.triton_e4m3:
        raise KernelRejected(
            "type fp8e4nv not supported in this architecture (Triton needs compute capability 8.9)"
        )


@dataclass(frozen=True, kw_only=True)
class ModelBackend(Backend):
    """The models, under the rules of ``rules``, a release."""

    rules: str = RELEASES[-1]

    name = "model"
    ops = TRITON_OPS
    models_prefill = True
    masks = tuple(MASKS)
    blind_spots = (
        "blocks that a sliding window freed: the models do not define what is read before a window",
        "ALiBi with sinks: the models reproduce vLLM's unified_attention, which is wrong there",
    )

    @property
    def is_deterministic(self) -> bool:
        return True

    @property
    def release(self) -> str:
        return self.rules

    @property
    def version(self) -> str:
        return f"models of {self.rules}"

    def text(self, kernels: Sequence[str], target: Target) -> str:
        return self.name

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        run(call, target, kernels)
        return RunOutput()
