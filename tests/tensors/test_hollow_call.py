"""A hollow call differs from the Case's call in its numbers only."""

import dataclasses

import pytest
import torch
from helpers.cases import hostile

from attnlab.case.ops import DECODE_FWD, ENCODER, TRITON_OPS, WRITE
from attnlab.lab.lab import Lab
from attnlab.tensors.case_call import hollow_call


@pytest.mark.parametrize(
    "changes",
    [
        *({"op": op} for op in TRITON_OPS if op not in (DECODE_FWD, ENCODER)),
        {"op": DECODE_FWD, "query_lens": (1, 1), "ctx_lens": (5, 30)},
        {"op": ENCODER, "query_lens": (1, 7), "ctx_lens": (0, 0)},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "op": WRITE},
        {"sinks": True, "alibi": True, "stage": "int64", "pad_batch": 2},
    ],
    ids=str,
)
def test_only_the_numbers_differ(changes):
    """Every other field is equal: shapes, dtypes and strides, index tensors, options."""
    case = hostile(**changes)
    call, hollow = Lab().call(case), hollow_call(case)
    for field in dataclasses.fields(call):
        real, other = getattr(call, field.name), getattr(hollow, field.name)
        if not isinstance(real, torch.Tensor):
            assert other == real, field.name
            continue
        for fact in ("shape", "dtype"):
            assert getattr(other, fact) == getattr(real, fact), (field.name, fact)
        assert other.stride() == real.stride(), field.name
        if not real.is_floating_point() and not field.name.endswith("_cache"):
            assert torch.equal(other, real), field.name
