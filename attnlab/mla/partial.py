"""Partial attention: over some keys of each row, in float64, with a bound of what an op may round.

The output of a row without keys is 0, its log-sum-exp (LSE) -inf.

Errors of an op. With scores off by at most s (:meth:`attnlab.lab.rounding.Rounding.score_error`), an output
is off by :meth:`Rounding.bound` and an LSE by s, by (n + 8)·2⁻²³ for n sums in float32, and by half a spacing
of its dtype. An exact part is rounded to the dtype once: u·|o| + t, with u half the spacing at 1 and t the
smallest number of the dtype.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnlab.lab.problem import AttentionInputs, attention, score_error, scores_of
from attnlab.lab.rounding import Rounding
from attnlab.mla.mla_case import PREFILL, MlaCase
from attnlab.tensors.formats import FORMATS, ElementFormat, read_format

# The tensors of an MlaCase: query, new latents, the paged cache, and what a reader makes of them.

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


FLOAT32 = 2.0**-24  # half the spacing at 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """Attention of all rows over some keys, or a merge of such.

    - ``output``: [num_tokens, num_heads, value_size]; ``lse``: [num_tokens, num_heads], base e.
    - ``output_error``, ``lse_error``: by how much an op may be off, of the same shapes; None if this is what
      an op returned.
    """

    output: torch.Tensor
    lse: torch.Tensor
    output_error: torch.Tensor | None = None
    lse_error: torch.Tensor | None = None

    @property
    def errors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bounds of output and LSE of an exact part."""
        assert self.output_error is not None
        assert self.lse_error is not None
        return self.output_error, self.lse_error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """A sequence and which of its keys each row sees, ``mask`` [rows, keys] bool."""

    sequence: Sequence
    mask: torch.Tensor

    def of_keys(self) -> "Seen":
        """Return the same with only the keys that some row sees."""
        keys, one = self.mask.any(0), self.sequence
        few = Sequence(rows=one.rows, query=one.query, key=one.key[keys], value=one.value[keys])
        return Seen(sequence=few, mask=self.mask[:, keys])


def empty_partial(case: MlaCase, tokens: int) -> Partial:
    """Return the exact part of rows that see no key."""
    output = torch.zeros(tokens, case.num_heads, case.value_size).double()
    lse = torch.full((tokens, case.num_heads), -torch.inf).double()
    return Partial(
        output=output,
        lse=lse,
        output_error=torch.zeros_like(output),
        lse_error=torch.zeros_like(lse),
    )


def exact_partial(
    case: MlaCase, part: Iterable[Seen], by_op: bool, lse_dtype: torch.dtype = torch.float32
) -> Partial:
    """Return a partial attention in float64 with the bound of decode_attention_fwd, or of rounding alone."""
    found = empty_partial(case, case.lengths.num_tokens + case.padding)
    output_error, lse_error = found.errors
    for one in part:
        few = one.of_keys()
        rows = few.sequence.rows
        if not few.mask.any():
            continue
        inputs = _inputs(case, few.sequence, few.mask)
        exact, lse = attention(inputs), scores_of(inputs).logsumexp(-1).T
        found.output[rows], found.lse[rows] = exact.output, lse
        lse_unit, _ = unit_and_step(lse_dtype)
        size = finite(lse).abs()
        if by_op:
            sums = (inputs.key.shape[0] + 8) * 2.0**-23
            errors = exact.bound, score_error(inputs) + sums + lse_unit * size
        else:
            unit, step = unit_and_step(FORMATS[case.dtype].dtype)
            errors = unit * exact.output.abs() + step, (lse_unit + FLOAT32) * size
        output_error[rows], lse_error[rows] = errors
    return found


def _inputs(case: MlaCase, one: Sequence, mask: torch.Tensor) -> AttentionInputs:
    """Return the inputs of attention of a sequence, with what decode_attention_fwd rounds."""
    unit, step = unit_and_step(FORMATS[case.dtype].dtype)
    is_fp8 = cache_format(case).is_fp8 and case.path != PREFILL  # there, it reads projected keys
    is_alone = one.key.shape[1] == case.num_heads  # then it multiplies without tl.dot
    rounding = Rounding(
        unit=unit,
        step=step,
        terms=1 + is_fp8,
        parts=0,
        keys=is_fp8,
        products=1 + (one.query.shape[2] - 1).bit_length() if is_alone else 0,
        output_unit=unit,
        output_step=step,
    )
    return AttentionInputs(
        query=one.query,
        position=torch.arange(len(one.query)),
        key=one.key.expand(-1, case.num_heads, -1),
        value=one.value.expand(-1, case.num_heads, -1),
        visible=mask,
        sm_scale=case.scale,
        alibi_slopes=None,
        rounding=rounding,
    )


def unit_and_step(dtype: torch.dtype) -> tuple[float, float]:
    """Return half the spacing of a dtype at 1, and its smallest number."""
    info = torch.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_normal * info.eps)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return an LSE with 0 where it is infinite."""
    return lse.masked_fill(lse.isinf(), 0.0)
