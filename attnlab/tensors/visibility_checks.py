"""Checks of the fields of a KernelCall that say which keys a row sees; each raises InvalidCall."""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.tensors.shapes import check_dims, check_shape


def check_visibility(given: Mapping[str, Any], num_seqs: int) -> None:
    """Raise InvalidCall unless the fields fit the call. ``given``: each field of a call by its name."""
    causal, ranges = given["causal"], given["mm_prefix_range"]
    if isinstance(causal, torch.Tensor):
        check_shape("causal", causal, (num_seqs,))
    elif not isinstance(causal, bool):
        raise InvalidCall(
            f"causal must be true, false or a tensor, got {causal!r:.40}", field="causal"
        )
    if ranges is not None:
        check_shape(
            "mm_prefix_range", ranges, (num_seqs, check_dims("mm_prefix_range", ranges, 3)[1], 2)
        )
    if given["rswa_prefix_lens"] is not None:
        check_shape("rswa_prefix_lens", given["rswa_prefix_lens"], (num_seqs,))
    if given["qq_bias"] is not None:
        _check_bias(given["qq_bias"], given["query_start_loc"])


def _check_bias(bias: torch.Tensor, query_start_loc: torch.Tensor) -> None:
    """Check that a bias is square and has a row for each new token of the longest sequence."""
    rows, keys = check_dims("qq_bias", bias, 2)
    longest = int(query_start_loc.long().diff().max()) if len(query_start_loc) > 1 else 0
    if rows != keys or rows < longest:
        text = f"qq_bias must be [n, n] with n at least {longest}, the longest query"
        raise InvalidCall(f"{text}, got {tuple(bias.shape)}", field="qq_bias")
