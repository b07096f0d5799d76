"""Problem: a kernel call together with what its tensors were meant to hold.

The correct output and the output under a defect are both computed here, for the requested rows and heads
only. A defect changes one of two things on the way: how the cache is read (CacheRead), or the inputs of
attention (AttentionInputs).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import PREFILL
from attnlab.contracts.contract import PARTITION_SIZE, Target, contract
from attnlab.contracts.dispatch import decide, serving
from attnlab.lab.argument_reference import Read, argument_formats, argument_rounding, in_numbers
from attnlab.lab.reference import Int4Rounding, Rounding
from attnlab.tensors.cache import Batch, make_batch, make_cache
from attnlab.tensors.call import KernelCall
from attnlab.tensors.case_call import make_call, make_output, mask_of
from attnlab.tensors.formats import ElementFormat, read_format, store, written_format
from attnlab.tensors.quantised import Formats
from attnlab.tensors.quantised import in_numbers as call_in_numbers

_KEPT_SLICES = 4  # whose inputs a Problem keeps
_KEPT_NUMBERS = 1 << 18  # of the keys of one of them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSlice:
    """Some rows and query heads of one sequence.

    ``tokens``: [n] int64, indices among the sequence's new tokens; ``heads``: [m] int64.
    """

    seq: int
    tokens: torch.Tensor
    heads: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRead:
    """How one sequence's tokens are read from the cache.

    - ``key_row``, ``value_row``: rows of the block table.
    - ``block``, ``offset``: functions applied to block numbers and to offsets within a block.
    - ``format``, ``k_scale``, ``v_scale``: how the stored bytes are decoded; scales are as
      in :class:`attnlab.tensors.call.KernelCall`.
    - ``key_x``: the innermost size of the key cache that the kernel assumes, or None for the true one.
    - ``column_size``: tokens per column of the block table that the kernel assumes, or None for the block
      size.
    - ``transposed``: "key" or "value" (or both) whose inner block dimensions are read in exchanged order.
    """

    key_row: int
    value_row: int
    format: ElementFormat
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    block: Callable[[torch.Tensor], torch.Tensor] = lambda blocks: blocks
    offset: Callable[[torch.Tensor], torch.Tensor] = lambda offsets: offsets
    key_x: int | None = None
    column_size: int | None = None
    transposed: tuple[str, ...] = ()

    def keys(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Read the keys at ``positions`` of the KV heads ``kv``, [n, len(kv), head_size] float64."""
        cache = call.key_cache
        if self.key_x is not None:
            chunks = cache.shape[2] * cache.shape[4] // self.key_x
            cache = cache.reshape(*cache.shape[:2], chunks, cache.shape[3], self.key_x)
        return self._read("key", call, cache, positions, kv)

    def values(self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Read the values at ``positions`` of the KV heads ``kv``, [n, len(kv), head_size] float64."""
        return self._read("value", call, call.value_cache[..., None], positions, kv)

    def _read(
        self,
        name: str,
        call: KernelCall,
        cache: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """Read "key" or "value" from a cache [num_blocks, num_kv_heads, chunks, block_size, x]."""
        is_key = name == "key"
        row, scale = (self.key_row, self.k_scale) if is_key else (self.value_row, self.v_scale)
        blocks, offsets = self._slots(call, row, positions)
        if name in self.transposed:  # [chunks, block_size, x] read as [block_size, chunks, x]
            shape = (*cache.shape[:2], cache.shape[3], cache.shape[2], cache.shape[4])
            stored = cache.reshape(shape)[blocks[:, None], kv[None, :], offsets[:, None]]
        else:
            stored = cache[blocks[:, None], kv[None, :], :, offsets[:, None]]
        numbers = stored.flatten(2)
        if not self.format.is_fp8:
            return numbers.double()
        return self.format.decode(numbers).double() * self._scale(scale, row, blocks, offsets, kv)

    def _slots(
        self, call: KernelCall, row: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, num_blocks = call.block_size, call.key_cache.shape[0]
        columns = (positions // (self.column_size or size)).clamp(max=call.block_table.shape[1] - 1)
        blocks = self.block(call.block_table[row, columns].long())
        return blocks.remainder(num_blocks), self.offset(positions % size).remainder(size)

    def scales(
        self, call: KernelCall, positions: torch.Tensor, kv: torch.Tensor
    ) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """Return k_scale and v_scale at ``positions`` for the KV heads ``kv``: each a number, or a tensor
        that broadcasts against [n, len(kv), head_size]."""
        found = [
            self._scale(scale, row, *self._slots(call, row, positions), kv)
            for scale, row in ((self.k_scale, self.key_row), (self.v_scale, self.value_row))
        ]
        return found[0], found[1]

    @staticmethod
    def _scale(
        scale: float | torch.Tensor,
        row: int,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        kv: torch.Tensor,
    ) -> float | torch.Tensor:
        """Return the scale of some slots and KV heads: a number, or [n or 1, len(kv), 1] float64."""
        if not isinstance(scale, torch.Tensor):
            return scale
        found = scale[row][None, kv] if scale.dim() == 2 else scale[blocks, offsets][:, kv]
        return found.double()[:, :, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """The inputs of attention for some rows of one sequence.

    - ``query``: [rows, heads, head_size]; ``position``: [rows] int64, positions in the sequence.
    - ``key``, ``value``: [keys, heads, head_size], expanded to one per query head; key j has position j.
    - ``visible``: [rows, keys] bool.
    - ``sm_scale``: the factor of the scores.
    - ``alibi_slopes``: [heads] or None; the bias is the slope times
      (key position + ``alibi_shift`` - row position). ``alibi_shift`` is an int or
      broadcasts to [rows, keys]. ``alibi_root``: the bias is the slope times minus the root of the distance.
    - ``apply_softcap``: the function applied to the scaled scores before ALiBi, or None; ``softcap``:
      the cap itself, 0 for none.
    - ``sinks``: [heads], one more logit of each row's softmax without a value, or None.
    - ``first_bias``: [heads], added to the score of the key at position 0, or None.
    - ``key_bias``: [keys], added to the score of each key, or None. ``mask_bias``: [rows, n], added to the
      scores of the first n keys, or None (qq_bias).
    - ``weigh``: replaces the softmax of the scores [heads, rows, keys], or None.
    - ``leak``: [rows, keys] bool or None: keys with weight 0 whose values are multiplied by it, so that
      a NaN reaches the output.
    - ``rounding``: what the kernel that computes these rows rounds; ``int4``: and what else with INT4.
    """

    query: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor
    sm_scale: float
    alibi_slopes: torch.Tensor | None
    rounding: Rounding
    alibi_shift: torch.Tensor | int = 0
    alibi_root: bool = False
    int4: Int4Rounding | None = None
    apply_softcap: Callable[[torch.Tensor], torch.Tensor] | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    first_bias: torch.Tensor | None = None
    leak: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    mask_bias: torch.Tensor | None = None
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """The predicted ``output`` of some rows, and ``bound``, the largest rounding error of a kernel that
    computes it; both [rows, heads, head_size] float64.

    ``sees_nothing``: [rows] bool or None: rows that see no key. Their output is 0, as most kernels return;
    others return NaN, the quotient of 0 and 0.
    """

    output: torch.Tensor
    bound: torch.Tensor
    sees_nothing: torch.Tensor | None = None


def concatenate(parts: Sequence[Predicted]) -> Predicted:
    """Concatenate the rows of all parts."""
    nothing = [
        torch.zeros(len(part.output)).bool() if part.sees_nothing is None else part.sees_nothing
        for part in parts
    ]
    return Predicted(
        output=torch.cat([part.output for part in parts]),
        bound=torch.cat([part.bound for part in parts]),
        sees_nothing=torch.cat(nothing),
    )


def scores_of(inputs: AttentionInputs) -> torch.Tensor:
    """Return the scores, [heads, rows, keys], -inf where a row does not see a key."""
    scores = inputs.query.transpose(0, 1) @ inputs.key.permute(1, 2, 0) * inputs.sm_scale
    if inputs.apply_softcap is not None:
        scores = inputs.apply_softcap(scores)
    if inputs.alibi_slopes is not None:
        key_position = torch.arange(inputs.key.shape[0]) + inputs.alibi_shift
        distance = (key_position - inputs.position[:, None]).to(scores.dtype)
        if inputs.alibi_root:
            distance = -(-distance).clamp(min=0).sqrt()
        scores += inputs.alibi_slopes[:, None, None] * distance
    if inputs.first_bias is not None:
        scores[..., 0] += inputs.first_bias[:, None].to(scores.dtype)
    if inputs.key_bias is not None:
        scores += inputs.key_bias.to(scores.dtype)
    if inputs.mask_bias is not None:
        scores[..., : inputs.mask_bias.shape[1]] += inputs.mask_bias.to(scores.dtype)
    return scores.masked_fill_(~inputs.visible, -torch.inf)


def attention(inputs: AttentionInputs, dtype: torch.dtype | None = None) -> Predicted:
    """Compute the attention of some rows; a row that sees no key gives 0.

    With ``dtype``, round as a kernel does: scores and sums in float32, weights and output in ``dtype``.
    """
    scores = scores_of(inputs)
    sees_nothing = ~inputs.visible.any(1)
    exact = weights_of(inputs, scores).masked_fill(sees_nothing[None, :, None], 0.0)
    finite = inputs.value.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
    output = exact @ finite
    known, error = exact.nan_to_num(0.0).abs(), score_error(inputs)
    bound = (
        inputs.rounding.bound(known, finite, output.nan_to_num(0.0), error)
        if inputs.int4 is None
        else inputs.int4.bound(known, finite, error)
    )
    if dtype is not None:
        weights = weights_of(inputs, scores.float()).to(dtype).float()
        weights = weights.masked_fill(sees_nothing[None, :, None], 0.0)
        output = (weights @ finite.float()).to(dtype).double()
    if not bool(inputs.value.isfinite().all()):
        output = output.masked_fill(_reached_by_nonfinite(inputs), torch.nan)
    return Predicted(
        output=output.double().transpose(0, 1),
        bound=bound.double().transpose(0, 1),
        sees_nothing=sees_nothing if bool(sees_nothing.any()) else None,
    )


def weights_of(inputs: AttentionInputs, scores: torch.Tensor) -> torch.Tensor:
    """Return the weights of the keys, [heads, rows, keys], from their scores."""
    if inputs.weigh is not None:
        return inputs.weigh(scores)
    return softmax(scores, inputs.sinks)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights, [heads, rows, keys]; ``sinks`` [heads] add to each row's sum of exponentials."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]


def _reached_by_nonfinite(inputs: AttentionInputs) -> torch.Tensor:
    """Return which elements depend on a value that is not finite, [heads, rows, head_size] bool: in rows
    that see the key, or to which it leaks."""
    reach = inputs.visible if inputs.leak is None else inputs.visible | inputs.leak
    nonfinite = (~inputs.value.isfinite()).transpose(0, 1).to(inputs.value.dtype)
    return reach.to(nonfinite.dtype) @ nonfinite > 0


def score_error(inputs: AttentionInputs) -> float:
    """Return the largest rounding error of a score."""
    query = float(inputs.query.norm(dim=2).max()) if inputs.query.numel() else 0.0
    finite = inputs.key.nan_to_num(0.0, 0.0, 0.0)
    key = float(finite.norm(dim=2).max()) if finite.numel() else 0.0
    bias = 0.0
    if inputs.alibi_slopes is not None:
        largest = inputs.key.shape[0] ** (0.5 if inputs.alibi_root else 1.0)
        bias = float(inputs.alibi_slopes.abs().max()) * largest
    for added in (inputs.mask_bias, inputs.first_bias):
        bias += 0.0 if added is None else float(added.abs().max())
    size, scale = inputs.query.shape[2], inputs.sm_scale
    error = inputs.rounding.score_error(query, key, size, scale, bias, inputs.softcap)
    return error if inputs.int4 is None else error + inputs.int4.score_error(query, finite, scale)


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
    - ``misread``: of a Case with an op argument, returns the problem if its cache is read wrongly, or if the
      op ignores the argument (None).
    - ``is_native``: the kernels run on a GPU, not under Triton's interpreter.
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
    misread: "Callable[[Read | None], Problem] | None" = None
    is_native: bool = False
    rounds_like_kernel: bool = False
    _kept: dict[RowSlice, AttentionInputs] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _lens: list[tuple[int, int]] = dataclasses.field(default_factory=list, init=False, repr=False)

    @property
    def partition_size(self) -> int:
        """Return the keys per partition of kernels that merge partitions, of ROCm's if the op states none."""
        return self.call.spec.partition_size or PARTITION_SIZE

    @classmethod
    def of_case(
        cls,
        case: Case,
        batch: Batch,
        call: KernelCall,
        before: torch.Tensor | None = None,
        *,
        is_native: bool = False,
        read: Read | None = None,
    ) -> "Problem":
        """Return the problem of a Case and its call; with an output scale, its output is FP8.

        ``read``: a wrong read of a cache in the format of an op argument.
        """
        misread, formats = None, Formats.of_scaled(call, case.machine.fp8_e4m3)
        if case.op_argument != NONE:
            given, plain = (batch, call, before), case.replace(op_argument=NONE)

            def misread(read: Read | None) -> Problem:
                other = plain if read is None else case
                return cls.of_case(other, *given, is_native=is_native, read=read)

            formats = argument_formats(case, call)
            batch, call = in_numbers(case, batch, call, read)
        return cls(
            call=call,
            formats=formats,
            misread=misread,
            is_native=is_native,
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
            call=call_in_numbers(call),
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
        return self._lens_of(seq)[0]

    def seq_len(self, seq: int) -> int:
        """Return the number of tokens of a sequence, context and new."""
        return self._lens_of(seq)[1]

    def _lens_of(self, seq: int) -> tuple[int, int]:
        """Return the numbers of new and of all tokens of a sequence, which are read from the call once."""
        if not self._lens:
            query_lens, seq_lens = self.call.query_start_loc.diff(), self.call.seq_lens
            self._lens.extend(zip(query_lens.tolist(), seq_lens.tolist(), strict=False))
        return self._lens[seq]

    def ctx_len(self, seq: int) -> int:
        """Return the number of tokens of a sequence before its new ones."""
        return self.seq_len(seq) - self.query_len(seq)

    def is_decode(self, seq: int) -> bool:
        """Answer whether the sequence has one new token and the op does not serve it by prefill alone."""
        op = self.call.spec
        is_prefill = op.scores and op.new_tokens_from == "arguments"
        return self.query_len(seq) == 1 and not is_prefill and self.kernels != (PREFILL,)

    def cached_len(self, seq: int) -> int:
        """Return how many of a sequence's tokens its kernel reads from the cache, by the op's contract."""
        if self._has("cached_new_tokens"):
            return self.seq_len(seq)
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
        kernels = serving(self.kernels, self.query_len(seq))
        found = Rounding.of(self.call, self.target, kernels, self.formats)
        return found if self.case is None else argument_rounding(self.case, found)

    def _has(self, op_argument: str) -> bool:
        return self.case is not None and self.case.op_argument == op_argument

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
        """Return the correct inputs of some rows; ``kv_heads`` replaces the KV heads of the query heads.

        Those of the last few slices are kept, if they are small, because all defects change them. Do not
        change their tensors.
        """
        if kv_heads is None and (kept := self._kept.get(row_slice)) is not None:
            return kept
        kv = self.kv_heads_of(row_slice.heads) if kv_heads is None else kv_heads
        key, value = self.intended_kv(row_slice.seq, kv)
        inputs = self._inputs(row_slice, key, value)
        if kv_heads is None and key.numel() <= _KEPT_NUMBERS:
            while len(self._kept) >= _KEPT_SLICES:
                del self._kept[next(iter(self._kept))]
            self._kept[row_slice] = inputs
        return inputs

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
        mask, rounding = mask_of(self.call, row_slice.seq), self.rounding(row_slice.seq)
        position = mask.ctx_len + row_slice.tokens
        slopes, sinks, softcap = self.call.alibi_slopes, self.call.sinks, self.call.softcap
        sinks = None if sinks is None else sinks[row_slice.heads].double()
        of_key_0, is_packed = self._has("sinks_of_key_0"), False
        visible = mask.visible(position)
        if self.case is not None:
            is_packed = self.case.argument.is_packed
            visible &= not (self._has("skip_decode") and self.query_len(row_slice.seq) == 1)
        return AttentionInputs(
            query=self.call.query[self.rows(row_slice)][:, row_slice.heads].double(),
            position=position,
            key=key,
            value=value,
            visible=visible,
            mask_bias=mask.bias(position),
            sm_scale=self.sm_scale,
            alibi_slopes=None if slopes is None else slopes[row_slice.heads].double(),
            alibi_root=self._has("alibi_sqrt"),
            apply_softcap=(
                None if softcap is None else lambda scores: softcap * (scores / softcap).tanh()
            ),
            softcap=softcap or 0.0,
            sinks=None if of_key_0 else sinks,
            first_bias=sinks if of_key_0 else None,
            rounding=rounding,
            int4=Int4Rounding.of(rounding, self.is_native) if is_packed else None,
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
        context = self.ctx_len(seq)
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
        dtype = self.call.query.dtype if self.formats is None else self.formats.query
        found = attention(inputs, dtype if self.rounds_like_kernel else None)
        return dataclasses.replace(found, output=self.clamped(found.output))

    def clamped(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output with the largest number that the call can store as its limit."""
        return output if self.formats is None else self.formats.clamped(output)

    def correct(self, row_slice: RowSlice) -> Predicted:
        """Compute the correct output of some rows."""
        return self.predict(self.attention_inputs(row_slice))

    def correct_output(self) -> Predicted:
        """Compute the correct output of all rows, which lie in the order of their sequences."""
        return concatenate([self.correct(row_slice) for row_slice in all_rows(self)])

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
    """Build the batch, the cache and the call of a Case, and return its problem."""
    batch = make_batch(case) if batch is None else batch
    output = make_output(case)
    call = make_call(case, batch, make_cache(case, batch), output)
    return Problem.of_case(case, batch, call, output)


def all_rows(problem: Problem, kind: str = "all") -> Iterator[RowSlice]:
    """Yield one RowSlice per sequence, with all its rows and heads; ``kind`` is "all", "decode" or
    "prefill"."""
    heads = torch.arange(problem.num_heads)
    for seq in range(problem.num_seqs):
        if kind == "all" or problem.is_decode(seq) == (kind == "decode"):
            yield RowSlice(seq=seq, tokens=torch.arange(problem.query_len(seq)), heads=heads)


def sample_rows(
    problem: Problem, tokens: int = 6, heads: int = 6, max_seqs: int | None = None
) -> list[RowSlice]:
    """Return a few rows of each sequence that ran, with a few heads.

    The first and last rows of a sequence, and the first two heads and the last, are always included. Of
    more than ``max_seqs`` sequences, those with the shortest and the longest queries are taken.
    """
    sampled_heads = torch.linspace(0, problem.num_heads - 1, min(heads, problem.num_heads)).long()
    if problem.num_heads > 1:
        sampled_heads = torch.cat([sampled_heads, torch.tensor([1])]).unique()
    seqs = sorted(problem.computed_seqs(), key=problem.query_len)
    if max_seqs is not None and len(seqs) > max_seqs:
        seqs = sorted({*seqs[: -(-max_seqs // 2)], *seqs[-(max_seqs // 2) :]})
    row_slices = []
    for seq in seqs:
        length = problem.query_len(seq)
        if length:
            rows = torch.linspace(0, length - 1, min(tokens, length)).long().unique()
            row_slices.append(RowSlice(seq=seq, tokens=rows, heads=sampled_heads))
    return row_slices
