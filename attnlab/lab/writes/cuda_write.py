"""Run a write by vLLM's CUDA op, compiled from csrc/cache_kernels.cu for the emulated device."""

from collections.abc import Callable

import torch

from attnlab.case.errors import Unsupported
from attnlab.kernels.cuda.cache_ops import cache_ops
from attnlab.kernels.cuda.source_text import has_source
from attnlab.kernels.vllm.source import Source
from attnlab.lab.writes.write_case import DS_LATENT, LATENT, X_SPLIT, WriteCase, WriteInputs


def cuda_write(source: Source) -> Callable[[WriteCase, WriteInputs], None]:
    """Return the writer that calls the CUDA op of a format; it raises Unsupported without the source."""

    def write(case: WriteCase, inputs: WriteInputs) -> None:
        op, tensors = _op(case, inputs)
        if not has_source(source.root):
            raise Unsupported(
                f"{op} is a C++ op: its source csrc/cache_kernels.cu is in an sdist or a checkout, not in "
                f"this vLLM ({source.kind}); attnlab fetch --sdist 0.33.0 downloads one"
            )
        if case.machine.is_rocm:
            raise Unsupported(f"platform must be one of NVIDIA with {op}, got {case.platform}")
        dtype = DS_LATENT if case.cache_format == DS_LATENT else case.kv_cache_dtype
        cache_ops(source.root)(op, tensors, dtype)

    return write


def _op(case: WriteCase, inputs: WriteInputs) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of a format's op, and its tensors by the names of its parameters."""
    first = case.first_block * case.block_size
    caches = {name: _whole(view, case.first_block) for name, view in inputs.caches.items()}
    slots = torch.where(inputs.slots < 0, inputs.slots, inputs.slots + first)
    scales = {name: torch.tensor([getattr(case, name)]) for name in ("k_scale", "v_scale")}
    if case.cache_format in (LATENT, DS_LATENT):
        return "concat_and_cache_mla", {
            "kv_c": inputs.key[:, 0],
            "k_pe": inputs.value[:, 0],
            "kv_cache": caches["kv_cache"][:, :, 0],
            "slot_mapping": slots,
            "scale": scales["k_scale"],
        }
    tensors = {"key": inputs.key, "value": inputs.value, "slot_mapping": slots, **caches, **scales}
    if case.cache_format == X_SPLIT:
        tensors["key_cache"] = caches["key_cache"].permute(0, 2, 3, 1, 4)
        tensors["value_cache"] = caches["value_cache"].permute(0, 2, 3, 1)
        return "reshape_and_cache", tensors
    return "reshape_and_cache_flash", tensors


def _whole(view: torch.Tensor, first_block: int) -> torch.Tensor:
    """Return the view of a cache from block 0 on."""
    return view.as_strided((first_block + view.shape[0], *view.shape[1:]), view.stride(), 0)
