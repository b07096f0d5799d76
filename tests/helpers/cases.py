"""Small hostile cases, and helpers to compare their tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.tensors.cache import PagedCache, make_batch, make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output

# (query_len, ctx_len) around the edges of blocks of 16 and partitions of 256, without context, with a
# query longer than the context, and with decodes before, between and after prefills.
HOSTILE_LENS = (
    (1, 1),
    (15, 0),
    (15, 1),
    (1, 15),
    (17, 16),
    (1, 16),
    (40, 3),
    (1, 255),
    (1, 256),
    (3, 254),
    (1, 300),
    (2, 15),
)


def hostile(**changes: Any) -> Case:
    """Return a small Case in which errors are visible, with ``changes``.

    It has shuffled and spare blocks; ragged lengths; two query heads per KV head and three KV heads; NaN
    in every unwritten slot and output row; and N(0, 1) data, for which a wrong scale or mask matters.
    """
    fields: dict[str, Any] = {
        "num_heads": 6,
        "num_queries_per_kv": 2,
        "head_size": 64,
        "block_size": 16,
        "query_lens": tuple(query_len for query_len, _ in HOSTILE_LENS),
        "ctx_lens": tuple(ctx_len for _, ctx_len in HOSTILE_LENS),
        "distribution": "normal",
        "empty_slots": "nan",
        "output_init": "nan",
        "reference_dtype": "float64",
        "seed": 7,
    }
    fields |= changes
    if "num_blocks" not in changes and "block_table" not in changes:
        fields["num_blocks"] = Case(**fields).total_blocks + 5
    return Case(**fields)


def call_of(case: Case) -> tuple[KernelCall, PagedCache]:
    """Return a new call of the Case, and its cache."""
    batch = make_batch(case)
    cache = make_cache(case, batch)
    return make_call(case, batch, cache, make_output(case)), cache


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Answer whether two tensors have the same dtype, shape and bytes, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def decode_rows(case: Case) -> torch.Tensor:
    """Return which output rows belong to decode sequences, [num_tokens] bool."""
    query_lens = torch.tensor(case.lengths.query_lens)
    return torch.repeat_interleave(query_lens == 1, query_lens)


@contextlib.contextmanager
def refused(field: str, match: str | None = None) -> Iterator[None]:
    """Assert that a Case is refused because of this field, in one line."""
    with pytest.raises(InvalidCase, match=match) as raised:
        yield
    assert raised.value.field == field
    assert "\n" not in str(raised.value)
