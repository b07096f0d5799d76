"""The comparison of numbers of which some may be NaN or infinite."""

import torch


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where two tensors have the same number, bool; NaN is the same as NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference in float64: 0 where both are NaN or equal, infinite where one is NaN."""
    one, other = one.double(), other.double()
    far = (one - other).abs().nan_to_num(torch.inf, torch.inf)
    return far.masked_fill(same_numbers(one, other), 0.0)
