"""Scene: what a call offers to a kernel, right or wrong, some rows of one sequence at a time.

A defect is a change of what is seen here: of how the cache is read (Reading), or of what a row sees and
how it weighs it (Sight). Everything is computed for the rows and heads that are asked for, no others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnlab.case.case import Case
from attnlab.case.ops import PREFILL
from attnlab.contracts.contract import contract
from attnlab.contracts.dispatch import Target, decide
from attnlab.defects.attention_inputs import AttentionInputs, Predicted, join, mix
from attnlab.defects.cache_read import CacheRead
from attnlab.lab.rounding import Rounding
from attnlab.tensors.batch import Batch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat, read_format, store, written_format


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSlice:
    """Some rows of one sequence and some query heads.

    ``tokens``: [n] int64, which of the sequence's new tokens; ``heads``: [m] int64.
    """

    seq: int
    tokens: torch.Tensor
    heads: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A call, and what its tensors were meant to hold.

    - ``case``, ``batch``: where the call was built from them, the tokens that were meant; without them
      the context is taken from the cache and new tokens from the arguments.
    - ``written``, ``encode``: the format that the cache was written in, and how a token becomes bytes.
    - ``seqs``: the sequences that ran, or None where all did.
    - ``before``: what the output buffer held before the call, where that is known.
    - ``kernel_like``: mix as a kernel does, in float32 with weights and output rounded to the query's
      dtype, instead of float64: for outputs to be planted.
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
    kernel_like: bool = False

    @classmethod
    def of_case(
        cls, case: Case, batch: Batch, call: KernelCall, before: torch.Tensor | None = None
    ) -> "Problem":
        """Return the scene of a Case's call."""
        return cls(
            call=call,
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
        """Return the scene of a call alone, as one that was captured elsewhere."""
        written = read_format(call.kv_cache_dtype, call.query.dtype, target.platform.fp8_e4m3)
        return cls(
            call=call,
            target=target,
            kernels=tuple(kernels),
            written=written,
            encode=written.encode,
        )

    # Lengths and who serves whom, as the caller meant them.

    @property
    def num_seqs(self) -> int:
        """Return the number of sequences."""
        return self.call.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        """Return the number of query heads."""
        return self.call.query.shape[1]

    def ran(self) -> range:
        """Return the sequences that ran."""
        return range(self.num_seqs) if self.seqs is None else self.seqs

    def starts(self) -> list[int]:
        """Return the prefix sums of the query lengths, length num_seqs + 1."""
        starts: list[int] = self.call.query_start_loc.tolist()
        return starts

    def query_len(self, seq: int) -> int:
        """Return the new tokens of a sequence."""
        return int(self.call.query_start_loc[seq + 1] - self.call.query_start_loc[seq])

    def seq_len(self, seq: int) -> int:
        """Return all tokens of a sequence."""
        return int(self.call.seq_lens[seq])

    def is_decode(self, seq: int) -> bool:
        """Answer whether the sequence has one new token, and another kernel than prefill serves it."""
        return self.query_len(seq) == 1 and self.kernels != (PREFILL,)

    def cached_len(self, seq: int) -> int:
        """Return how many of a sequence's tokens its kernel takes from the cache, by the op's contract."""
        source = contract(self.call.op, self.target, self.call.op).new_tokens_from
        from_cache = source == "cache" or (source == "by query_len" and self.query_len(seq) == 1)
        return self.seq_len(seq) - (0 if from_cache else self.query_len(seq))

    @property
    def scale(self) -> float:
        """Return the scale of the scores that was meant."""
        return self.call.sm_scale or self.call.query.shape[2] ** -0.5

    def kv_of(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the KV head of each query head."""
        return heads // self.call.num_queries_per_kv

    def rounding(self, seq: int) -> Rounding:
        """Return what the kernel that serves a sequence rounds."""
        if not self.is_decode(seq) and PREFILL in self.kernels:
            return Rounding.of(self.call, self.target, (PREFILL,))
        others = tuple(name for name in self.kernels if name != PREFILL)
        return Rounding.of(self.call, self.target, others)

    # What a row sees.

    def reading(self, seq: int) -> CacheRead:
        """Return how a sequence should be read."""
        return CacheRead(
            key_row=seq,
            value_row=seq,
            format=self.written,
            k_scale=self.call.k_scale,
            v_scale=self.call.v_scale,
        )

    def sight(self, row_slice: RowSlice, kv_of: torch.Tensor | None = None) -> AttentionInputs:
        """Return what some rows should see; ``kv_of`` gives other KV heads to the query heads."""
        kv = self.kv_of(row_slice.heads) if kv_of is None else kv_of
        key, value = self.meant(row_slice.seq, kv)
        return self._sight(row_slice, key, value)

    def sight_as_read(self, row_slice: RowSlice, reading: CacheRead) -> AttentionInputs:
        """Return what some rows see when the cache is read in another way."""
        kv = self.kv_of(row_slice.heads)
        key, value = self.meant(row_slice.seq, kv)
        cached = self.cached_len(row_slice.seq)
        old_key = self.stored_key(reading, torch.arange(cached), kv)
        old_value = self.stored_value(reading, torch.arange(cached), kv)
        return self._sight(
            row_slice, torch.cat([old_key, key[cached:]]), torch.cat([old_value, value[cached:]])
        )

    def _sight(
        self, row_slice: RowSlice, key: torch.Tensor, value: torch.Tensor
    ) -> AttentionInputs:
        seq_len, query_len = self.seq_len(row_slice.seq), self.query_len(row_slice.seq)
        start = self.starts()[row_slice.seq]
        position = seq_len - query_len + row_slice.tokens
        slopes, sinks, softcap = self.call.alibi_slopes, self.call.sinks, self.call.softcap
        return AttentionInputs(
            query=self.call.query[start + row_slice.tokens][:, row_slice.heads].double(),
            position=position,
            key=key,
            value=value,
            visible=visible(position, seq_len, self.call.sliding_window),
            scale=self.scale,
            slopes=None if slopes is None else slopes[row_slice.heads].double(),
            cap=None if softcap is None else lambda scores: softcap * (scores / softcap).tanh(),
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks[row_slice.heads].double(),
            rounding=self.rounding(row_slice.seq),
        )

    def meant(
        self, seq: int, kv: torch.Tensor | slice, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sequence's keys and values of some KV heads as they should be seen, each
        [seq_len, heads, head_size] in ``dtype``."""
        cached, start = self.cached_len(seq), self.starts()[seq]
        if self.batch is not None:
            here = slice(*self.batch.kv_start_loc[seq : seq + 2])
            key, value = self.batch.key[here][:, kv], self.batch.value[here][:, kv]
        else:
            here = slice(start, start + self.query_len(seq))
            key, value = self.call.key[here][:, kv], self.call.value[here][:, kv]
            cached -= self.seq_len(seq) - self.query_len(seq)
        key = self._through_cache(key, cached, self.call.k_scale, dtype)
        value = self._through_cache(value, cached, self.call.v_scale, dtype)
        if self.batch is not None:
            return key, value
        context = torch.arange(self.seq_len(seq) - self.query_len(seq))
        heads = torch.arange(self.call.key.shape[1])[kv]
        old_key = self.stored_key(self.reading(seq), context, heads).to(dtype)
        old_value = self.stored_value(self.reading(seq), context, heads).to(dtype)
        return torch.cat([old_key, key]), torch.cat([old_value, value])

    def _through_cache(
        self, tokens: torch.Tensor, cached: int, scale: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return tokens in ``dtype``, the first ``cached`` of them as they are after they were stored."""
        if not self.written.is_fp8 or cached <= 0:
            return tokens.to(dtype)
        stored = self.written.decode(self.encode(tokens[:cached], scale)).double() * scale
        return torch.cat([stored.to(dtype), tokens[cached:].to(dtype)])

    def stored_key(
        self, reading: CacheRead, positions: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Return keys at ``positions`` of some KV heads, [n, len(kv), head_size] float64."""
        return reading.keys(self.call, positions, kv)

    def stored_value(
        self, reading: CacheRead, positions: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Return values at ``positions`` of some KV heads, [n, len(kv), head_size] float64."""
        return reading.values(self.call, positions, kv)

    # What comes out.

    def mix(self, sight: AttentionInputs) -> Predicted:
        """Return what rows give that see this, with the noise that a kernel may add to it."""
        like = self.call.query.dtype if self.kernel_like else None
        return mix(sight, like)

    def right(self, row_slice: RowSlice) -> Predicted:
        """Return the right output of some rows."""
        return self.mix(self.sight(row_slice))

    def right_rows(self, rows: torch.Tensor, heads: torch.Tensor) -> Predicted:
        """Return the right output of any output rows, in their order."""
        seqs = torch.searchsorted(self.call.query_start_loc.long(), rows, right=True) - 1
        runs, counts = seqs.unique_consecutive(return_counts=True)
        parts, done = [], 0
        for seq, count in zip(runs.tolist(), counts.tolist(), strict=True):
            tokens = rows[done : done + count] - self.starts()[seq]
            parts.append(self.right(RowSlice(seq=seq, tokens=tokens, heads=heads)))
            done += count
        return join(parts)

    def spot_of_row(self, row: int, heads: torch.Tensor) -> RowSlice:
        """Return the spot of one output row."""
        starts = self.call.query_start_loc
        seq = int(torch.searchsorted(starts, row, right=True)) - 1
        return RowSlice(seq=seq, tokens=torch.tensor([row - int(starts[seq])]), heads=heads)

    def rows(self, row_slice: RowSlice) -> torch.Tensor:
        """Return the output rows of a spot, [n] int64."""
        return self.starts()[row_slice.seq] + row_slice.tokens

    def as_kernel(self) -> "Problem":
        """Return the same scene, mixed as a kernel does."""
        return dataclasses.replace(self, kernel_like=True)


def visible(position: torch.Tensor, seq_len: int, sliding_window: int) -> torch.Tensor:
    """Return which keys each row sees, [rows, seq_len] bool: none behind it, none out of its window."""
    keys = torch.arange(seq_len)
    seen = keys <= position[:, None]
    if sliding_window:
        seen &= keys > position[:, None] - sliding_window
    return seen
