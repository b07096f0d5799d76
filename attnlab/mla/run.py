"""Run an MlaCase: its path step by step, by ops and exactly, and the fault that explains a wrong output."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelRejected, Unavailable, Unsupported
from attnlab.case.fields import refuse
from attnlab.case.shown import Document, HostileReport, Shown, json_fields, json_number
from attnlab.mla.faults import MLA_FAULTS, SOUND, Fault, Span, chunks_of, faults_of
from attnlab.mla.mla_case import DECODE, MLA_BACKENDS, PACKED, PREFILL, SHARDS, MlaCase, variants_of
from attnlab.mla.partial import (
    Arithmetic,
    DecodeCall,
    Exact,
    Inputs,
    Last,
    MlaOps,
    ModelOps,
    Observed,
    Partial,
    Seen,
    SequenceRows,
    VllmOps,
    copied,
    empty_partial,
    gathered,
    in_pages,
    make_inputs,
    numbers,
    projected,
)
from attnlab.tensors.formats import FORMATS, distance, ratio


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
        if case.chunking == PACKED:
            both = copied(copied(running, part, rows), both, again)
        running = both
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


def _projected(case: MlaCase, inputs: Inputs, fault: Fault) -> list[SequenceRows]:
    """Return keys and values of each sequence: the context from the cache, new tokens as they are."""
    starts, dtype, found = case.lengths.token_start_loc, FORMATS[case.dtype].dtype, []
    for seq, (latent, ctx_len) in enumerate(zip(inputs.latents, case.ctx_lens, strict=True)):
        stored = gathered(case, inputs.cache, inputs.block_table[seq], ctx_len)
        context = numbers(case, stored, fault.read_scale(case)).to(dtype)
        key, value = projected(case, inputs, torch.cat([context, latent[ctx_len:]]))
        rows = slice(starts[seq], starts[seq + 1])
        query = inputs.query[rows].double()
        found.append(SequenceRows(rows=rows, query=query, key=key, value=value))
    return found


def _context(
    case: MlaCase, seqs: list[SequenceRows], spans: list[Span], fault: Fault
) -> list[Seen]:
    found = []
    for span in spans:
        start, end = fault.spans(case, span.continues, span.start, span.end)
        one = seqs[span.seq]
        mask = torch.zeros(one.query.shape[0], one.key.shape[0], dtype=torch.bool)
        mask[:, start:end] = span.end > span.start
        found.append(Seen(sequence=one, mask=mask))
    return found


def _new_tokens(case: MlaCase, seqs: list[SequenceRows]) -> list[Seen]:
    found = []
    for one, ctx_len in zip(seqs, case.ctx_lens, strict=True):
        keys, at = torch.arange(one.key.shape[0]), torch.arange(one.query.shape[0])[:, None]
        found.append(Seen(sequence=one, mask=(keys >= ctx_len) & (keys <= ctx_len + at)))
    return found


def _rows(case: MlaCase, spans: list[Span], again: bool) -> torch.Tensor:
    """Return the rows of the sequences that a chunk begins, or continues; [num_tokens] bool."""
    starts = case.lengths.token_start_loc
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
        tables = torch.cat([tables, tables[:1].expand(pad, -1)])
        lens = torch.cat([lens, lens.new_zeros(pad)])
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
    one = SequenceRows(
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


MATCH, MISMATCH = "match", "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """A step of a path, and its exact result.

    - ``ratio``: [num_tokens, num_heads], the largest error of an output element or the LSE as a multiple of
      its bound; infinite where a result is not finite, 0 for rows that see no key. Of the last merge, only
      the output counts: vLLM does not use its LSE.
    """

    name: str
    kind: str
    result: Partial
    exact: Partial
    ratio: torch.Tensor

    @property
    def is_right(self) -> bool:
        """Answer whether every error is within its bound."""
        return float(self.ratio.amax()) <= 1.0 if self.ratio.numel() else True

    @property
    def wrong_rows(self) -> list[int]:
        """Return the rows with an error beyond its bound."""
        return torch.nonzero((self.ratio > 1).any(1)).flatten().tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MlaResult(Shown):
    """What an MLA path computed, and which fault explains it.

    - ``ops``: whose ops ran. ``planted``: the fault that was planted, or None.
    - ``steps``: in their order; the last one's result is the output.
    - ``candidates``: names of the faults whose predicted output agrees, the narrowest prediction first; empty
      if nothing is wrong.
    """

    case: MlaCase
    ops: str
    planted: str | None
    steps: tuple[StepResult, ...]
    candidates: tuple[str, ...]
    seconds: float

    @property
    def status(self) -> str:
        """Return "match" if the output and its LSE are within their bounds, else "mismatch"."""
        return MATCH if self.last.is_right else MISMATCH

    @property
    def last(self) -> StepResult:
        """Return the step that returns the output."""
        return self.steps[-1]

    @property
    def output(self) -> torch.Tensor:
        """Return the output, [num_tokens, num_heads, value_size]."""
        return self.last.result.output

    @property
    def error(self) -> float:
        """Return the largest error of the output; infinite if it is not finite where it must be."""
        exact = self.last.exact
        error = distance(self.last.result.output, exact.output).amax(2)
        return float(error.masked_fill(exact.lse == -torch.inf, 0.0).amax())

    @property
    def worst(self) -> float:
        """Return the largest error of output or LSE as a multiple of its bound."""
        return float(self.last.ratio.amax())

    @property
    def first_wrong(self) -> str | None:
        """Return the name of the first step that is not right, or None."""
        return next((one.name for one in self.steps if not one.is_right), None)

    @property
    def cause(self) -> str | None:
        """Return the fault that explains the output, or None if nothing is wrong or no fault does."""
        return self.candidates[0] if self.candidates else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values of strict JSON."""
        steps = [
            {"name": one.name, "kind": one.kind, "worst": json_number(float(one.ratio.amax()))}
            for one in self.steps
        ]
        more = ("status", "error", "worst", "first_wrong", "cause")
        found = {**json_fields(self, *more, without=("steps",)), "steps": steps}
        return {**found, "wrong_rows": self.last.wrong_rows}


