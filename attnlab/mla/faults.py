"""The faults of MLA paths that have a name, each with reports of the same."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.mla.mla_case import ALIGNED, DECODE, PREFILL, SHARDS, MlaCase
from attnlab.mla.partial import Partial, finite, unit_and_step
from attnlab.tensors.formats import FORMATS

# The chunks in which the context of a batch is attended (path prefill).


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Keys ``start`` … ``end`` − 1 of the context of sequence ``seq``; the span is empty if they are
    equal."""

    seq: int
    start: int
    end: int

    @property
    def continues(self) -> bool:
        """Answer whether a chunk before has the beginning of the context."""
        return self.start > 0


def chunks_of(case: MlaCase) -> list[list[Span]]:
    """Return the spans of each chunk of a case."""
    return _aligned(case) if case.chunking == ALIGNED else _packed(case)


def _aligned(case: MlaCase) -> list[list[Span]]:
    """Return chunks of the same positions of all sequences, some empty (0.11.2)."""
    size = case.chunk_rows
    return [
        [
            Span(seq=seq, start=min(first, ctx_len), end=min(first + size, ctx_len))
            for seq, ctx_len in enumerate(case.ctx_lens)
        ]
        for first in range(0, max(case.ctx_lens), size)
    ]


def _packed(case: MlaCase) -> list[list[Span]]:
    """Return chunks of up to chunk_rows tokens of several sequences, none empty (0.33.0).

    A context that does not fit is cut at a multiple of block_size, and continues in the next chunk.
    """
    found: list[list[Span]] = []
    spans: list[Span] = []
    left = case.chunk_rows

    def close() -> None:
        nonlocal spans, left
        if spans:
            found.append(spans)
        spans, left = [], case.chunk_rows

    for seq, ctx_len in enumerate(case.ctx_lens):
        if not ctx_len:
            close()  # a chunk has neighbouring sequences
        start = 0
        while start < ctx_len:
            fits = ctx_len - start <= left
            most = min(left, ctx_len - start - 1)
            length = ctx_len - start if fits else most // case.block_size * case.block_size
            if length:
                spans.append(Span(seq=seq, start=start, end=start + length))
                left -= length
                start += length
            if start < ctx_len:
                close()
    close()
    return found


# Fault: one way in which an MLA path can be wrong, as a change of one of its steps.
#
# A fault changes what the path does, not numbers: the same change is made in the exact path, which predicts
# the output (:mod:`attnlab.mla.explain`), and in the path that runs the ops, which plants the fault.

