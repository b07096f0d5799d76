"""Partial attention: over some keys of each row, in float64, with a bound of what an op may round.

The output of a row without keys is 0, its log-sum-exp (LSE) -inf.

Errors of an op. With scores off by at most s (:meth:`attnlab.lab.reference.Rounding.score_error`), an output
is off by :meth:`Rounding.bound` and an LSE by s, by (n + 8)·2⁻²³ for n sums in float32, and by half a spacing
of its dtype. An exact part is rounded to the dtype once: u·|o| + t, with u half the spacing at 1 and t the
smallest number of the dtype.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from attnlab.case.errors import Unsupported
from attnlab.case.ops import DECODE_FWD, MERGE
from attnlab.case.platforms import Platform
from attnlab.kernels.vllm.backend import calling, load
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.problem import AttentionInputs, attention, score_error, scores_of
from attnlab.lab.reference import Rounding
from attnlab.mla.mla_case import DECODE, PREFILL, SHARDS, MlaCase
from attnlab.tensors.formats import FORMATS, ElementFormat, read_format

_SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRows:
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

    sequence: SequenceRows
    mask: torch.Tensor

    def of_keys(self) -> "Seen":
        """Return the same with only the keys that some row sees."""
        keys, one = self.mask.any(0), self.sequence
        few = SequenceRows(rows=one.rows, query=one.query, key=one.key[keys], value=one.value[keys])
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


def _inputs(case: MlaCase, one: SequenceRows, mask: torch.Tensor) -> AttentionInputs:
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


# The ops of an MLA path: models in torch, or those of a vLLM release.
#
# All tensors are on the CPU; :class:`VllmOps` moves them to its device and back.

_COMBINE_MODULES = ("dcp", "common")  # of correct_attn_out: 0.33.0, older releases
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeCall:
    """A call of decode_attention_fwd as TRITON_MLA makes it, with one row per new token.

    - ``query``: [rows, num_heads, size]; ``key``: [blocks, block_size, kv_heads, size]; ``value``: its view
      [..., :value_size], or another tensor.
    - ``table``: [rows, max_blocks] int32; ``lens``: [rows] int32, the keys of each row.
    - ``is_mla``: whether the value is the first part of the key. ``lse_dtype``: of the LSE.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    num_splits: int
    scale: float
    k_scale: float
    is_mla: bool
    lse_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """What the last merge also does: see the fields of the same names of an MlaCase.

    ``divisor``: by what the output is divided; the reader multiplies it by ``output_scale``.
    """

    tokens_with_context: int | None = None
    output_scale: float | None = None
    divisor: float | None = None


NOT_LAST = Last()


class MlaOps(Protocol):
    """The ops that a path uses."""

    @property
    def name(self) -> str:
        """Return whose the ops are."""

    def decode(self, call: DecodeCall) -> Pair:
        """Return output [rows, num_heads, value_size] and LSE [rows, num_heads]."""

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        """Return the output in ``dtype`` and the LSE of two parts, each an output and its LSE."""

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        """Return output and LSE of outputs [ranks, rows, heads, size] and LSE [ranks, rows, heads]."""


