"""Models of vLLM's attention kernels in torch: they follow the contracts, on any machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attnlab.case.errors import KernelRejected
from attnlab.case.masks import MASKS
from attnlab.case.ops import (
    DECODE_FWD,
    ENCODER,
    MERGE,
    PREFILL,
    RELEASES,
    TRITON_OPS,
    UNIFIED,
    WRITE,
)
from attnlab.contracts.contract import (
    PARTITION_SIZE,
    PREFILL_TILE,
    ROCM_DECODE,
    TRITON_DECODE,
    Contract,
    Target,
    contract,
)
from attnlab.contracts.slot_states import as_read, cached_lens, default_scale, grid_rows, served
from attnlab.kernels.backend import Backend, RunOptions, RunOutput, counted
from attnlab.tensors.cache import garbage, interleaved, to_flash
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import ElementFormat, on_levels, read_format
from attnlab.tensors.visibility import SequenceMask

# Read a paged cache as the kernels do: by a sequence's row of the block table.


def format_of(call: KernelCall, target: Target) -> ElementFormat:
    """Return the format in which a kernel on this platform decodes the cache's bytes."""
    return read_format(call.kv_cache_dtype, call.query.dtype, target.platform.fp8_e4m3)


def scale_of(call: KernelCall, target: Target) -> float:
    """Return the scale of the scores: as passed, else the op's default by its contract."""
    return call.sm_scale or default_scale(call, target)


