"""The tensors of an MlaCase: query, new latents, the paged cache, and what a reader makes of them."""

from dataclasses import dataclass

import torch

from attnlab.mla.mla_case import PREFILL, MlaCase
from attnlab.tensors.formats import FORMATS, ElementFormat, read_format

_SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """Some rows and the keys that they may see; numbers are exact in float64.

    - ``rows``: of the output. ``query``: [rows, num_heads, size]; ``key``: [keys, kv_heads, size]; ``value``:
      [keys, kv_heads, value_size]. kv_heads is num_heads on path prefill, else 1.
    """

    rows: slice
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a call of MLA attention gets.

    - ``query``: [num_tokens, num_heads, size] in the dtype of the case; projected to latents except on path
      prefill.
    - ``cache``: [num_blocks, block_size, latent_size] as stored; slots that no token owns hold NaN.
    - ``block_table``: [num_seqs, max_blocks] int32, in shuffled order.
    - ``latents``: of each sequence, [seq_len, latent_size] in the dtype of the case.
    - ``to_key``, ``to_value``: [kv_lora_rank, num_heads, size], the projections of latents.
    """

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    latents: tuple[torch.Tensor, ...]
    to_key: torch.Tensor
    to_value: torch.Tensor


def cache_format(case: MlaCase) -> ElementFormat:
    """Return the format of the latent cache."""
    return read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, case.machine.fp8_e4m3)


def make_inputs(case: MlaCase) -> Inputs:
    """Return the inputs of a case, from its seed."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    dtype, lengths, rank = FORMATS[case.dtype].dtype, case.lengths, case.kv_lora_rank
    heads, nope = case.num_heads, case.qk_nope_head_dim
    to_key = draw(rank, heads, nope) / rank**0.5
    to_value = draw(rank, heads, case.v_head_dim) / rank**0.5
    query = draw(lengths.num_tokens, heads, nope + case.qk_rope_head_dim) * case.spread
    latents = [draw(seq_len, case.latent_size).to(dtype) for seq_len in lengths.seq_lens]
    cache, table = _paged(case, latents, generator)
    if case.path != PREFILL:
        low = torch.einsum("thp,lhp->thl", query[..., :nope].to(dtype).float(), to_key)
        query = torch.cat([low, query[..., nope:]], dim=2)
    return Inputs(
        query=query.to(dtype),
        cache=cache,
        block_table=table,
        latents=tuple(latents),
        to_key=to_key,
        to_value=to_value,
    )


def row_starts(case: MlaCase) -> list[int]:
    """Return the first row of each sequence, and the number of rows."""
    return case.lengths.token_start_loc


def gathered(case: MlaCase, cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """Return the stored elements of the first ``count`` tokens of a row of a block table, [count,
    latent_size].

    ``table``: [max_blocks].
    """
    at = torch.arange(count)
    return cache[table.long()[at // case.block_size], at % case.block_size]


def numbers(case: MlaCase, stored: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the numbers of stored elements, float64. ``scale``: of FP8."""
    return stored.double() * (scale if cache_format(case).is_fp8 else 1.0)


def projected(
    case: MlaCase, inputs: Inputs, latent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value of latents [n, latent_size] per head, each rounded to the dtype; float64."""
    dtype, rank = FORMATS[case.dtype].dtype, case.kv_lora_rank
    low = latent[:, :rank].float()
    nope = torch.einsum("tl,lhp->thp", low, inputs.to_key).to(dtype).double()
    rope = latent[:, None, rank:].double().expand(-1, case.num_heads, -1)
    value = torch.einsum("tl,lhv->thv", low, inputs.to_value).to(dtype).double()
    return torch.cat([nope, rope], dim=2), value


def _paged(
    case: MlaCase, latents: list[torch.Tensor], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache with all tokens, and the block table."""
    size, format = case.block_size, cache_format(case)
    counts = [-(-len(latent) // size) for latent in latents]
    order = torch.randperm(sum(counts) + _SPARE_BLOCKS, generator=generator).int()
    cache = format.nan.expand(len(order), size, case.latent_size).clone()
    table = torch.zeros(len(latents), max(counts), dtype=torch.int32)
    first = 0
    for seq, (latent, count) in enumerate(zip(latents, counts, strict=True)):
        table[seq, :count] = order[first : first + count]
        at = torch.arange(len(latent))
        slots = table[seq].long()[at // size] * size + at % size
        cache.flatten(0, 1)[slots] = format.encode(latent, case.k_scale)
        first += count
    return cache.view(format.dtype), table
