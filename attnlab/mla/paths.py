"""The three paths to the output, step by step, with any arithmetic and any fault."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab.mla.arithmetic import Arithmetic, copied
from attnlab.mla.faults import SOUND, Fault, Span, chunks_of
from attnlab.mla.mla_case import DECODE, PACKED, PREFILL, SHARDS, MlaCase
from attnlab.mla.ops import DecodeCall, Last, in_pages
from attnlab.mla.partial import (
    Inputs,
    Partial,
    Seen,
    Sequence,
    empty_partial,
    gathered,
    numbers,
    projected,
    row_starts,
)
from attnlab.tensors.formats import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A step of a path and what it returned.

    ``kind``: "partial" or "merge"; the last step's result is the output.
    """

    name: str
    kind: str
    result: Partial


def walk(case: MlaCase, inputs: Inputs, how: Arithmetic, fault: Fault = SOUND) -> list[Step]:
    """Return the steps of the case's path."""
    return _PATHS[case.path](case, inputs, how, fault)


def _prefill(case: MlaCase, inputs: Inputs, how: Arithmetic, fault: Fault) -> list[Step]:
    """Attend the context in chunks and the new tokens, and merge."""
    seqs, steps = _projected(case, inputs, fault), list[Step]()
    running: Partial | None = None
    for i, spans in enumerate(chunks_of(case)):
        name = f"chunk {i}"
        part = fault.partial(case, how.partial(_context(case, seqs, spans, fault)))
        steps.append(Step(name=name, kind="partial", result=part))
        if running is None and case.chunking == PACKED:
            running = _in_numbers_of(
                part, fault.partial(case, empty_partial(case, case.lengths.num_tokens))
            )
        if running is None:
            running = part
            continue
        rows, again = (_rows(case, spans, one) for one in (False, True))
        if fault.overwrites or not again.any():
            running = copied(running, part, rows | again)
            continue
        both = fault.merged(running, part, how.merge(*fault.operands(running, part)))
        running = (
            both if case.chunking != PACKED else copied(copied(running, part, rows), both, again)
        )
        steps.append(Step(name=f"merge {name}", kind="merge", result=running))
    new = fault.partial(case, how.partial(_new_tokens(case, seqs)))
    steps.append(Step(name="new tokens", kind="partial", result=new))
    if running is None:
        return steps
    count = fault.tokens_with_context(case, case.num_with_context)
    last = Last(
        tokens_with_context=count if case.tokens_with_context else None,
        output_scale=case.output_scale,
        divisor=case.output_scale and (1.0 if fault.keeps_scale else case.output_scale),
    )
    output = fault.merged(running, new, how.merge(*fault.operands(running, new), last))
    return [*steps, Step(name="merge new tokens", kind="merge", result=output)]


def _projected(case: MlaCase, inputs: Inputs, fault: Fault) -> list[Sequence]:
    """Return keys and values of each sequence: the context from the cache, new tokens as they are."""
    starts, dtype, found = row_starts(case), FORMATS[case.dtype].dtype, []
    for seq, (latent, ctx_len) in enumerate(zip(inputs.latents, case.ctx_lens, strict=True)):
        stored = gathered(case, inputs.cache, inputs.block_table[seq], ctx_len)
        context = numbers(case, stored, fault.read_scale(case)).to(dtype)
        key, value = projected(case, inputs, torch.cat([context, latent[ctx_len:]]))
        rows = slice(starts[seq], starts[seq + 1])
        query = inputs.query[rows].double()
        found.append(Sequence(rows=rows, query=query, key=key, value=value))
    return found


def _context(case: MlaCase, seqs: list[Sequence], spans: list[Span], fault: Fault) -> list[Seen]:
    found = []
    for span in spans:
        start, end = fault.spans(case, span.continues, span.start, span.end)
        one = seqs[span.seq]
        mask = torch.zeros(one.query.shape[0], one.key.shape[0], dtype=torch.bool)
        mask[:, start:end] = span.end > span.start
        found.append(Seen(sequence=one, mask=mask))
    return found


def _new_tokens(case: MlaCase, seqs: list[Sequence]) -> list[Seen]:
    found = []
    for one, ctx_len in zip(seqs, case.ctx_lens, strict=True):
        keys, at = torch.arange(one.key.shape[0]), torch.arange(one.query.shape[0])[:, None]
        found.append(Seen(sequence=one, mask=(keys >= ctx_len) & (keys <= ctx_len + at)))
    return found