@dataclass(frozen=True, slots=True)
class ModelOps:
    """Models of vLLM's ops, in float32."""

    name: str = "model"

    def decode(self, call: DecodeCall) -> Pair:
        rows, heads, _ = call.query.shape
        output = call.query.new_zeros(rows, heads, call.value.shape[-1])
        lse = torch.full((rows, heads), -torch.inf, dtype=call.lse_dtype)
        group = heads // call.key.shape[2]
        for row, length in enumerate(call.lens.tolist()):
            if not length:
                continue
            blocks = call.table[row, : -(-length // call.key.shape[1])].long()
            key, value = (
                self._numbers(cache[blocks].flatten(0, 1)[:length], call).repeat_interleave(
                    group, 1
                )
                for cache in (call.key, call.value)
            )
            scores = torch.einsum("hd,nhd->hn", call.query[row].float(), key) * call.scale
            lse[row] = scores.logsumexp(1)
            output[row] = torch.einsum("hn,nhd->hd", scores.softmax(1), value)
        return output, lse

    @staticmethod
    def _numbers(stored: torch.Tensor, call: DecodeCall) -> torch.Tensor:
        if stored.element_size() > 1:
            return stored.float()
        return (stored.float() * call.k_scale).to(call.query.dtype).float()

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        lses = [lse.masked_fill(lse == torch.inf, -torch.inf) for _, lse in (prefix, suffix)]
        total = torch.logaddexp(*lses)
        weights = [(lse - total).exp().nan_to_num(0.0)[..., None] for lse in lses]
        output = weights[0] * prefix[0].float() + weights[1] * suffix[0].float()
        count = last.tokens_with_context
        if count is not None:
            output[count:], total[count:] = suffix[0][count:].float(), suffix[1][count:]
        if last.divisor is not None:
            most = torch.finfo(dtype).max
            output = (output / last.divisor).clamp(-most, most)
        return output.to(dtype), total

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        lses = lses.float().nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        total = lses.logsumexp(0)
        factors = (lses - total).exp().nan_to_num(0.0)[..., None]
        corrected = (outputs.float() * factors).masked_fill(factors == 0, 0.0).to(outputs.dtype)
        return _sum(corrected), total


@dataclass(frozen=True, kw_only=True)
class VllmOps:
    """The Triton ops of a vLLM release: on a GPU, or on a CPU with Triton's interpreter.

    ``where``: "cuda" or "cpu". Raises Unavailable or KernelRejected if an op cannot run.
    """

    source: Source
    platform: Platform
    where: str = "cpu"

    @classmethod
    def of(
        cls, path: Path | str | None, platform: Platform, device: str | None = None
    ) -> "VllmOps":
        """Return the ops of the vLLM at ``path``, None for the installed one."""
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(source=find_source(path), platform=platform, where=where)

    @property
    def name(self) -> str:
        """Return the source and where it runs."""
        how = torch.cuda.get_device_name() if self.where == "cuda" else "Triton interpreter"
        return f"{self.source.text()}, {how}"

    def decode(self, call: DecodeCall) -> Pair:
        rows, heads, _ = call.query.shape
        size = call.value.shape[-1]
        output = torch.zeros(rows, heads, size, dtype=call.query.dtype)
        logits = (rows, heads, call.num_splits, size + 1)
        key = call.key.to(self.where)
        value = key[..., :size] if call.is_mla else call.value.to(self.where)
        scale = torch.tensor(call.k_scale, device=self.where)
        given = {
            "q": call.query,
            "k_buffer": key,
            "v_buffer": value,
            "o": output,
            "lse": torch.zeros(rows, heads, dtype=call.lse_dtype),
            "req_to_token": call.table,
            "b_seq_len": call.lens,
            "attn_logits": torch.full(logits, float("nan")),
            "num_kv_splits": call.num_splits,
            "sm_scale": call.scale,
            "page_size": call.key.shape[1],
            "k_scale": scale,
            "v_scale": scale,
            "is_mla": call.is_mla,
        }
        function = self._op(DECODE_FWD)
        known = inspect.signature(function).parameters
        if "k_scale" not in known and call.key.element_size() == 1:
            raise Unsupported("kv_cache_dtype must be auto: decode_attention_fwd has no FP8 scales")
        given = {name: value for name, value in given.items() if name in known}
        done = self._run(DECODE_FWD, function, given)
        return done["o"], done["lse"]

    def merge(self, prefix: Pair, suffix: Pair, dtype: torch.dtype, last: Last) -> Pair:
        given = {
            "output": torch.empty(prefix[0].shape, dtype=dtype),
            "prefix_output": prefix[0],
            "prefix_lse": prefix[1].T.contiguous(),
            "suffix_output": suffix[0],
            "suffix_lse": suffix[1].T.contiguous(),
            "output_lse": torch.full(prefix[1].T.shape, float("nan")),
            "prefill_tokens_with_context": last.tokens_with_context,
            "output_scale": None if last.divisor is None else torch.tensor([last.divisor]),
        }
        done = self._run(MERGE, self._op(MERGE), {k: v for k, v in given.items() if v is not None})
        return done["output"], done["output_lse"].T

    def combine(self, outputs: torch.Tensor, lses: torch.Tensor) -> Pair:
        correct = self._combine_op()
        corrected = []
        for rank, output in enumerate(outputs):
            output = output.clone().to(self.where)
            given = {"out": output, "lses": lses.contiguous(), "cp_rank": rank, "ctx": _Context()}
            done = self._run("correct_attn_out", correct, given)
            corrected.append(done["result"][0].cpu())
        return _sum(corrected), done["result"][1].cpu()

    def _op(self, name: str) -> Callable[..., Any]:
        return load(self.source, self.platform, self.where).function(name)

    def _combine_op(self) -> Callable[..., Any]:
        loader = load(self.source, self.platform, self.where).loader
        for name in _COMBINE_MODULES:
            try:
                found = getattr(loader.load(name), "correct_attn_out", None)
            except Unsupported:
                continue
            if found is not None:
                return found  # type: ignore[no-any-return]
        raise Unsupported(f"vLLM {self.source.version} has no correct_attn_out")

    def _run(self, op: str, function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """Run a function; return its arguments, on the CPU, and what it returns as "result"."""
        moved = {
            k: v.to(self.where) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }
        with calling(op, self.source):
            result = function(**moved)
        done = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in moved.items()}
        return {**done, "result": result}


class _Context:
    """Replace vLLM's CPTritonContext, which caches a compiled kernel: launch it each time."""

    def call_kernel(self, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        kernel[grid](*args, **constants)


def _sum(corrected: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum over ranks in the outputs' dtype, as an all-reduce adds them."""
    return functools.reduce(torch.add, corrected)


def in_pages(tokens: Sequence[torch.Tensor], block_size: int) -> Pair:
    """Return tokens [n, kv_heads, size] of each sequence in pages, and the block table.

    Slots without a token hold NaN; the pages are in reversed order.
    """
    counts = [-(-len(one) // block_size) for one in tokens]
    total = max(1, sum(counts))
    shape = (total, block_size, *tokens[0].shape[1:])
    pages = torch.full(shape, float("nan")).to(tokens[0].dtype)
    table = torch.zeros(len(tokens), max(1, *counts), dtype=torch.int32)
    used = 0
    for seq, (one, count) in enumerate(zip(tokens, counts, strict=True)):
        blocks = torch.arange(total - used - 1, total - used - 1 - count, -1)
        table[seq, :count] = blocks.int()
        at = torch.arange(len(one))
        pages[blocks[at // block_size], at % block_size] = one
        used += count
    return pages, table


# Merges of partial attentions: exact, with the error that a merge in float32 may make.
#
# Two parts a and b with weights w and 1 − w give w·a + (1 − w)·b, where w depends on the difference of
# their LSE alone. If that is off by d, then w is off by at most w·(1 − w)·(e^d − 1), because the logistic
# function σ has σ(x + d) − σ(x) ≤ σ(x)·(1 − σ(x))·(e^d − 1). So a merge is off by at most the sum of
#
# - w·(error of a) + (1 − w)·(error of b);
# - w·(1 − w)·(e^d − 1)·|b − a|, with d the errors of both LSE plus (|difference| + 8)·2⁻²³ for float32;
# - 8·2⁻²⁴·(w·|a| + (1 − w)·|b|) for the products in float32;
# - the rounding of the result to its dtype.
#
# The merged LSE is off by at most the larger error of the two, plus (|LSE| + 8)·2⁻²³. A combination of n
# ranks multiplies each output by exp(LSE of the rank − LSE of all), rounds it to the dtype and adds the
# results in the dtype: n roundings of the magnitudes.

_SUMS = 2.0**-23


def merged(first: Partial, second: Partial, dtype: torch.dtype) -> Partial:
    """Return the merge of two exact parts, and by how much an op may be off."""
    lse = torch.logaddexp(first.lse, second.lse)
    weights = [_weight(one.lse, lse) for one in (first, second)]
    (a_error, a_lse), (b_error, b_lse) = first.errors, second.errors
    away = (first.lse - second.lse).abs().nan_to_num(0.0, posinf=0.0)
    shift = (a_lse + b_lse + (away + 8) * _SUMS).clamp(max=80.0)
    moved = (weights[0] * weights[1] * shift.expm1())[..., None] * (
        first.output - second.output
    ).abs()
    w, v = (one[..., None] for one in weights)
    output = w * first.output + v * second.output
    magnitude = w * first.output.abs() + v * second.output.abs()
    unit, step = unit_and_step(dtype)
    error = w * a_error + v * b_error + moved + 4 * _SUMS * magnitude
    lse_error = torch.where(weights[0] > 0, a_lse, 0.0).maximum(
        torch.where(weights[1] > 0, b_lse, 0.0)
    )
    return Partial(
        output=output,
        lse=lse,
        output_error=error * (1 + unit) + unit * output.abs() + step,
        lse_error=lse_error + (finite(lse).abs() + 8) * _SUMS,
    )


def combined(parts: Sequence[Partial], dtype: torch.dtype) -> Partial:
    """Return the combination of the ranks' exact parts, and by how much an op may be off."""
    lse = torch.stack([one.lse for one in parts]).logsumexp(0)
    weights = [_weight(one.lse, lse)[..., None] for one in parts]
    output = sum((w * one.output for w, one in zip(weights, parts, strict=True)), torch.zeros(()))
    largest = torch.stack(
        [torch.where(one.lse == -torch.inf, 0.0, one.errors[1]) for one in parts]
    ).amax(0)
    size = finite(lse).abs()
    shift = (2 * largest + (size + 8) * 2 * _SUMS).clamp(max=80.0).expm1()[..., None]
    unit, step = unit_and_step(dtype)
    error = torch.zeros_like(parts[0].output)
    for w, one in zip(weights, parts, strict=True):
        magnitude = w * one.output.abs()
        error += w * one.errors[0] + shift * w * (one.output - output).abs()
        error += (len(parts) * unit + 8 * _SUMS * (1 + size[..., None])) * magnitude + len(
            parts
        ) * step
    return Partial(
        output=output,
        lse=lse,
        output_error=error * (1 + unit),
        lse_error=largest + (size + 8) * _SUMS,
    )


def copied(target: Partial, source: Partial, rows: torch.Tensor) -> Partial:
    """Return ``target`` with the rows of ``source`` at ``rows`` [num_tokens] bool."""
    changes: dict[str, Any] = {}
    for name in ("output", "lse", "output_error", "lse_error"):
        old, new = getattr(target, name), getattr(source, name)
        if old is None or new is None:
            changes[name] = None
        else:
            changes[name] = torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)
    return dataclasses.replace(target, **changes)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (lse - total).exp().nan_to_num(0.0)  # -inf minus -inf: no part has keys


@dataclass(frozen=True, slots=True)
class Exact:
    """Float64, with the bounds of ops.

    ``lse_as_run``: the LSE of ranks may have the rounding of the dtype in which the case has it. By default
    it may not: what a combination of ranks loses by it is an error.
    """

    case: MlaCase
    lse_as_run: bool = False

    def partial(self, part: Sequence[Seen]) -> Partial:
        return exact_partial(self.case, part, self.case.partials == "op")

    def decode(self, call: DecodeCall, part: Sequence[Seen]) -> Partial:
        by_op = self.case.path == DECODE or self.case.partials == "op"
        is_run = self.case.path == DECODE or self.lse_as_run
        return exact_partial(self.case, part, by_op, call.lse_dtype if is_run else torch.float32)

    def merge(self, one: Partial, other: Partial, last: Last = NOT_LAST) -> Partial:
        found = merged(one, other, FORMATS[self.case.dtype].dtype)
        if last.tokens_with_context is not None:
            is_new = torch.arange(len(found.lse)) >= last.tokens_with_context
            found = copied(found, other, is_new)
        if last.output_scale is None or last.divisor is None:
            return found
        return self._as_fp8(found, last.output_scale, last.divisor)

    def _as_fp8(self, found: Partial, scale: float, divisor: float) -> Partial:
        """Add the rounding of an FP8 output; numbers beyond its range are clamped."""
        dtype = FORMATS[self.case.machine.fp8_e4m3].dtype
        unit, step = unit_and_step(dtype)
        limit, factor = float(torch.finfo(dtype).max) * scale, scale / divisor
        error, lse_error = found.errors
        output = found.output * factor
        return Partial(
            output=output.clamp(-limit, limit),
            lse=found.lse,
            output_error=error * factor * (1 + unit) + unit * output.abs() + step * scale,
            lse_error=lse_error,
        )

    def combine(self, parts: list[Partial]) -> Partial:
        return combined(parts, FORMATS[self.case.dtype].dtype)


@dataclass(frozen=True, slots=True)
class Observed:
    """The ops of a backend, on tensors of the case's dtype."""

    case: MlaCase
    ops: MlaOps

    def partial(self, part: Sequence[Seen]) -> Partial:
        case, dtype = self.case, FORMATS[self.case.dtype].dtype
        if case.partials == "exact":
            exact = exact_partial(case, part, by_op=False)
            output, lse = exact.output.to(dtype), exact.lse.float()
        else:
            output, lse = self._by_op(part, dtype)
        if case.path == PREFILL and case.empty_lse == "inf":
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return Partial(output=output, lse=lse)

    def _by_op(self, part: Sequence[Seen], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part by decode_attention_fwd, over keys and values of each sequence in pages."""
        case, tokens = self.case, self.case.lengths.num_tokens
        output = torch.zeros(tokens, case.num_heads, case.value_size, dtype=dtype)
        lse = torch.full((tokens, case.num_heads), -torch.inf)
        few = [one.of_keys() for one in part if one.mask.any()]
        if not few:
            return output, lse
        key, table = in_pages([one.sequence.key.to(dtype) for one in few], case.block_size)
        value, _ = in_pages([one.sequence.value.to(dtype) for one in few], case.block_size)
        rows = torch.cat([torch.arange(tokens)[one.sequence.rows] for one in few])
        counts = torch.tensor([one.sequence.query.shape[0] for one in few])
        call = DecodeCall(
            query=torch.cat([one.sequence.query for one in few]).to(dtype),
            key=key,
            value=value,
            table=table.repeat_interleave(counts, 0),
            lens=torch.cat([one.mask.sum(1) for one in few]).int(),
            num_splits=4,
            scale=case.scale,
            k_scale=1.0,
            is_mla=False,
        )
        output[rows], lse[rows] = self.ops.decode(call)
        return output, lse

    def decode(self, call: DecodeCall, part: Sequence[Seen]) -> Partial:
        if self.case.partials == "exact" and self.case.path == SHARDS:
            exact = exact_partial(self.case, part, by_op=False)
            pair = exact.output.to(call.query.dtype), exact.lse.to(call.lse_dtype)
        else:
            pair = self.ops.decode(call)
        return Partial(output=pair[0], lse=pair[1].float())

    def merge(self, one: Partial, other: Partial, last: Last = NOT_LAST) -> Partial:
        scale, dtype = last.output_scale, one.output.dtype
        if scale is not None:
            dtype = FORMATS[self.case.machine.fp8_e4m3].dtype
        parts = (one.output, one.lse), (other.output, other.lse)
        output, lse = self.ops.merge(*parts, dtype, last)
        return Partial(output=output if scale is None else output.float() * scale, lse=lse)

    def combine(self, parts: list[Partial]) -> Partial:
        outputs = torch.stack([one.output for one in parts])
        output, lse = self.ops.combine(outputs, torch.stack([one.lse for one in parts]))
        return Partial(output=output, lse=lse.float())


Arithmetic = Exact | Observed  # how a path computes its steps