def compared(result: Partial, exact: Partial, with_lse: bool = True) -> torch.Tensor:
    """Return the largest error of each row and head as a multiple of its bound, [num_tokens, num_heads].

    ``with_lse``: the LSE is compared, too. Where both are NaN, the error is 0. A row that sees no key must
    have an infinite LSE.
    """
    bound, lse_bound = exact.errors
    worst, is_empty = ratio(result.output, exact.output, bound).amax(2), exact.lse == -torch.inf
    if not with_lse:
        return worst.masked_fill(is_empty, 0.0)
    empty_error = torch.where(result.lse.isinf(), 0.0, torch.inf)
    by_lse = ratio(result.lse, exact.lse, lse_bound)
    return torch.where(is_empty, empty_error, torch.maximum(worst, by_lse))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariantResult(Document):
    """A hostile case, why it is one, and its result, or the error for which it could not run."""

    _more = ("status",)

    reason: str
    case: MlaCase
    result: MlaResult | None = None
    error: str | None = None

    @property
    def status(self) -> str:
        """Return "match", "mismatch" or "unavailable"."""
        return "unavailable" if self.result is None else self.result.status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MlaReport(HostileReport):
    """What the hostile cases of MLA found in the ops of a release."""

    release: str
    backend: str
    results: tuple[VariantResult, ...]