def _rows(case: MlaCase, spans: list[Span], again: bool) -> torch.Tensor:
    """Return the rows of the sequences that a chunk begins, or continues; [num_tokens] bool."""
    starts = row_starts(case)
    rows = torch.zeros(starts[-1], dtype=torch.bool)
    for span in spans:
        is_again = span.continues or (case.chunking != PACKED)
        rows[starts[span.seq] : starts[span.seq + 1]] = is_again == again
    return rows


def _in_numbers_of(part: Partial, empty: Partial) -> Partial:
    """Return an exact empty part as ``part`` stores its numbers."""
    if part.output_error is not None:
        return empty
    return Partial(output=empty.output.to(part.output.dtype), lse=empty.lse.to(part.lse.dtype))


def _decode(case: MlaCase, inputs: Inputs, how: Arithmetic, fault: Fault) -> list[Step]:
    """Attend to the latents, a row for each new token, as TRITON_MLA calls decode_attention_fwd."""
    count = torch.tensor(case.query_lens)
    tables = inputs.block_table.repeat_interleave(count, 0)
    at = torch.cat([torch.arange(1, n + 1) for n in case.query_lens])
    lens = (torch.tensor(case.ctx_lens).repeat_interleave(count) + at).int()
    tables, lens = fault.rows(case, tables, lens)
    query, pad = inputs.query, case.padding
    if pad:
        query = torch.cat([query, query[:1].expand(pad, -1, -1)])
        tables, lens = (
            torch.cat([tables, tables[:1].expand(pad, -1)]),
            torch.cat([lens, lens.new_zeros(pad)]),
        )
    cache, first = fault.slots(inputs.cache), fault.value_from(case)
    call = DecodeCall(
        query=query,
        key=cache[:, :, None],
        value=cache[:, :, None, first : first + case.kv_lora_rank],
        table=tables,
        lens=lens,
        num_splits=case.num_splits,
        scale=case.scale,
        k_scale=fault.read_scale(case),
        is_mla=first == 0,
        lse_dtype=FORMATS[case.dtype].dtype,
    )
    seen = []
    for row, length in enumerate(lens.tolist()):
        stored = gathered(case, cache, tables[row], length)
        seen.append(_latent_row(case, row, query[row], numbers(case, stored, call.k_scale), first))
    found = fault.partial(case, how.decode(call, seen))
    return [Step(name="decode", kind="partial", result=found)]


def _latent_row(
    case: MlaCase, row: int, query: torch.Tensor, latent: torch.Tensor, first: int = 0
) -> Seen:
    """Return a row that sees all of some latents, [n, latent_size]."""
    value = latent[:, None, first : first + case.kv_lora_rank]
    one = Sequence(
        rows=slice(row, row + 1), query=query[None].double(), key=latent[:, None], value=value
    )
    return Seen(sequence=one, mask=torch.ones(1, len(latent), dtype=torch.bool))


def _shards(case: MlaCase, inputs: Inputs, how: Arithmetic, fault: Fault) -> list[Step]:
    """Attend to each rank's tokens, and combine the ranks."""
    stored = [
        gathered(case, inputs.cache, inputs.block_table[seq], seq_len)
        for seq, seq_len in enumerate(case.lengths.seq_lens)
    ]
    scale, dtype = fault.read_scale(case), FORMATS[case.dtype].dtype
    parts = []
    for rank in range(case.num_ranks):
        own = [one[ranks_of(case, len(one)) == rank] for one in stored]
        key, table = in_pages([one[:, None] for one in own], case.block_size)
        call = DecodeCall(
            query=inputs.query,
            key=key,
            value=key[..., : case.kv_lora_rank],
            table=table,
            lens=torch.tensor([len(one) for one in own]).int(),
            num_splits=case.num_splits,
            scale=case.scale,
            k_scale=scale,
            is_mla=True,
            lse_dtype=torch.float32 if case.lse_dtype == "float32" else dtype,
        )
        seen = [
            _latent_row(case, row, inputs.query[row], numbers(case, one, scale))
            for row, one in enumerate(own)
        ]
        parts.append(fault.partial(case, how.decode(call, seen)))
    steps = [
        Step(name=f"rank {rank}", kind="partial", result=part) for rank, part in enumerate(parts)
    ]
    output = how.combine(fault.ranks(parts))
    return [*steps, Step(name="combine ranks", kind="merge", result=output)]


def ranks_of(case: MlaCase, seq_len: int) -> torch.Tensor:
    """Return which rank has each token of a sequence, [seq_len]."""
    return torch.arange(seq_len) // case.interleave_size % case.num_ranks


_PATHS: dict[str, Callable[[MlaCase, Inputs, Arithmetic, Fault], list[Step]]] = {
    PREFILL: _prefill,
    DECODE: _decode,
    SHARDS: _shards,
}