def keys(cache: torch.Tensor, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stored keys of some blocks and KV heads, [heads, len(blocks) × block_size, head_size].

    ``cache``: [num_blocks, num_kv_heads, head_size / x, block_size, x].
    """
    return cache[blocks, heads].permute(1, 0, 3, 2, 4).flatten(3, 4).flatten(1, 2)


def values(call: KernelCall, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stored values of some blocks and KV heads, [heads, len(blocks) × block_size,
    head_size]."""
    stored = call.value_cache[blocks, heads]
    if call.interleave_v:
        stored = interleaved(stored, back=True)
    return stored.permute(1, 0, 3, 2).flatten(1, 2)


def dequantised(
    stored: torch.Tensor, format: ElementFormat, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return stored elements as Triton's kernels use them, in float32.

    FP8 elements are multiplied by their scale and rounded to ``dtype``, the query's.
    """
    if not format.is_fp8:
        return stored.float()
    return format.decode(stored, scale).to(dtype).float()


def capped(scores: torch.Tensor, softcap: float | None, overflows: bool) -> torch.Tensor:
    """Return float32 scores under a soft cap, c · tanh(score / c); changes ``scores``.

    With ``overflows`` it is computed from exp(s / c) and exp(-s / c), as in unified_attention before vLLM
    PR #56579: NaN if s / c is above 88.
    """
    if softcap is None:
        return scores
    if not overflows:
        return scores.div_(softcap).tanh_().mul_(softcap)
    up, down = (scores / softcap).exp(), (-scores / softcap).exp()
    return softcap * (up - down) / (up + down)


def weighed(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unnormalised weights of scores [..., keys] and their sums [..., 1]; changes ``scores``.

    Weights are relative to the largest score. ``sinks``, which broadcasts to the sums, is one more logit
    of each row: it may be the largest, it counts once in the sum, and it has no weight.
    """
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(-1, keepdim=True)
    return weights, sums if sinks is None else sums + (sinks - largest).exp()


def rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return softmax weights as the second matrix product reads them: rounded to ``dtype``, in float32."""
    return weights if dtype == torch.float32 else weights.to(dtype).float()


# Model of the cache write, reshape_and_cache_flash (triton_reshape_and_cache_flash.py, vLLM 0.11.2 and
# 0.33.0).
#
# The output of a cache write is the cache: one row per slot (block × block_size + offset), with the key,
# then the value of each KV head, in the dtype of the stored elements.


def slot_mapping(call: KernelCall) -> torch.Tensor:
    """Return the slot of each new token, [n] int64: the call's own, or that of vLLM's scheduler."""
    if call.slot_mapping is not None:
        return call.slot_mapping.long()
    query_lens = call.query_lens
    seq = torch.repeat_interleave(
        torch.arange(len(query_lens), device=query_lens.device), query_lens
    )
    rows = torch.arange(len(seq), device=seq.device)
    pos = rows - call.query_start_loc.long()[seq] + (call.seq_lens.long() - query_lens)[seq]
    blocks = call.block_table.long()[seq, pos // call.block_size]
    return blocks * call.block_size + pos % call.block_size


def written_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a cache in the form of a cache write's output, [num_slots, num_kv_heads, 2 × head_size].

    ``key``, ``value``: [num_blocks, block_size, num_kv_heads, head_size].
    """
    return torch.cat([key.flatten(0, 1), value.flatten(0, 1)], dim=2)


def as_output(call: KernelCall, target: Target) -> torch.Tensor:
    """Return the cache of a call in the form of a cache write's output."""
    dtype = format_of(call, target).dtype
    return written_cache(*(t.view(dtype) for t in to_flash(call.key_cache, call.value_cache)))


def new_tokens(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new keys and values before their scale; a cache of levels holds the nearest ones."""
    is_of_levels = call.spec.coarse and call.spec.writes_cache
    key, value = (on_levels(new) if is_of_levels else new for new in (call.key, call.value))
    return key, value


def reshape_and_cache_flash(call: KernelCall, target: Target) -> None:
    """Write the cache, with every new token in its slot, to ``call.output``."""
    format = format_of(call, target)
    call.buffer.copy_(as_output(call, target))
    key, value = (
        format.encode(new, call.number(scale)).view(format.dtype)
        for new, scale in zip(new_tokens(call), ("k_scale", "v_scale"), strict=True)
    )
    slots = slot_mapping(call)
    written = slots >= 0  # the others are padding
    both = torch.cat([key, value], dim=2)[: len(slots)]
    call.buffer[slots[written]] = both[written]


# Model of merge_attn_states (triton_merge_attn_states.py, vLLM 0.11.2 and 0.33.0), and its two inputs.
#
# The op merges attention over the context (prefix) and over the new tokens (suffix), as in vLLM's chunked
# prefill of MLA and in cascade attention. This module computes each part in float32 and rounds it to the
# query's dtype.


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Attention over two parts of the keys.

    - ``prefix_output``, ``suffix_output``: [num_tokens, num_heads, head_size], in the query's dtype;
      0 if a row sees no key of the part.
    - ``prefix_lse``, ``suffix_lse``: [num_heads, num_tokens] float32, the log-sum-exp of the scores; -inf
      if a row sees no key of the part.
    """

    prefix_output: torch.Tensor
    prefix_lse: torch.Tensor
    suffix_output: torch.Tensor
    suffix_lse: torch.Tensor


def partials(call: KernelCall, target: Target) -> Partials:
    """Return the two parts of a call, on its device: keys of its context, and of its new tokens.

    In a padded call, of four rows without a context two are prefix alone, so that they have no suffix. Rows
    after the last one with a context are not, because a caller may state that they are suffix alone.
    """
    tokens, heads, _ = call.query.shape
    outputs = [torch.zeros_like(call.query) for _ in range(2)]
    sums = [
        call.query.new_full((heads, tokens), float("-inf"), dtype=torch.float32) for _ in range(2)
    ]
    starts, seq_lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        ctx_len = seq_len - (rows.stop - rows.start)
        context = tuple(t[:, :ctx_len] for t in _cached(call, target, seq, ctx_len))
        new_tokens = tuple(t[rows].transpose(0, 1).float() for t in (call.key, call.value))
        for output, lse, (key, value), first in zip(
            outputs, sums, (context, new_tokens), (0, ctx_len), strict=True
        ):
            output[rows], lse[:, rows] = _attend(call, target, rows, key, value, first, ctx_len)
    if call.padding:
        row = torch.arange(tokens, device=call.query.device)
        has_prefix = (sums[0] > -torch.inf).any(0)
        moved = ~has_prefix & (row < row.masked_fill(~has_prefix, 0).max()) & (row % 4 < 2)
        outputs = [torch.where(moved[:, None, None], outputs[1 - i], outputs[i]) for i in (0, 1)]
        sums = [torch.where(moved, sums[1 - i], sums[i]) for i in (0, 1)]
    return Partials(outputs[0], sums[0], outputs[1], sums[1])


def merge_attn_states(call: KernelCall, target: Target) -> None:
    """Merge the two parts of the call into ``call.output``."""
    parts = partials(call, target)
    lse = torch.stack([parts.prefix_lse, parts.suffix_lse])
    weights = (lse - lse.amax(0)).exp()
    weights = (weights / weights.sum(0)).permute(0, 2, 1)[..., None]
    merged = weights[0] * parts.prefix_output.float() + weights[1] * parts.suffix_output.float()
    call.buffer.copy_(merged)


def _cached(
    call: KernelCall, target: Target, seq: int, count: int, heads: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value of a sequence's blocks for ``count`` tokens, each [heads, n, size] float32."""
    format, dtype = format_of(call, target), call.query.dtype
    blocks = call.block_table[seq, : -(-count // call.block_size)].long()
    stored = keys(call.key_cache, blocks, heads), values(call, blocks, heads)
    scales = call.number("k_scale"), call.number("v_scale")
    key, value = (
        dequantised(one, format, scale, dtype) for one, scale in zip(stored, scales, strict=True)
    )
    return key, value


def _attend(
    call: KernelCall,
    target: Target,
    rows: slice,
    key: torch.Tensor,
    value: torch.Tensor,
    first: int,
    ctx_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [rows, num_heads, head_size] and the LSE [num_heads, rows] over some keys.

    The first key is at position ``first``, the first row at position ``ctx_len``.
    """
    group = call.num_queries_per_kv
    query = call.query[rows].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    scores = query @ key[:, None].transpose(2, 3) * scale_of(call, target)
    at = torch.arange(first, first + key.shape[1], device=key.device)
    away = at - torch.arange(ctx_len, ctx_len + query.shape[2], device=key.device)[:, None]
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes.view(-1, group, 1, 1) * away.float()
    hidden = away > 0
    if call.sliding_window:
        hidden |= away <= -call.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # -inf minus -inf: the row sees no key.
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    mixed = (weights @ value[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return mixed.to(call.query.dtype), lse.flatten(0, 1)


# Models of the Triton ops that process a sequence's rows in tiles, vLLM 0.11.2 and 0.33.0.
#
# - context_attention_fwd (prefix_prefill.py) reads new tokens from its arguments.
# - context_attention_fwd of triton_prefill_attention.py has no cache and no context.
# - unified_attention (triton_unified_attention.py) and decode_attention_fwd (triton_decode_attention.py) read
#   them from the cache. They may split a sequence and merge the parts in float32. This changes only the
#   largest score to which a weight is relative when it is rounded, so the models do not split.

_SCORES = 1 << 19  # scores of a tile: 2 MiB of float32 stay in the processor's cache


def _tiled(name: str, call: KernelCall, target: Target) -> None:
    """Write the rows of every sequence that a kernel serves to ``call.output``.

    Tokens that do not come from the cache come from ``call.key`` and ``call.value``; no slot after the
    cached tokens is read. The grid of a prefill kernel covers max_query_len rows, rounded up to tiles; later
    rows are not written. Scores and sums are float32. Weights are rounded to the dtype of the values, the
    output to that of the query. Raises KernelRejected for sinks with ALiBi, as prefix_prefill's assertion
    does.
    """
    if name == PREFILL and call.sinks is not None and call.alibi_slopes is not None:
        raise KernelRejected("Sinks arg is not supported with alibi")
    terms = contract(name, target, call.op)
    grid = grid_rows(terms, call) if name in (PREFILL, ENCODER) else call.query.shape[0]
    cached = cached_lens(terms, call).tolist()
    for seq, rows, seq_len in counted(_served(terms, call)):
        _sequence(call, target, seq, rows, seq_len, cached[seq], grid)


def _served(terms: Contract, call: KernelCall) -> list[tuple[int, range, int]]:
    """Return the sequences that a kernel serves, each with its rows and its length as it reads them."""
    starts = as_read(terms, call, "query_start_loc").tolist()
    seq_lens = as_read(terms, call, "seq_lens").tolist()
    seqs = torch.nonzero(served(terms, call)).flatten().tolist()
    return [(seq, range(starts[seq], starts[seq + 1]), seq_lens[seq]) for seq in seqs]


def _sequence(
    call: KernelCall, target: Target, seq: int, rows: range, seq_len: int, cached: int, grid: int
) -> None:
    """Write one sequence's rows, some KV heads at a time.

    The first ``cached`` tokens come from the cache, the others from the arguments.
    """
    start, stop = rows.start, rows.stop
    ctx_len = seq_len - (stop - start)
    num_kv_heads, group = call.key.shape[1], call.num_queries_per_kv
    mask = call.visibility.of_seq(seq, ctx_len, seq_len)
    rows_at_once = max(1, 2 * PREFILL_TILE // group)
    heads_at_once = max(1, _SCORES // (group * min(rows_at_once, stop - start) * seq_len))
    for first in range(0, num_kv_heads, heads_at_once):
        kv = slice(first, first + heads_at_once)
        heads = slice(first * group, (first + heads_at_once) * group)
        old = (one[:, :cached] for one in _cached(call, target, seq, cached, kv))
        last_rows = slice(stop - (seq_len - cached), stop)
        new = (one[last_rows, kv].transpose(0, 1).float() for one in (call.key, call.value))
        key, value = (torch.cat(pair, 1) for pair in zip(old, new, strict=True))
        query = call.query[start:stop, heads].unflatten(1, (-1, group)).permute(1, 2, 0, 3).float()
        for row in range(0, min(stop - start, grid), rows_at_once):
            last = min(row + rows_at_once, stop - start, grid)
            out = _tile(call, target, query[:, :, row:last], key, value, mask, row, heads)
            call.buffer[start + row : start + last, heads] = (
                out.permute(2, 0, 1, 3).flatten(1, 2).to(call.buffer.dtype)
            )


def _tile(
    call: KernelCall,
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    row: int,
    heads: slice,
) -> torch.Tensor:
    """Return attention of the new tokens ``row``, row + 1, … of a sequence.

    ``query`` and the result: [kv_heads, num_queries_per_kv, rows, head_size].
    """
    rows = query.shape[2]
    terms, position = contract(call.op, target, call.op), mask.ctx_len + row
    span = mask.span(position, position + rows - 1)
    begin, end = span.start, span.stop
    scores = query.flatten(1, 2) @ key[:, begin:end].transpose(1, 2)
    scores = scores.mul_(scale_of(call, target)).view(*query.shape[:3], end - begin)
    scores = capped(scores, call.softcap, terms.softcap == "overflows")
    at = torch.arange(position, position + rows)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[heads].view(*query.shape[:2], 1, 1)
        origin = at[:, None] if terms.alibi_from == "query" else mask.ctx_len
        scores += slopes * (torch.arange(begin, end) - origin).float()
    scores = _masked(scores, mask, at, begin, end)
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks[heads].float().view(*query.shape[:2], 1, 1)
    weights, sums = weighed(scores, sinks)
    weights = rounded(weights, call.value.dtype).flatten(1, 2)
    return (weights @ value[:, begin:end]).view(query.shape) / sums


def _masked(
    scores: torch.Tensor, mask: SequenceMask, at: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Add a bias to scores [..., rows, keys] and set those of hidden keys to -inf; changes ``scores``.

    ``at``: [rows], positions of the rows; ``begin``, ``end``: positions of the keys.
    """
    if mask.is_plain and not mask.rules.sliding_window:  # only the last keys are hidden
        rows = len(at)
        scores[..., -rows:].masked_fill_(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        return scores
    bias = mask.bias(at, begin, end)
    if bias is not None:
        scores += bias
    return scores.masked_fill_(~mask.visible(at, begin, end), float("-inf"))


# Model of Triton's paged decode, kernel_paged_attention_2d (chunked_prefill_paged_decode.py, vLLM 0.11.2
# and 0.33.0).


def kernel_paged_attention_2d(call: KernelCall, target: Target) -> None:
    """Write the row of every sequence whose query_len is 1 to ``call.output``.

    Every key, the new token's included, comes from the cache. The kernel reads whole blocks: in 0.11.2 the
    slots after seq_len have a score of -inf + q·k and a weight of 0, so NaN there makes the row NaN;
    0.33.0 masks them. Outside a sliding window the score is -10000, not -inf.
    """
    terms = contract(TRITON_DECODE, target, call.op)
    for seq, rows, seq_len in counted(_served(terms, call)):
        row = _row(call, target, seq, rows.start, seq_len, terms.reads_tail != "nothing")
        call.buffer[rows.start] = row.to(call.buffer.dtype)


def _row(
    call: KernelCall, target: Target, seq: int, row: int, seq_len: int, reads_tail: bool
) -> torch.Tensor:
    """Return one row, [num_heads, head_size] float32."""
    key, value = _cached(call, target, seq, seq_len)
    positions = torch.arange(key.shape[1])
    if not reads_tail:
        key, value = (t.masked_fill((positions >= seq_len)[:, None], 0.0) for t in (key, value))
    query = call.query[row].float().unflatten(0, (-1, call.num_queries_per_kv))
    scores = query @ key.transpose(1, 2) * scale_of(call, target)
    tail = torch.where(positions < seq_len, 0.0, float("-inf"))
    scores = scores + tail if reads_tail else scores.masked_fill(positions >= seq_len, -torch.inf)
    away = positions - (seq_len - 1)
    if call.sliding_window:
        scores = torch.where(-away < call.sliding_window, scores, -10000.0)
    if call.alibi_slopes is not None:
        scores += call.alibi_slopes.view(*scores.shape[:2], 1) * away.float()
    sinks = None if call.sinks is None else call.sinks.float().view(*scores.shape[:2], 1)
    weights, sums = weighed(scores, sinks)
    mixed: torch.Tensor = rounded(weights, call.query.dtype) @ value / sums
    return mixed.flatten(0, 1)


# Model of ROCm's custom paged attention, paged_attention_rocm.
#
# Its source is csrc/rocm/attention.cu in vLLM 0.11.2 and csrc/rocm/attention_kernels.cuh in 0.33.0.
#
# The op has two kernels. The first splits a sequence into partitions of 256 tokens and writes the largest
# score, the sum of weights and the output of each partition to scratch memory. The second merges them. The
# size of the scratch follows from max_seq_len, which the op does not check.

_WARP = 64
_EPSILON = 1e-6  # both kernels add it to a sum before the division


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scratch:
    """The results of the partitions, as flat memory.

    - ``partitions``: per sequence and head.
    - ``largest``, ``sums``: [num_seqs × num_heads × partitions] float32.
    - ``outputs``: [num_seqs × num_heads × partitions, head_size] in the query's dtype.

    vLLM allocates them with ``torch.empty``, so unwritten elements are garbage. Here more garbage follows
    the end, for a merge that reads out of bounds.
    """

    partitions: int
    largest: torch.Tensor
    sums: torch.Tensor
    outputs: torch.Tensor


def paged_attention_rocm(call: KernelCall, target: Target) -> None:
    """Write the row of every sequence whose query_len reads as 1 to ``call.output``."""
    terms = contract(ROCM_DECODE, target, call.op)
    check_host(terms, call)
    found = _served(terms, call)
    scratch = allocate(call, max((seq_len for *_, seq_len in found), default=0))
    for seq, rows, seq_len in found:
        _write_partitions(call, target, terms, scratch, seq, rows.start, seq_len)
    for seq, rows, seq_len in found:
        call.buffer[rows.start] = _merge(call, scratch, seq, seq_len)


def check_host(terms: Contract, call: KernelCall) -> None:
    """Raise KernelRejected as the op's host code does, in its order and with its messages."""
    dtype = str(call.query.dtype).removeprefix("torch.")
    if call.kv_cache_dtype not in terms.kv_cache_dtypes:
        raise KernelRejected(f"Unsupported KV cache dtype: {call.kv_cache_dtype}")
    if dtype not in terms.dtypes:
        raise KernelRejected(f"Unsupported data type: {'float' if dtype == 'float32' else dtype}")
    if call.query.shape[2] not in terms.head_sizes:
        raise KernelRejected(f"Unsupported head size: {call.query.shape[2]}")
    if call.block_size not in terms.block_sizes:
        raise KernelRejected(f"Unsupported block size: {call.block_size}")
    for name in ("block_table", "seq_lens"):
        if getattr(call, name).dtype == torch.int64 and terms.on_int64[name] == "reject":
            raise KernelRejected("expected scalar type Int but found Long")
    if not 1 <= call.num_queries_per_kv <= 16:
        raise KernelRejected(f"Unsupported gqa ratio: {call.num_queries_per_kv}")


def allocate(call: KernelCall, longest: int) -> Scratch:
    """Return scratch for ceil(max_seq_len / 256) partitions per sequence and head.

    ``longest`` is the longest sequence; garbage for its partitions follows the end.
    """
    partitions = -(-call.max_seq_len // PARTITION_SIZE)
    extra = -(-longest // PARTITION_SIZE)
    head_size = call.query.shape[2]
    count = call.block_table.shape[0] * call.query.shape[1] * partitions + extra
    return Scratch(
        partitions=partitions,
        largest=garbage((count,), seed=5).float(),
        sums=garbage((count,), seed=6).float(),
        outputs=garbage((count, head_size), seed=7).to(call.query.dtype),
    )


def _write_partitions(
    call: KernelCall,
    target: Target,
    terms: Contract,
    scratch: Scratch,
    seq: int,
    row: int,
    seq_len: int,
) -> None:
    """Compute the partitions of one sequence that the grid covers, and write them to the scratch."""
    format, dtype = format_of(call, target), call.query.dtype
    blocks = call.block_table[seq, : -(-seq_len // call.block_size)].long()
    every = slice(None)
    key = format.decode(keys(_as_taken(terms, call.key_cache), blocks, every))
    value = format.decode(values(call, blocks, every))
    partitions = min(-(-seq_len // PARTITION_SIZE), scratch.partitions)
    positions = torch.arange(partitions * PARTITION_SIZE)
    # The real kernel reads its last block again for positions after it, with weight 0. That adds nothing
    # that the tail of the block does not add already.
    pad = (0, 0, 0, max(0, len(positions) - key.shape[1]))
    key, value = (torch.nn.functional.pad(t[:, : len(positions)], pad) for t in (key, value))
    if terms.reads_tail == "nothing":
        value = value.masked_fill((positions >= seq_len)[:, None], 0.0)
    scores = _scores(call, target, key, row, seq_len)
    scores = scores.masked_fill(positions >= seq_len, -torch.inf)
    scores = scores.unflatten(2, (partitions, PARTITION_SIZE))
    largest = scores.amax(-1)
    weights = (scores - largest[..., None]).exp()
    sums = weights.sum(-1)
    weights = rounded(weights / (sums[..., None] + _EPSILON), dtype)
    value = value.unflatten(1, (partitions, PARTITION_SIZE))
    by_warp = target.platform.family == "cdna" and call.num_queries_per_kv <= 4
    outputs = _weighted(weights, value, by_warp, _scale_of_cache(call, "v_scale"), dtype)
    here = _places(call, scratch, seq, partitions)
    scratch.largest[here] = largest.flatten(0, 1)
    scratch.sums[here] = sums.flatten(0, 1)
    scratch.outputs[here] = outputs.flatten(0, 1)


def _as_taken(terms: Contract, key_cache: torch.Tensor) -> torch.Tensor:
    """Return the key cache in the layout that the kernel assumes: x of 16 bytes."""
    blocks, heads, chunks, block_size, x = key_cache.shape
    taken = (terms.key_x_bytes or 0) // key_cache.element_size()
    return key_cache.reshape(blocks, heads, chunks * x // taken, block_size, taken)


def _scores(
    call: KernelCall, target: Target, key: torch.Tensor, row: int, seq_len: int
) -> torch.Tensor:
    """Return the scores of one row, [num_kv_heads, group, positions] float32."""
    query = call.query[row].float().unflatten(0, (-1, call.num_queries_per_kv))
    scale = scale_of(call, target) * _scale_of_cache(call, "k_scale")
    scores: torch.Tensor = query @ key.transpose(1, 2) * scale
    if call.alibi_slopes is not None:
        away = torch.arange(key.shape[1]) - (seq_len - 1)
        scores += call.alibi_slopes.view(*scores.shape[:2], 1) * away.float()
    return scores


def _scale_of_cache(call: KernelCall, name: str) -> float:
    """Return k_scale or v_scale, or 1 unless the cache is FP8."""
    return 1.0 if call.kv_cache_dtype == "auto" else call.number(name)


def _weighted(
    weights: torch.Tensor, value: torch.Tensor, by_warp: bool, v_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the output of each partition in ``dtype``, [num_kv_heads, group, partitions, head_size].

    With up to 4 query heads per KV head, gfx9's kernel rounds the sum of each warp's 64 tokens and adds the
    warps in ``dtype``, truncating in bfloat16 (``addx4``). Otherwise it sums the partition in float32.
    """
    if not by_warp:
        return (weights.transpose(1, 2) @ value * v_scale).to(dtype).transpose(1, 2)
    parts = weights.unflatten(3, (-1, _WARP)).permute(0, 2, 3, 1, 4)
    warps = (parts @ value.unflatten(2, (-1, _WARP)) * v_scale).to(dtype)
    total = torch.zeros_like(warps[:, :, 0])
    for warp in range(warps.shape[2]):
        total = _sum(total, warps[:, :, warp])
    return total.transpose(1, 2)


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors in their dtype: float16 rounded, bfloat16 truncated."""
    if one.dtype != torch.bfloat16:
        return one + other
    bits = (one.float() + other.float()).view(torch.int32)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def _places(call: KernelCall, scratch: Scratch, seq: int, partitions: int) -> torch.Tensor:
    """Return the indices of a sequence's partitions in the flat scratch, [num_heads, partitions].

    With more partitions than the scratch was allocated for, the indices of a head run into the next head,
    and those of the last head of the last sequence past the end: the op does not check it.
    """
    num_heads = call.query.shape[1]
    heads = (seq * num_heads + torch.arange(num_heads)) * scratch.partitions
    return heads[:, None] + torch.arange(partitions)


def _merge(call: KernelCall, scratch: Scratch, seq: int, seq_len: int) -> torch.Tensor:
    """Return one row, [num_heads, head_size] in the output's dtype, merged from its partitions."""
    here = _places(call, scratch, seq, -(-seq_len // PARTITION_SIZE))
    largest = scratch.largest[here]
    shares = scratch.sums[here] * (largest - largest.amax(-1, keepdim=True)).exp()
    mixed = (shares[..., None] * scratch.outputs[here].float()).sum(1)
    return (mixed / (shares.sum(-1, keepdim=True) + _EPSILON)).to(call.buffer.dtype)


_KERNELS: dict[str, Callable[[KernelCall, Target], None]] = {
    **{name: partial(_tiled, name) for name in (PREFILL, ENCODER, UNIFIED, DECODE_FWD)},
    **dict.fromkeys(("segmented_attention", "xpu_mla_sparse"), partial(_tiled, UNIFIED)),
    "turboquant_decode": partial(_tiled, DECODE_FWD),
    TRITON_DECODE: kernel_paged_attention_2d,
    ROCM_DECODE: paged_attention_rocm,
    MERGE: merge_attn_states,
    WRITE: reshape_and_cache_flash,
}


def run(call: KernelCall, target: Target, kernels: Sequence[str]) -> None:
    """Run the models of the kernels in order; each writes its rows of ``call.output``.

    Raises KernelRejected if the real kernel raises. Rows of earlier kernels stay written, as in vLLM.
    """
    for name in kernels:
        if name != ROCM_DECODE:
            e4m3 = call.kv_cache_dtype in ("fp8", "fp8_e4m3")
            if e4m3 and not target.platform.triton_e4m3:
                raise KernelRejected(
                    "type fp8e4nv not supported in this architecture (Triton needs compute capability 8.9)"
                )
        _KERNELS[name](call, target)


@dataclass(frozen=True, kw_only=True)
class ModelBackend(Backend):
    """The models, under the rules of ``rules``, a release."""

    rules: str = RELEASES[-1]

    name = "model"
    ops = TRITON_OPS
    models_prefill = True
    is_deterministic = True
    masks = tuple(MASKS)
    blind_spots = (
        "blocks that a sliding window freed: the models do not define what is read before a window",
        "ALiBi with sinks: the models reproduce vLLM's unified_attention, which is wrong there",
    )

    @property
    def release(self) -> str:
        return self.rules

    @property
    def version(self) -> str:
        return f"models of {self.rules}"

    def run(
        self, call: KernelCall, target: Target, kernels: Sequence[str], options: RunOptions
    ) -> RunOutput:
        run(call, target, kernels)
        return RunOutput()