def run_path(
    case: MlaCase, ops: MlaOps | None = None, fault: str | None = None, *, explain: bool = True
) -> MlaResult:
    """Run a case by ``ops``, models by default, with a fault planted if one is named.

    ``explain``: search the fault that explains a wrong output. Raises InvalidCase for a fault that cannot
    change the case's output, and Unavailable or KernelRejected if an op cannot run.
    """
    planted = planted_fault(case, fault)
    began = time.perf_counter()
    inputs = make_inputs(case)
    backend = ops or ModelOps()
    observed = walk(case, inputs, Observed(case, backend), planted)
    exact = walk(case, inputs, Exact(case))
    is_alone = case.path == DECODE  # its LSE is a result
    by_name = {one.name: one.result for one in exact}
    steps = tuple(
        StepResult(
            name=one.name,
            kind=one.kind,
            result=one.result,
            exact=by_name[one.name],
            ratio=compared(
                one.result, by_name[one.name], with_lse=one is not observed[-1] or is_alone
            ),
        )
        for one in observed
    )
    found: tuple[str, ...] = ()
    if explain and not steps[-1].is_right:
        found = explanations(case, inputs, steps[-1].result)
    return MlaResult(
        case=case,
        ops=backend.name,
        planted=fault,
        steps=steps,
        candidates=found,
        seconds=time.perf_counter() - began,
    )


def planted_fault(case: MlaCase, name: str | None) -> Fault:
    """Return the fault with a name, SOUND for None; raise InvalidCase if it cannot change the case's
    output."""
    if name is None:
        return SOUND
    if name not in MLA_FAULTS:
        refuse("fault", f"one of {', '.join(MLA_FAULTS)}", name)
    possible = [one.name for one in faults_of(case)]
    if name not in possible:
        refuse("fault", f"one of {', '.join(possible)} for this case", name)
    return MLA_FAULTS[name]


def explanations(case: MlaCase, inputs: Inputs, output: Partial) -> tuple[str, ...]:
    """Return the names of the faults that predict an output and its LSE, the narrowest prediction first.

    A fault predicts them if each element is within the bound of the path with that fault. Faults that are a
    blur come last, unless the case runs with it.
    """
    found = []
    for fault in faults_of(case):
        predicted = walk(case, inputs, Exact(case, lse_as_run=True), fault)[-1].result
        if float(compared(output, predicted, with_lse=case.path == DECODE).amax()) <= 1.0:
            width = torch.nan_to_num(predicted.errors[0]).sum()
            found.append((fault.is_blur == (case.lse_dtype == "float32"), float(width), fault.name))
    return tuple(name for *_, name in sorted(found))


def run_mla(
    case: MlaCase,
    *,
    backend: str = "model",
    source: Path | str | None = None,
    device: str | None = None,
    fault: str | None = None,
) -> MlaResult:
    """Run a path of MLA attention and compare each step with exact attention.

    ``backend``: "model", or "vllm" for vLLM's Triton ops of ``source``, None for the installed vLLM.
    ``fault``: the name of a fault to plant, see ``attnlab.MLA_FAULTS``. Raises InvalidCase for values that
    are not allowed, and Unavailable if the ops cannot run here.
    """
    return run_path(case, ops_of(case, backend, source, device), fault)


def check_mla(
    release: str,
    *,
    backend: str = "model",
    source: Path | str | None = None,
    device: str | None = None,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> MlaReport:
    """Run the hostile cases of MLA for a release, and return what was found."""
    variants, found = variants_of(release), []
    for i, one in enumerate(variants):
        on_case(i, len(variants))
        try:
            result = run_path(one.case, ops_of(one.case, backend, source, device))
            found.append(VariantResult(reason=one.reason, case=one.case, result=result))
        except (Unavailable, Unsupported, KernelRejected) as error:
            found.append(VariantResult(reason=one.reason, case=one.case, error=str(error)))
    return MlaReport(release=release, backend=backend, results=tuple(found))


def ops_of(
    case: MlaCase, backend: str, source: Path | str | None = None, device: str | None = None
) -> MlaOps:
    """Return the ops of a backend; raise InvalidCase for one that does not exist."""
    if backend not in MLA_BACKENDS:
        refuse("backend", f"one of {', '.join(MLA_BACKENDS)}", backend)
    if backend == "model":
        return ModelOps()
    return VllmOps.of(source, case.machine, device)
