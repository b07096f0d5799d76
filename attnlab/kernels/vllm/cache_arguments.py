"""Op arguments that pass the cache in another format: scales per token and head, INT4, narrow values."""

import torch

from attnlab.case.case import Case
from attnlab.kernels.vllm.features import DIFFKV
from attnlab.kernels.vllm.passed import Arguments, Passed
from attnlab.kernels.vllm.strides import far_dim, with_gaps
from attnlab.tensors.op_argument_data import latent_size, narrow_size, stored_numbers

VALUE_SCALE = "value_scale"  # what values are stored with, or None for the scale of their numbers


def scaled_cache(case: Case, given: Arguments) -> Arguments:
    """Pass a quantised cache, with NaN as the scales of empty slots.

    Scale caches have gaps, or a dimension that is far apart.
    """
    cache = case.argument.cache
    assert cache is not None
    changed: Arguments = {"kv_quant_mode": cache.mode}
    for name, dim in zip(("k", "v"), cache.far_dims, strict=True):
        # A GPU divides by a number by multiplying with its reciprocal, which rounds in another way.
        chosen = given.get(VALUE_SCALE) if name == "v" else None
        stored, scale = stored_numbers(case, given[name].cpu(), chosen)
        scale = scale.to(given[name].device)
        scales = with_gaps(scale, scale.dim()) if dim is None else far_dim(scale, dim)
        changed |= {name: stored.to(given[name].device), f"{name}_scale_cache": scales}
    return changed


def latent_cache(case: Case, given: Arguments) -> Passed:
    """Pass values that are the first part of the keys, and an output of their width."""
    size = latent_size(case)
    seqs, heads, _ = given["o"].shape
    narrow = given["o"].new_full((seqs, heads, size), float("nan"))
    logits = given["attn_logits"][..., : size + 1].contiguous()
    changed = {
        "v_buffer": given["k_buffer"][..., :size],
        **({"v_scale": given["k_scale"]} if "k_scale" in given else {}),
        "attn_logits": logits,
        "o": narrow,
        "is_mla": True,
    }
    return _narrow(narrow, {**given, **changed})


def diffkv(case: Case, given: Arguments) -> Passed:
    """Pass keys and narrower values as parts of one cache, and an output of the values' width.

    The function is that of the Triton backend for such models; its scratch memory has their width, too.
    """
    size, key = narrow_size(case), given["k"]
    # torch cannot concatenate FP8; bytes of both are what the cache holds.
    parts = [one.view(torch.uint8) for one in (key, given["v"][..., :size].contiguous())]
    cache = torch.cat(parts, -1).view(key.dtype)
    narrow = given["out"].new_full((*given["out"].shape[:2], size), float("nan"))
    changed = {
        "k": cache[..., : key.shape[-1]],
        "v": cache[..., key.shape[-1] :],
        "out": narrow,
    }
    if "softmax_segm_output" in given:
        padded = 1 << (size - 1).bit_length()
        changed["softmax_segm_output"] = given["softmax_segm_output"][..., :padded].contiguous()
    passed = _narrow(narrow, {**given, **changed})
    return Passed(arguments=passed.arguments, finish=passed.finish, function=DIFFKV)


def _narrow(narrow: torch.Tensor, arguments: Arguments) -> Passed:
    """Return what is passed with a narrow output [rows, heads, size]; the rest of the output becomes 0."""

    def finish(output: torch.Tensor) -> None:
        output.zero_()
        output[..., : narrow.shape[-1]] = narrow[: len(output)]

    return Passed(arguments=arguments, finish=finish)
