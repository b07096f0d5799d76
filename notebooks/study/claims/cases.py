"""The Cases of the experiments: the test's own, and small ones like it."""

from collections.abc import Mapping
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import KernelRejected
from attnlab.case.pytest_id import tolerance_of_test
from attnlab.lab.lab import Lab

MODEL = "models of the ROCm kernel and of Triton's"


def like_the_test(**changes: Any) -> Case:
    """Return a small Case with the test's tolerance: two prefills, then one decode sequence."""
    fields: dict[str, Any] = {
        "num_heads": 64,
        "head_size": 128,
        "query_lens": (33, 40, 1),
        "ctx_lens": (40, 17, 65),
        "stage": "cast_after_cumsum",
        "platform": "gfx942",
        "x": 8,
    }
    return Case(**with_tolerance(fields | changes))


def seed_size(**changes: Any) -> Case:
    """Return the Case of the test without ALiBi, as drawn with seed 0."""
    return Case(**with_tolerance({"stage": "cast_after_cumsum", "x": 8, **changes}))


def with_tolerance(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Case, with the test's tolerance unless they have another."""
    atol = tolerance_of_test(fields.get("kv_cache_dtype", "auto"), fields.get("alibi", False))
    return {"atol": atol, **fields}


def decode_at_seed_size(**changes: Any) -> Case:
    """Return only the decode sequence of the test: 929 tokens of context, 64 heads of 128."""
    return like_the_test(query_lens=(1,), ctx_lens=(929,), max_query_len=1024, **changes)


def outcome(case: Case) -> str:
    """Return the error with which a kernel rejects a Case, or the number of wrong elements."""
    result = Lab().run(case)
    return result.error if result.error is not None else f"{result.errors.mismatched} wrong"  # type: ignore[union-attr]


def is_rejected(case: Case) -> bool:
    """Answer whether a kernel rejects the Case."""
    try:
        Lab().output(case)
    except KernelRejected:
        return True
    return False


def decode_error(case: Case) -> float:
    """Return the largest error of the last sequence, which decodes; NaN if the Case is rejected."""
    errors = Lab().run(case).errors
    return float("nan") if errors is None else errors.seq_error()[-1]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a float16 tensor as int16."""
    return tensor.contiguous().view(torch.int16)
