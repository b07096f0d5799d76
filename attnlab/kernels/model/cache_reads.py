"""Read a paged cache as the kernels do: by a sequence's row of the block table."""

import torch

from attnlab.contracts.rows import default_scale
from attnlab.contracts.target import Target
from attnlab.tensors.cache import interleaved
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat, read_format


def format_of(call: KernelCall, target: Target) -> ElementFormat:
    """Return the format in which a kernel on this platform decodes the cache's bytes."""
    return read_format(call.kv_cache_dtype, call.query.dtype, target.platform.fp8_e4m3)


def scale_of(call: KernelCall, target: Target) -> float:
    """Return the scale of the scores: as passed, else the op's default by its contract."""
    return call.sm_scale or default_scale(call, target)


def keys(cache: torch.Tensor, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stored keys of some blocks and KV heads, [heads, len(blocks) × block_size, head_size].

    ``cache``: [num_blocks, num_kv_heads, head_size / x, block_size, x].
    """
    return cache[blocks, heads].permute(1, 0, 3, 2, 4).flatten(3, 4).flatten(1, 2)


def values(call: KernelCall, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stored values of some blocks and KV heads, [heads, len(blocks) × block_size,
    head_size]."""
    stored = call.value_cache[blocks, heads]
    if call.interleave_v:
        stored = interleaved(stored, back=True)
    return stored.permute(1, 0, 3, 2).flatten(1, 2)


def dequantised(
    stored: torch.Tensor, format: ElementFormat, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return stored elements as Triton's kernels use them, in float32.

    FP8 elements are multiplied by their scale and rounded to ``dtype``, the query's.
    """
    if not format.is_fp8:
        return stored.float()
    return format.decode(stored, scale).to(dtype).float()


def capped(scores: torch.Tensor, softcap: float | None, overflows: bool) -> torch.Tensor:
    """Return float32 scores under a soft cap, c · tanh(score / c); changes ``scores``.

    With ``overflows`` it is computed from exp(s / c) and exp(-s / c), as in unified_attention before vLLM
    PR #56579: NaN if s / c is above 88.
    """
    if softcap is None:
        return scores
    if not overflows:
        return scores.div_(softcap).tanh_().mul_(softcap)
    up, down = (scores / softcap).exp(), (-scores / softcap).exp()
    return softcap * (up - down) / (up + down)


def weighed(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unnormalised weights of scores [..., keys] and their sums [..., 1]; changes ``scores``.

    Weights are relative to the largest score. ``sinks``, which broadcasts to the sums, is one more logit
    of each row: it may be the largest, it counts once in the sum, and it has no weight.
    """
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(-1, keepdim=True)
    return weights, sums if sinks is None else sums + (sinks - largest).exp()


def rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return softmax weights as the second matrix product reads them: rounded to ``dtype``, in float32."""
    return weights if dtype == torch.float32 else weights.to(dtype).float()
