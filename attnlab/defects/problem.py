"""Problem: a kernel call together with what its tensors were meant to hold.

The correct output and the output under a defect are both computed here, for the requested rows and heads
only. A defect changes one of two things on the way: how the cache is read (CacheRead), or the inputs of
attention (AttentionInputs).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.ops import ENCODER, PREFILL
from attnlab.contracts.dispatch import decide
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.target import Target
from attnlab.defects.attention_inputs import (
    AttentionInputs,
    Predicted,
    attention,
    concatenate,
)
from attnlab.defects.cache_read import CacheRead
from attnlab.defects.row_slice import RowSlice
from attnlab.lab.rounding import Rounding
from attnlab.tensors.batch import Batch, make_batch
from attnlab.tensors.cache import make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output
from attnlab.tensors.formats import ElementFormat, read_format, store, written_format
from attnlab.tensors.quantised import Formats, in_numbers
from attnlab.tensors.sequence_mask import mask_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A call, and what its tensors were meant to hold.

    - ``case``, ``batch``: what the call was built from. Without them, the context is what the cache
      holds and the new tokens are the arguments ``key`` and ``value``.
    - ``written``, ``encode``: the format in which the cache was written, and the function from tokens
      and scale to bytes.
    - ``seqs``: the sequences that ran, or None for all.
    - ``before``: contents of the output buffer before the call, or None if unknown.
    - ``formats``: how a call stores its query and output, if not plainly; ``call`` has their numbers.
    - ``rounds_like_kernel``: predict outputs as a kernel rounds them (sums in float32; weights and output
      in the query's dtype) instead of in float64. Fault injection uses this.
    """

    call: KernelCall
    target: Target
    kernels: tuple[str, ...]
    written: ElementFormat
    encode: Callable[[torch.Tensor, float], torch.Tensor]
    case: Case | None = None
    seqs: range | None = None
    batch: Batch | None = None
    before: torch.Tensor | None = None
    formats: Formats | None = None
    rounds_like_kernel: bool = False

    @classmethod
    def of_case(
        cls, case: Case, batch: Batch, call: KernelCall, before: torch.Tensor | None = None
    ) -> "Problem":
        """Return the problem of a Case and its call; with an output scale, its output is FP8."""
        return cls(
            call=call,
            formats=Formats.of_scaled(call, case.machine.fp8_e4m3),
            target=Target.of(case),
            kernels=decide(case).kernels,
            written=written_format(case),
            encode=lambda tokens, scale: store(case, tokens, scale),
            case=case,
            seqs=None if case.seq_range is None else range(*case.seq_range),
            batch=batch,
            before=before,
        )

    @classmethod
    def of_call(cls, call: KernelCall, target: Target, kernels: Sequence[str]) -> "Problem":
        """Return the problem of a call without a Case, such as a captured one."""
        written = read_format(call.kv_cache_dtype, call.query.dtype, target.platform.fp8_e4m3)
        return cls(
            call=in_numbers(call),
            formats=Formats.of(call, target.platform.fp8_e4m3),
            target=target,
            kernels=tuple(kernels),
            written=written,
            encode=written.encode,
        )

    @property
    def num_seqs(self) -> int:
        """Return the number of sequences."""
        return self.call.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.call.query.shape[1]

    def computed_seqs(self) -> range:
        """Return the sequences that ran."""
        return range(self.num_seqs) if self.seqs is None else self.seqs

    def row_starts(self) -> list[int]:
        """Return the prefix sums of the query lengths, length num_seqs + 1."""
        return list(self.call.query_start_loc.tolist())

    def query_len(self, seq: int) -> int:
        """Return the number of new tokens of a sequence."""
        return int(self.call.query_start_loc[seq + 1] - self.call.query_start_loc[seq])

    def seq_len(self, seq: int) -> int:
        """Return the number of tokens of a sequence, context and new."""
        return int(self.call.seq_lens[seq])

    def is_decode(self, seq: int) -> bool:
        """Answer whether the sequence has one new token and the op does not serve it by prefill alone."""
        return self.query_len(seq) == 1 and self.kernels not in ((PREFILL,), (ENCODER,))

    def cached_len(self, seq: int) -> int:
        """Return how many of a sequence's tokens its kernel reads from the cache, by the op's contract."""
        source = contract(self.call.op, self.target, self.call.op).new_tokens_from
        from_cache = source == "cache" or (source == "by query_len" and self.query_len(seq) == 1)
        return self.seq_len(seq) - (0 if from_cache else self.query_len(seq))

    @property
    def sm_scale(self) -> float:
        """Return the intended scale of the scores."""
        return self.call.sm_scale or self.call.query.shape[2] ** -0.5

    def kv_heads_of(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the KV head of each query head."""
        return heads // self.call.num_queries_per_kv

    def rounding(self, seq: int) -> Rounding:
        """Return what the kernel that serves a sequence rounds."""
        if not self.is_decode(seq) and PREFILL in self.kernels:
            return Rounding.of(self.call, self.target, (PREFILL,), self.formats)
        others = tuple(name for name in self.kernels if name != PREFILL)
        return Rounding.of(self.call, self.target, others, self.formats)

    # Inputs of a row.

    def cache_read(self, seq: int) -> CacheRead:
        """Return the correct way to read a sequence from the cache."""
        return CacheRead(
            key_row=seq,
            value_row=seq,
            format=self.written,
            k_scale=self.call.k_scale,
            v_scale=self.call.v_scale,
        )

    def attention_inputs(
        self, row_slice: RowSlice, kv_heads: torch.Tensor | None = None
    ) -> AttentionInputs:
        """Return the correct inputs of some rows; ``kv_heads`` replaces the KV heads of the query heads."""
        kv = self.kv_heads_of(row_slice.heads) if kv_heads is None else kv_heads
        key, value = self.intended_kv(row_slice.seq, kv)
        return self._inputs(row_slice, key, value)

    def inputs_read_by(self, row_slice: RowSlice, cache_read: CacheRead) -> AttentionInputs:
        """Return the inputs of some rows if the cache is read as ``cache_read`` describes."""
        kv = self.kv_heads_of(row_slice.heads)
        key, value = self.intended_kv(row_slice.seq, kv)
        cached = torch.arange(self.cached_len(row_slice.seq))
        cached_key = cache_read.keys(self.call, cached, kv)
        cached_value = cache_read.values(self.call, cached, kv)
        return self._inputs(
            row_slice,
            torch.cat([cached_key, key[len(cached) :]]),
            torch.cat([cached_value, value[len(cached) :]]),
        )

    def _inputs(
        self, row_slice: RowSlice, key: torch.Tensor, value: torch.Tensor
    ) -> AttentionInputs:
        mask = mask_of(self.call, row_slice.seq)
        position = mask.ctx_len + row_slice.tokens
        slopes, sinks, softcap = self.call.alibi_slopes, self.call.sinks, self.call.softcap
        return AttentionInputs(
            query=self.call.query[self.rows(row_slice)][:, row_slice.heads].double(),
            position=position,
            key=key,
            value=value,
            visible=mask.visible(position),
            mask_bias=mask.bias(position),
            sm_scale=self.sm_scale,
            alibi_slopes=None if slopes is None else slopes[row_slice.heads].double(),
            apply_softcap=(
                None if softcap is None else lambda scores: softcap * (scores / softcap).tanh()
            ),
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks[row_slice.heads].double(),
            rounding=self.rounding(row_slice.seq),
        )

    def intended_kv(
        self, seq: int, kv: torch.Tensor | slice, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that rows of a sequence should see, of some KV heads, each
        [seq_len, heads, head_size] in ``dtype``."""
        if self.batch is None:
            return self._kv_of_call(seq, kv, dtype)
        cached = self.cached_len(seq)
        tokens = slice(*self.batch.kv_start_loc[seq : seq + 2])
        key, value = self.batch.key[tokens][:, kv], self.batch.value[tokens][:, kv]
        key = self._through_cache(key, cached, self.call.k_scale, dtype)
        return key, self._through_cache(value, cached, self.call.v_scale, dtype)

    def _kv_of_call(
        self, seq: int, kv: torch.Tensor | slice, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a call without a Case: from the cache, and from its new tokens."""
        context = self.seq_len(seq) - self.query_len(seq)
        known = context if self.call.new_tokens == "given" else self.seq_len(seq)
        heads = torch.arange(self.call.key.shape[1])[kv]
        read, positions = self.cache_read(seq), torch.arange(known)
        cached_key = read.keys(self.call, positions, heads).to(dtype)
        cached_value = read.values(self.call, positions, heads).to(dtype)
        if known > context:
            return cached_key, cached_value
        tokens = slice(*self.row_starts()[seq : seq + 2])
        new = (self.call.key[tokens][:, kv], self.call.value[tokens][:, kv])
        new_in_cache = self.cached_len(seq) - context
        scales = (self.call.k_scale, self.call.v_scale)
        if new_in_cache > 0:
            scales = read.scales(self.call, torch.arange(context, self.seq_len(seq)), heads)
        key, value = (
            self._through_cache(one, new_in_cache, scale, dtype)
            for one, scale in zip(new, scales, strict=True)
        )
        return torch.cat([cached_key, key]), torch.cat([cached_value, value])

    def _through_cache(
        self, tokens: torch.Tensor, cached: int, scale: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return tokens in ``dtype``; the first ``cached`` of them lose what the cache's format loses.

        ``scale``: a number, or a tensor of the tokens' scales that broadcasts against them.
        """
        if not self.written.is_fp8 or cached <= 0:
            return tokens.to(dtype)
        stored = self.written.decode(self.encode(tokens[:cached], scale)).double() * scale
        return torch.cat([stored.to(dtype), tokens[cached:].to(dtype)])

    def predict(self, inputs: AttentionInputs) -> Predicted:
        """Compute the output of rows with these inputs, and the largest rounding error of a kernel."""
        found = attention(inputs, self.call.query.dtype if self.rounds_like_kernel else None)
        return dataclasses.replace(found, output=self.clamped(found.output))

    def clamped(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output with the largest number that the call can store as its limit."""
        return output if self.formats is None else self.formats.clamped(output)

    def correct(self, row_slice: RowSlice) -> Predicted:
        """Compute the correct output of some rows."""
        return self.predict(self.attention_inputs(row_slice))

    def correct_rows(self, rows: torch.Tensor, heads: torch.Tensor) -> Predicted:
        """Compute the correct output of any output rows, in their order."""
        seqs = torch.searchsorted(self.call.query_start_loc.long(), rows, right=True) - 1
        runs, counts = seqs.unique_consecutive(return_counts=True)
        parts, done = [], 0
        for seq, count in zip(runs.tolist(), counts.tolist(), strict=True):
            tokens = rows[done : done + count] - self.row_starts()[seq]
            parts.append(self.correct(RowSlice(seq=seq, tokens=tokens, heads=heads)))
            done += count
        return concatenate(parts)

    def row_slice_of(self, row: int, heads: torch.Tensor) -> RowSlice:
        """Return the RowSlice of one output row."""
        seq = int(torch.searchsorted(self.call.query_start_loc, row, right=True)) - 1
        tokens = torch.tensor([row - int(self.call.query_start_loc[seq])])
        return RowSlice(seq=seq, tokens=tokens, heads=heads)

    def rows(self, row_slice: RowSlice) -> torch.Tensor:
        """Return the output rows of a RowSlice, [n] int64."""
        return self.row_starts()[row_slice.seq] + row_slice.tokens

    def with_kernel_rounding(self) -> "Problem":
        """Return the same problem, predicting outputs as a kernel rounds them."""
        return dataclasses.replace(self, rounds_like_kernel=True)


def make_problem(case: Case, batch: Batch | None = None) -> Problem:
    """Build the batch, the cache and the call of a Case, and return its problem.

    ``batch``: the Case's batch if it has been made.
    """
    batch = make_batch(case) if batch is None else batch
    output = make_output(case)
    call = make_call(case, batch, make_cache(case, batch), output)
    return Problem.of_case(case, batch, call, output)
