"""The rounding bound of the weights of an X-ray."""

from collections.abc import Callable

import torch

from attnlab.defects.problem import Problem
from attnlab.lab.rounding import Rounding


def bounds_of(
    problem: Problem,
    seq: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    adjust: Callable[[Rounding], Rounding] = lambda rounding: rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the relative and the fixed part of the bound of a weight, each [R].

    It is the worst-case bound of :mod:`attnlab.lab.rounding` for values of 0 and 1. ``adjust`` returns what
    kernels round instead.
    """
    call = problem.call
    query_norm = float(query.nan_to_num(0.0).norm(dim=2).max()) if query.numel() else 0.0
    key_norm = float(key.nan_to_num(0.0).norm(dim=2).max()) if key.numel() else 0.0
    relative, fixed = {}, {}
    for one in seq.unique().tolist():
        rounding: Rounding = adjust(problem.rounding(one))
        length = problem.seq_len(one)
        slopes = call.alibi_slopes
        bias = 0.0 if slopes is None else float(slopes.abs().max()) * length
        error = rounding.score_error(
            *(query_norm, key_norm, call.query.shape[2], problem.sm_scale, bias),
            call.softcap or 0.0,
        )
        relative[one] = min(rounding.relative(length, error), 1e3)
        fixed[one] = rounding.fixed(length, 1.0) + 1e-9
    rows = seq.tolist()
    return (
        torch.tensor([relative[one] for one in rows], dtype=torch.float64),
        torch.tensor([fixed[one] for one in rows], dtype=torch.float64),
    )
