"""The mask of a call in a script: its data as plain tensors, and what its rule depends on."""

from typing import Any

import torch

from attnlab.tensors.call import KernelCall

MASK_TENSORS = ("causal", "mm_prefix_range", "rswa_prefix_lens", "qq_bias")


def mask_facts(call: KernelCall) -> dict[str, Any]:
    """Return what the templates need for a mask: ``mask``, its rule; ``mask_data``, its tensors as text.

    ``mask`` is None for a call whose rows see the keys up to their own. Its ``causal`` is None if a tensor
    says which sequences are causal.
    """
    rules = call.visibility
    if rules.is_plain:
        return {"mask": None, "mask_data": {}}
    by_seq = isinstance(rules.causal, torch.Tensor)
    return {
        "mask": {
            "name": " and ".join(one.replace("_", " ") for one in rules.masks),
            "causal": None if by_seq else bool(rules.causal),
            "chunk": _chunk(call) if rules.has_chunks else 0,
            "lookback": rules.chunk_lookback,
            "right": rules.window_right if rules.causal is not True else None,
            "prefix": rules.rswa_prefix_lens is not None,
            "ranges": rules.mm_prefix_range is not None,
            "clamp": rules.mm_prefix_clamp_sliding_window and rules.sliding_window > 0,
            "bias": rules.qq_bias is not None,
        },
        "mask_data": {
            name: tensor_text(one)
            for name in MASK_TENSORS
            if isinstance(one := getattr(call, name), torch.Tensor)
        },
    }


def tensor_text(tensor: torch.Tensor) -> str:
    """Return a tensor as an expression, with its dtype."""
    numbers = repr(tensor.tolist()).replace("inf", 'float("inf")')
    return f"torch.tensor({numbers}, dtype={tensor.dtype})"


def _chunk(call: KernelCall) -> int:
    """Return the tokens of a chunk."""
    return max(1, call.sliding_window // (call.chunk_lookback + 1))
