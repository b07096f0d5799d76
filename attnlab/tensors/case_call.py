"""The call of a Case: its output buffer, its index tensors, and its KernelCall."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.tensors.batch import Batch
from attnlab.tensors.cache import PagedCache, garbage
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_visibility import visibility_of
from attnlab.tensors.formats import FORMATS, read_format
from attnlab.tensors.origin import Origin
from attnlab.tensors.shapes import INDEX_DTYPES
from attnlab.tensors.visibility import Visibility


def make_query_start_loc(query_lens: Sequence[int], how: str) -> torch.Tensor:
    """Return the prefix sums of ``query_lens``, [num_seqs + 1], computed as a stage of the test did.

    ``torch.cumsum`` of int32 returns int64. So "int32_before_cumsum", the test's first fix, gives int64;
    this function computes it in the same way.
    """
    lens = [0, *query_lens]
    if how == "int64":
        return torch.cumsum(torch.tensor(lens, dtype=torch.long), dim=0)
    if how == "int32_before_cumsum":
        return torch.cumsum(torch.tensor(lens, dtype=torch.int), dim=0)
    return torch.cumsum(torch.tensor(lens), dim=0).to(torch.int32)


def make_output(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the output buffer before the call, on ``device``: recycled memory, NaN or zeros.

    vLLM's test allocates it with ``torch.empty``. Recycled memory is modelled by
    :func:`attnlab.tensors.cache.garbage`, so that an unwritten row never passes by chance.
    """
    shape = (case.lengths.num_tokens, case.num_heads, case.head_size)
    dtype = FORMATS[case.dtype].dtype
    if case.spec.writes_cache:
        shape = (case.total_blocks * case.block_size, case.num_kv_heads, 2 * case.head_size)
        dtype = read_format(case.kv_cache_dtype, dtype, case.machine.fp8_e4m3).dtype
    if case.output_init == "recycled":
        return garbage(shape, seed=case.seed + 4, device=device).to(dtype)
    fill = float("nan") if case.output_init == "nan" else 0.0
    return torch.full(shape, fill, dtype=dtype, device=device)


def make_call(
    case: Case,
    batch: Batch,
    cache: PagedCache,
    output: torch.Tensor,
    new_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> KernelCall:
    """Return the Case's call on its batch and cache; the op will write ``output``.

    ``new_tokens``: key and value of the new tokens, if they have been copied before.
    """
    key, value = new_tokens or batch.new_tokens()
    return call_of(
        case,
        cache.provenance.block_table,
        query=batch.query,
        key=key,
        value=value,
        output=output,
        key_cache=cache.key,
        value_cache=cache.value,
        alibi_slopes=batch.alibi_slopes,
        sinks=batch.sinks,
    )


def _visibility_fields(case: Case) -> dict[str, Any]:
    """Return the fields of a call that say which keys its rows see."""
    rules = visibility_of(case)
    return {one.name: getattr(rules, one.name) for one in fields(Visibility)}


def call_of(case: Case, block_table: torch.Tensor, **tensors: Any) -> KernelCall:
    """Return the Case's call of some ``tensors``, by their names, with its index tensors and options."""
    staging = case.staging
    return KernelCall(
        op=case.op,
        **tensors,
        kv_cache_dtype=case.kv_cache_dtype,
        block_table=block_table.to(INDEX_DTYPES[staging.block_table]),
        query_start_loc=make_query_start_loc(case.lengths.query_lens, staging.query_start_loc),
        seq_lens=torch.tensor(case.lengths.seq_lens, dtype=INDEX_DTYPES[staging.seq_lens]),
        max_seq_len=case.passed_max_seq_len,
        max_query_len=case.passed_max_query_len,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        **_visibility_fields(case),
        sm_scale=case.sm_scale,
        softcap=case.softcap,
        num_splits=case.num_splits,
        interleave_v=case.interleave_v,
        strides=case.kv_layout,
        padding=case.pad_batch,
        origin=Origin(release=case.release, platform=case.platform, backend=case.backend),
    )