_Rows = Callable[[MlaCase, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A change of a path; each field is one step of it, unchanged by default.

    - ``paths``: where it exists. ``applies``: whether it can change the output of a case.
    - ``seen_in``: reports of the same fault.
    - ``spans``: (start, end) of a chunk's keys; the arguments are the case and whether the chunk continues
      one.
    - ``partial``: a partial attention. ``operands``: the two parts of a merge; ``merged``: the merge of two
      parts. ``ranks``: the parts of a combination.
    - ``overwrites``: a chunk replaces the parts before it. ``tokens_with_context``: the argument of the last
      merge. ``keeps_scale``: the output is not divided by output_scale. ``read_scale``: the cache is read
      without its scale.
    - ``rows``: block tables and lengths of the decode rows. ``slots``: the cache as the decode op addresses
      it. ``value_from``: the first element of the value in a latent.
    - ``is_blur``: it is an error of unknown sign within a bound, such as a rounding.
    """

    name: str
    text: str
    paths: tuple[str, ...]
    applies: Callable[[MlaCase], bool] = lambda case: True
    seen_in: tuple[str, ...] = ()
    spans: Callable[[MlaCase, bool, int, int], tuple[int, int]] = lambda case, more, start, end: (
        start,
        end,
    )
    partial: Callable[[MlaCase, Partial], Partial] = lambda case, one: one
    operands: Callable[[Partial, Partial], tuple[Partial, Partial]] = lambda one, other: (
        one,
        other,
    )
    ranks: Callable[[list[Partial]], list[Partial]] = lambda parts: parts
    merged: Callable[[Partial, Partial, Partial], Partial] = lambda one, other, both: both
    overwrites: bool = False
    tokens_with_context: Callable[[MlaCase, int], int] = lambda case, count: count
    keeps_scale: bool = False
    read_scale: Callable[[MlaCase], float] = lambda case: case.k_scale
    rows: _Rows = lambda case, tables, lens: (tables, lens)
    slots: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache
    value_from: Callable[[MlaCase], int] = lambda case: 0
    is_blur: bool = False


SOUND = Fault(name="sound", text="nothing is wrong", paths=(PREFILL, DECODE, SHARDS))


_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)


def _empty_as_valid(case: MlaCase, one: Partial) -> Partial:
    """Give rows without keys the LSE 0 and the output 0."""
    empty = one.lse.isinf()
    output = one.output.masked_fill(empty[..., None], 0.0)
    return dataclasses.replace(one, lse=one.lse.masked_fill(empty, 0.0), output=output)


def _with_lse_of(one: Partial, other: Partial) -> Partial:
    return dataclasses.replace(one, lse=other.lse, lse_error=other.lse_error)


def _both_empty(one: Partial, other: Partial, both: Partial) -> Partial:
    """Return NaN for the merge of two parts without keys, 0 divided by 0; NaN stays in later merges."""
    empty = (one.lse.isinf() | one.lse.isnan()) & other.lse.isinf() | one.lse.isnan()
    output = both.output.masked_fill(empty[..., None], torch.nan)
    return dataclasses.replace(both, lse=both.lse.masked_fill(empty, torch.nan), output=output)


def _scaled_lse(one: Partial, factor: float) -> Partial:
    error = None if one.lse_error is None else one.lse_error * factor
    return dataclasses.replace(one, lse=one.lse * factor, lse_error=error)


def _without_last(parts: list[Partial]) -> list[Partial]:
    """Empty the last rank's part."""
    last = parts[-1]
    empty = dataclasses.replace(
        last, lse=torch.full_like(last.lse, -torch.inf), output=torch.zeros_like(last.output)
    )
    return [*parts[:-1], empty]


def _rounded_lse(case: MlaCase, one: Partial) -> Partial:
    dtype = FORMATS[case.dtype].dtype
    if one.lse_error is None:
        return dataclasses.replace(one, lse=one.lse.to(dtype).float())
    unit, _ = unit_and_step(dtype)
    error = one.lse_error + unit * (finite(one.lse).abs() + one.lse_error)
    return dataclasses.replace(one, lse_error=error)


def _has_empty_part(case: MlaCase) -> bool:
    """Answer whether some row has a part without keys that is merged."""
    if case.path == SHARDS:
        return min(case.lengths.seq_lens) <= case.interleave_size * (case.num_ranks - 1)
    if case.path != PREFILL or not any(case.ctx_lens):
        return False
    if case.chunking != ALIGNED:
        return 0 in case.ctx_lens and not case.tokens_with_context
    fewest, most = (-(-of(case.ctx_lens) // case.chunk_rows) for of in (min, max))
    return fewest < most


def _is_cut(case: MlaCase) -> bool:
    """Answer whether a context has more than one chunk."""
    if case.path != PREFILL:
        return False
    return any(span.continues for spans in chunks_of(case) for span in spans)


def _has_context(case: MlaCase) -> bool:
    return case.path != PREFILL or any(case.ctx_lens)


def _fewer_with_context(case: MlaCase, count: int) -> int:
    """Return the tokens before the last sequence with a context."""
    pairs = zip(case.query_lens, case.ctx_lens, strict=True)
    return count - [query_len for query_len, ctx_len in pairs if ctx_len][-1]


def _shared_length(
    case: MlaCase, tables: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.tensor(case.query_lens)
    return tables, torch.tensor(case.lengths.seq_lens).repeat_interleave(count).int()


def _tables_in_turn(
    case: MlaCase, tables: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    query_len = case.query_lens[0]
    return tables[::query_len].repeat(query_len, 1), lens


def _as_single_slots(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache with one slot as the distance of two blocks."""
    return cache.as_strided(cache.shape, (cache.stride(1), *cache.stride()[1:]))


_ALL = (
    Fault(
        name="empty_part_as_valid",
        text="a part without keys has the LSE 0, so its output of 0 gets a weight",
        paths=(PREFILL, SHARDS),
        applies=_has_empty_part,
        seen_in=("vLLM #49294", "SGLang #22688"),
        partial=_empty_as_valid,
    ),
    Fault(
        name="both_empty_as_nan",
        text="the merge of two parts without keys is 0 / 0, and NaN stays in the merges after it",
        paths=(PREFILL,),
        applies=lambda case: (
            _has_empty_part(case) and 0 in case.ctx_lens and case.chunking == ALIGNED
        ),
        seen_in=("merge_attn_states of vLLM before 0.27",),
        merged=_both_empty,
    ),
    Fault(
        name="lse_base_2",
        text="the LSE of each part has base 2, and the merge takes it as base e",
        paths=(PREFILL, DECODE, SHARDS),
        applies=_has_context,
        seen_in=("SGLang #33926",),
        partial=lambda case, one: _scaled_lse(one, _LOG2_E),
    ),
    Fault(
        name="merge_base_2",
        text="the LSE of each part has base e, and the merge takes it as base 2",
        paths=(PREFILL, SHARDS),
        applies=_has_context,
        seen_in=("SGLang #33926",),
        operands=lambda one, other: (_scaled_lse(one, _LN_2), _scaled_lse(other, _LN_2)),
        merged=lambda one, other, both: _scaled_lse(both, 1 / _LN_2),
        ranks=lambda parts: [_scaled_lse(one, _LN_2) for one in parts],
    ),
    Fault(
        name="lse_in_query_dtype",
        text="the LSE of each part is rounded to the dtype of the query",
        paths=(PREFILL, SHARDS),
        applies=lambda case: case.dtype != "float32" and _has_context(case),
        seen_in=("vLLM 0.33.0: TRITON_MLA allocates the LSE in the query's dtype",),
        partial=_rounded_lse,
        is_blur=True,
    ),
    Fault(
        name="weights_exchanged",
        text="each part of a merge is multiplied by the weight of the other",
        paths=(PREFILL,),
        applies=_has_context,
        operands=lambda one, other: (_with_lse_of(one, other), _with_lse_of(other, one)),
    ),
    Fault(
        name="chunk_overwrites",
        text="a chunk that continues a context replaces the parts before it",
        paths=(PREFILL,),
        applies=_is_cut,
        overwrites=True,
    ),
    Fault(
        name="chunk_starts_early",
        text="a chunk that continues a context also has the last key of the one before",
        paths=(PREFILL,),
        applies=_is_cut,
        spans=lambda case, more, start, end: (start - more * (end > start), end),
    ),
    Fault(
        name="chunk_starts_late",
        text="a chunk that continues a context lacks its first key",
        paths=(PREFILL,),
        applies=_is_cut,
        spans=lambda case, more, start, end: (start + more, end),
    ),
    Fault(
        name="context_tokens_short",
        text="prefill_tokens_with_context does not count the last sequence with a context",
        paths=(PREFILL,),
        applies=lambda case: case.tokens_with_context and any(case.ctx_lens),
        tokens_with_context=_fewer_with_context,
    ),
    Fault(
        name="output_scale_ignored",
        text="the output is not divided by output_scale",
        paths=(PREFILL,),
        applies=lambda case: case.output_scale not in (None, 1.0) and _has_context(case),
        keeps_scale=True,
    ),
    Fault(
        name="cache_scale_ignored",
        text="the FP8 latents are read without their scale",
        paths=(PREFILL, DECODE, SHARDS),
        applies=lambda case: case.k_scale != 1.0 and _has_context(case),
        read_scale=lambda case: 1.0,
    ),
    Fault(
        name="value_offset",
        text="the value is the last part of the latent, not the first",
        paths=(DECODE,),
        applies=lambda case: case.qk_rope_head_dim > 0,
        value_from=lambda case: case.qk_rope_head_dim,
    ),
    Fault(
        name="page_as_slot",
        text="an entry of the block table is taken as a slot, as with a page size of 1",
        paths=(DECODE,),
        applies=lambda case: case.block_size > 1,
        seen_in=("AITER #2996",),
        slots=_as_single_slots,
    ),
    Fault(
        name="rows_share_length",
        text="every new token of a sequence sees the sequence's last token",
        paths=(DECODE,),
        applies=lambda case: case.query_lens[0] > 1,
        rows=_shared_length,
    ),
    Fault(
        name="tables_in_turn",
        text="block tables are repeated in turn, not each for the tokens of its sequence",
        paths=(DECODE,),
        applies=lambda case: case.query_lens[0] > 1 and len(case.query_lens) > 1,
        rows=_tables_in_turn,
    ),
    Fault(
        name="ranks_exchanged",
        text="each rank's output gets the weight of the next rank",
        paths=(SHARDS,),
        applies=lambda case: case.num_ranks > 1,
        ranks=lambda parts: list(map(_with_lse_of, parts, [*parts[1:], parts[0]])),
    ),
    Fault(
        name="equal_weights",
        text="all ranks have the same weight",
        paths=(SHARDS,),
        applies=lambda case: case.num_ranks > 1,
        ranks=lambda parts: [_with_lse_of(one, parts[0]) for one in parts],
    ),
    Fault(
        name="rank_missing",
        text="the last rank is not added",
        paths=(SHARDS,),
        applies=lambda case: case.num_ranks > 1,
        ranks=_without_last,
    ),
)
MLA_FAULTS: dict[str, Fault] = {one.name: one for one in _ALL}


def faults_of(case: MlaCase) -> tuple[Fault, ...]:
    """Return the faults that can change the output of a case."""
    return tuple(one for one in _ALL if case.path in one.paths and one.applies(case))
