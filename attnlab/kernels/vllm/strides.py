"""Which strides of their tensors vLLM's Triton ops use, and tensors with other strides.

The kernels get the strides of some dimensions. They take the others from the shape, so these must be those of
a contiguous tensor (vLLM 0.11.2 and 0.33.0).
"""

import math

import torch

from attnlab.case.ops import DECODE_FWD, ENCODER, MERGE, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.tensors.cache import untouched

FAR = 2**31
# By op and parameter: the dimensions whose stride the kernels use are those before this one.
USED_STRIDES: dict[str, dict[str, int]] = {
    WRAPPER: {
        **{"query": 2, "key": 3, "value": 3, "output": 2},
        **{"key_cache": 5, "value_cache": 4, "block_table": 1},
    },
    PREFILL: {
        **{"q": 3, "k": 3, "v": 3, "o": 3},
        **{"k_cache": 5, "v_cache": 4, "b_loc": 2},
    },
    ENCODER: {"q": 2, "k": 2, "v": 2, "o": 2},
    UNIFIED: {
        **{"q": 2, "out": 2, "k": 4, "v": 4, "block_table": 1},
        **{"k_scale_cache": 3, "v_scale_cache": 3},
    },
    DECODE_FWD: {
        **{"q": 2, "o": 2, "k_buffer": 3, "v_buffer": 3},
        **{"lse": 1, "attn_logits": 3, "req_to_token": 1},
    },
    MERGE: {
        **{"output": 2, "prefix_output": 2, "suffix_output": 2},
        **{"prefix_lse": 2, "suffix_lse": 2, "output_lse": 2},
    },
    WRITE: {"key": 1, "value": 1, "key_cache": 3, "value_cache": 3},
}


def with_gaps(tensor: torch.Tensor, used: int) -> torch.Tensor:
    """Return a copy of a tensor in which the strides of the first ``used`` dimensions have gaps.

    The gaps hold NaN, or -1 in a tensor of integers.
    """
    shape = [*tensor.shape, 1]
    shape[used] += 8 if used == tensor.dim() - 1 else 1
    empty = float("nan") if tensor.is_floating_point() else -1
    larger = torch.full(shape, empty, device=tensor.device).to(tensor.dtype)
    part = larger[tuple(slice(size) for size in tensor.shape)][..., 0]
    return part.copy_(tensor)


def far_apart(tensor: torch.Tensor, steps: int = 0) -> torch.Tensor:
    """Return a copy of a tensor with its rows so far apart that ``steps`` of them are beyond 2^31 elements.

    ``steps``: default all but the first. It takes little memory on a CPU. Raises Unavailable if the
    address space is not available.
    """
    steps = max(1, steps or tensor.shape[0] - 1)
    row = tensor[0].numel()
    stride = max(row, -(-(FAR + 64) // steps))
    stride += -stride % 64
    buffer = untouched((stride * (tensor.shape[0] - 1) + row,), tensor.dtype, tensor.device)
    inner = [math.prod(tensor.shape[i + 1 :]) for i in range(1, tensor.dim())]
    return buffer.as_strided(tensor.shape, (stride, *inner)).copy_(tensor)


def far_dim(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy of a tensor whose last index of a dimension is beyond 2^31 elements."""
    return far_apart(tensor.movedim(dim, 0)).movedim(0, dim)


def far_heads(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a copy of a tensor [tokens, heads, head_size] with its heads far apart.

    The last token, or with ``dim`` 1 the last head of a token, is beyond 2^31 elements. merge_attn_states
    computes the stride of a token from that of a head.
    """
    tokens, heads, _ = tensor.shape
    rows = far_apart(tensor.flatten(0, 1), heads - 1 if dim else (tokens - 1) * heads)
    return rows.view(tokens, heads, -1)


def with_padded_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor [tokens, heads, head_size] in which NaN follows each head.

    The stride of a token is that of a head times the heads, as merge_attn_states computes it.
    """
    padded = torch.full((*tensor.shape[:2], tensor.shape[2] + 8), float("nan")).to(tensor)
    return padded[..., : tensor.shape[2]].copy_(tensor)
