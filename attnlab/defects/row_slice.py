"""RowSlice: some rows and heads of one sequence."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSlice:
    """Some rows and query heads of one sequence.

    ``tokens``: [n] int64, indices among the sequence's new tokens; ``heads``: [m] int64.
    """

    seq: int
    tokens: torch.Tensor
    heads: torch.Tensor
