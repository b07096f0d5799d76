"""The call of a Case: its output buffer, its index tensors, and its KernelCall."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from attnlab.case.case import Case, Lengths
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.tensors.cache import (
    Batch,
    PagedCache,
    alibi_slopes,
    garbage,
    make_block_table,
    sink_logits,
)
from attnlab.tensors.call import INDEX_DTYPES, KernelCall, Origin
from attnlab.tensors.formats import FORMATS, read_format, written_format
from attnlab.tensors.visibility import SequenceMask, Visibility

# The Visibility of a Case: the data of its mask, given or from its lengths and seed.

# The mask of one sequence of a call.


def mask_of(call: KernelCall, seq: int, **changes: Any) -> SequenceMask:
    """Return which keys the rows of a sequence see; ``changes``: of the call's Visibility."""
    rules = dataclasses.replace(call.visibility, **changes) if changes else call.visibility
    query_start_loc, seq_len = call.query_start_loc, int(call.seq_lens[seq])
    query_len = int(query_start_loc[seq + 1] - query_start_loc[seq])
    return rules.of_seq(seq, seq_len - query_len, seq_len)


# The data of masks for a part of a sequence: without its first keys, and without those after a new end.


def cut_ranges(
    ranges: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return ranges [num_seqs, n, 2] that are moved to the front and end within the sequence.

    ``dropped``: of each sequence, the number of tokens before its first kept key; ``seq_lens``: the tokens
    that it keeps. A range that keeps fewer than two positions becomes (0, 0), which is unused.
    """
    moved, last_key = _column(dropped, ranges), _column(seq_lens, ranges) - 1
    first = (ranges[..., 0] - moved).clamp(min=0)
    last = (ranges[..., 1] - moved).minimum(last_key)
    is_used = (first < last) & (ranges[..., 0] < ranges[..., 1])
    return torch.stack([first, last], -1) * is_used[..., None]


def cut_prefixes(
    lens: torch.Tensor, dropped: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    """Return the visible prefixes [num_seqs] of what is kept; the arguments are those of cut_ranges."""
    kept = (lens - _column(dropped, lens)[:, 0]).clamp(min=0)
    return kept.minimum(_column(seq_lens, lens)[:, 0])


def _column(numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype)[:, None]


_RANGES = 3


def visibility_of(case: Case) -> Visibility:
    """Return which keys the rows of a Case see; the tensors are shared: do not change them."""
    if case.mask == CAUSAL:
        return Visibility(sliding_window=case.sliding_window)
    return _masked(case)


@lru_cache(maxsize=16)
def _masked(case: Case) -> Visibility:
    """Return the Visibility of a Case whose mask is not causal."""
    window = case.sliding_window
    stated: dict[str, Any] = {
        name: _MADE[how](case) if isinstance(how, str) else how
        for name, how in MASKS[case.mask].states.items()
    }
    # A window is limited to the right as far as to the left, if the op has an argument for it.
    has_right = window and "causal" in stated and case.spec.has_right_window
    right = window - 1 if has_right else None
    return Visibility(sliding_window=window, window_right=right, **stated)


def causal_seqs(case: Case) -> torch.Tensor:
    """Return which sequences are causal, [num_seqs] int32: given, or every second one from the first."""
    if case.causal_seqs is not None:
        return torch.tensor(case.causal_seqs, dtype=torch.int32)
    return (torch.arange(len(case.lengths.query_lens)) % 2 == 0).int()


def ranges(case: Case) -> torch.Tensor:
    """Return bidirectional ranges of positions, [num_seqs, n, 2] int32; first and last are inclusive.

    They are as given. Else the first begins in the context and ends inside the new tokens, the second has the
    rest of them; it is empty (first = last) if nothing is left. The third is unused: (0, 0).
    """
    if case.mm_prefix_range is not None:
        given = torch.tensor(case.mm_prefix_range, dtype=torch.int32)
        return given.reshape(len(given), -1, 2)
    lengths: Lengths = case.lengths
    found = torch.zeros(len(lengths.query_lens), _RANGES, 2, dtype=torch.int32)
    lens = zip(lengths.query_lens, lengths.ctx_lens, strict=True)
    for seq, (query_len, ctx_len) in enumerate(lens):
        middle, last = ctx_len + query_len // 2, ctx_len + query_len - 1
        found[seq, 0] = torch.tensor([max(0, ctx_len - 9), middle])
        if middle + 1 < last:
            found[seq, 1] = torch.tensor([middle + 1, last])
    return found


def prefix_lens(case: Case) -> torch.Tensor:
    """Return the prefix that each row of a sequence sees, [num_seqs] int32: given, or half the context."""
    given = case.rswa_prefix_lens
    lens = [ctx_len // 2 for ctx_len in case.lengths.ctx_lens] if given is None else given
    return torch.tensor(lens, dtype=torch.int32)


def tree_bias(case: Case) -> torch.Tensor:
    """Return the bias of a row for the key of a new token, [n, n] float32; n is the largest query_len.

    With given parents it is 0 for a token and its ancestors, -inf for others. Else it is drawn from the seed,
    and -inf for some tokens before the row; 0 in place of the drawn numbers for an op that adds no bias.
    """
    size = max(case.lengths.query_lens)
    if case.tree_parents is not None:
        return _branches(case.tree_parents[:size])
    generator = torch.Generator().manual_seed(case.seed + 6)
    bias = torch.randn(size, size, generator=generator) * case.spec.adds_bias
    away = torch.arange(size)[:, None] - torch.arange(size)
    return bias.masked_fill((away > 0) & (away % 3 == 1), -torch.inf)


def lookback(case: Case) -> int:
    """Return how many chunks before its own a row sees: given, or one, and fewer than the window has keys."""
    given = 1 if case.chunk_lookback is None else case.chunk_lookback
    return min(given, case.sliding_window - 1)


_MADE: dict[str, Callable[[Case], Any]] = {
    one.__name__: one for one in (causal_seqs, ranges, prefix_lens, lookback, tree_bias)
}


def longest_mask(case: Case) -> SequenceMask:
    """Return the mask of the first sequence with the most new tokens."""
    lengths = case.lengths
    seq = max(range(len(lengths.query_lens)), key=lengths.query_lens.__getitem__)
    return visibility_of(case).of_seq(seq, lengths.ctx_lens[seq], lengths.seq_lens[seq])


def data_of_seq(case: Case, seq: int) -> dict[str, Any]:
    """Return the fields of a Case with the data of its mask for one of its sequences alone."""
    if MASKS[case.mask].data == "causal_seqs":
        return {"causal_seqs": (int(causal_seqs(case)[seq]),)}
    found: dict[str, Any] = {}
    for name in ("mm_prefix_range", "rswa_prefix_lens"):
        given = getattr(case, name)
        if given is not None:
            found[name] = given[seq : seq + 1]
    return found


def data_of_lengths(case: Case, query_len: int, ctx_len: int) -> dict[str, Any]:
    """Return the fields with the data of the mask of a Case with one sequence, cut to shorter lengths.

    The last new tokens and the first tokens of the context are dropped. Data that have no positions stay.
    """
    dropped = [case.lengths.ctx_lens[0] - ctx_len]
    seq_lens = [ctx_len + query_len]
    if MASKS[case.mask].data == "mm_prefix_range":
        kept = cut_ranges(ranges(case), dropped, seq_lens)
        used = kept[0][kept[0].any(-1)].flatten().tolist()
        return {"mm_prefix_range": (tuple(used or (0, 0)),)}
    if MASKS[case.mask].data == "rswa_prefix_lens":
        kept = cut_prefixes(prefix_lens(case), dropped, seq_lens)
        return {"rswa_prefix_lens": tuple(kept.tolist())}
    if case.tree_parents is not None:
        return {"tree_parents": case.tree_parents[:query_len]}
    return {}


def _branches(parents: tuple[int, ...]) -> torch.Tensor:
    """Return 0 for each token and its ancestors, -inf for others, [n, n] float32."""
    bias = torch.full((len(parents), len(parents)), -torch.inf)
    for token, parent in enumerate(parents):
        if parent < token:
            bias[token] = bias[parent]
        bias[token, token] = 0.0
    return bias


# Memory layout of a call's tensors: vLLM's strides and padding, with unchanged numbers.
#
# - "fused": query, key and value are slices of one tensor, as a fused projection returns them. A block of
#   the cache holds its keys, then its values (kv_cache.unbind(1) in vLLM's Triton backend, since 0.11).
# - "HND": as "fused", and in the cache of unified attention and of the cache write, the heads of a block
#   come before its slots (VLLM_KV_CACHE_LAYOUT=HND).
# - padding: tokens and empty sequences after those of the batch, as for a CUDA graph that was captured for
#   a larger batch. Padding rows of the output are checked only for merge_attn_states.


def presented(call: KernelCall) -> KernelCall:
    """Return the call with its strides and padding applied; the call itself if it has neither."""
    return _padded(strided(call))


def strided(call: KernelCall) -> KernelCall:
    """Return the call with the strides ``call.strides`` of query, key, value and cache; copies."""
    if call.strides == "contiguous":
        return call
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    joined = torch.cat([call.query, call.key, call.value], 1)
    query, key, value = joined.split([heads, kv_heads, kv_heads], 1)
    caches = (call.key_cache, call.value_cache)
    blocks = torch.stack([cache.flatten(1) for cache in caches], 1)
    key_cache, value_cache = (
        half.unflatten(1, cache.shape[1:])
        for half, cache in zip(blocks.unbind(1), caches, strict=True)
    )
    return dataclasses.replace(
        call, query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )


def flash(
    key: torch.Tensor, value: torch.Tensor, strides: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache with the strides of that name.

    ``key``, ``value``: [num_blocks, block_size, num_kv_heads, head_size], as is the result.
    """
    if strides == "contiguous":
        return key, value
    if strides == "HND":
        fused = flash(key.transpose(1, 2), value.transpose(1, 2), "fused")
        return fused[0].transpose(1, 2), fused[1].transpose(1, 2)
    first, second = torch.stack([key, value], 1).unbind(1)
    return first, second


def _padded(call: KernelCall) -> KernelCall:
    """Return the call with ``call.padding`` more empty sequences and tokens.

    Padding tokens are NaN; for a cache write they are 3, a number that is visible in every cache format.
    """
    if not call.padding:
        return call
    fill = 3.0 if call.spec.writes_cache else float("nan")
    names = ("query", "key", "value", "output", "before")[: 3 if call.spec.writes_cache else 5]
    tokens: dict[str, Any] = {
        name: _longer(given, call.padding, fill)
        for name in names
        if (given := getattr(call, name)) is not None
    }
    last = call.query_start_loc[-1:].expand(call.padding)
    empty = call.seq_lens.new_zeros(call.padding)
    rows = call.block_table.new_zeros(call.padding, call.block_table.shape[1])
    masks: dict[str, Any] = {
        name: torch.cat([mask, mask.new_zeros(call.padding, *mask.shape[1:])])
        for name in ("causal", "mm_prefix_range", "rswa_prefix_lens")
        if isinstance(mask := getattr(call, name), torch.Tensor)
    }
    return dataclasses.replace(
        call,
        **tokens,
        **masks,
        query_start_loc=torch.cat([call.query_start_loc, last]),
        seq_lens=torch.cat([call.seq_lens, empty]),
        block_table=torch.cat([call.block_table, rows]),
    )


def _longer(tensor: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """Return a copy with ``rows`` more rows of the number ``fill``. The strides are kept, but for a tensor
    that is one number expanded."""
    shape = (tensor.shape[0] + rows, *tensor.shape[1:])
    is_expanded = 0 in tensor.stride()
    strides = torch.empty(shape, device="meta").stride() if is_expanded else tensor.stride()
    longer = tensor.new_empty_strided(shape, strides).fill_(fill)
    longer[: len(tensor)] = tensor
    return longer


def make_query_start_loc(query_lens: Sequence[int], how: str) -> torch.Tensor:
    """Return the prefix sums of ``query_lens``, [num_seqs + 1], computed as a stage of the test did.

    ``torch.cumsum`` of int32 returns int64. So "int32_before_cumsum", the test's first fix, gives int64;
    this function computes it in the same way.
    """
    given = torch.int if how == "int32_before_cumsum" else torch.long
    starts = torch.cumsum(torch.tensor([0, *query_lens], dtype=given), dim=0)
    return starts if how in ("int64", "int32_before_cumsum") else starts.to(torch.int32)


def _output_of(case: Case) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape and the dtype of a Case's output."""
    dtype = FORMATS[case.dtype].dtype
    if not case.spec.writes_cache:
        return (case.lengths.num_tokens, case.num_heads, case.head_size), dtype
    shape = (case.total_blocks * case.block_size, case.num_kv_heads, 2 * case.head_size)
    return shape, read_format(case.kv_cache_dtype, dtype, case.machine.fp8_e4m3).dtype


def make_output(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the output buffer before the call, on ``device``: recycled memory, NaN or zeros.

    vLLM's test allocates it with ``torch.empty``. Recycled memory is modelled by
    :func:`attnlab.tensors.cache.garbage`, so that an unwritten row never passes by chance.
    """
    shape, dtype = _output_of(case)
    if case.output_init == "recycled":
        return garbage(shape, seed=case.seed + 4, device=device).to(dtype)
    fill = float("nan") if case.output_init == "nan" else 0.0
    return torch.full(shape, fill, dtype=dtype, device=device)


def make_call(
    case: Case,
    batch: Batch,
    cache: PagedCache,
    output: torch.Tensor,
    new_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> KernelCall:
    """Return the Case's call on its batch and cache; the op will write ``output``.

    ``new_tokens``: key and value of the new tokens, if they have been copied before.
    """
    key, value = new_tokens or batch.new_tokens()
    return call_of(
        case,
        cache.provenance.block_table,
        query=batch.query,
        key=key,
        value=value,
        output=output,
        key_cache=cache.key,
        value_cache=cache.value,
        alibi_slopes=batch.alibi_slopes,
        sinks=batch.sinks,
    )


def call_of(case: Case, block_table: torch.Tensor, **tensors: Any) -> KernelCall:
    """Return the Case's call of some ``tensors``, by their names, with its index tensors and options."""
    staging = case.staging
    rules = visibility_of(case)
    return KernelCall(
        op=case.op,
        **tensors,
        kv_cache_dtype=case.kv_cache_dtype,
        block_table=block_table.to(INDEX_DTYPES[staging.block_table]),
        query_start_loc=make_query_start_loc(case.lengths.query_lens, staging.query_start_loc),
        seq_lens=torch.tensor(case.lengths.seq_lens, dtype=INDEX_DTYPES[staging.seq_lens]),
        max_seq_len=case.passed_max_seq_len,
        max_query_len=case.passed_max_query_len,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        **{one.name: getattr(rules, one.name) for one in fields(Visibility)},
        sm_scale=case.sm_scale,
        softcap=case.softcap,
        num_splits=case.num_splits,
        interleave_v=case.interleave_v,
        strides=case.kv_layout,
        padding=case.pad_batch,
        origin=Origin(
            release=case.release if case.spec.library == "vllm" else None,
            platform=case.platform,
            backend=case.backend,
        ),
    )


# A Case's call without its numbers, for questions that only shapes and index tensors answer.


def hollow_call(case: Case) -> KernelCall:
    """Return a call with the shapes, dtypes and index tensors of the Case's call, without its numbers.

    The other tensors are memory that is never written, so the call takes no time and next to no memory.
    """
    tokens, heads, head_size = case.lengths.num_tokens, case.num_kv_heads, case.head_size
    dtype, stored = FORMATS[case.dtype].dtype, written_format(case).storage
    key_cache = (case.total_blocks, heads, head_size // case.key_x, case.block_size, case.key_x)
    output_shape, output_dtype = _output_of(case)
    return call_of(
        case,
        make_block_table(case),
        query=torch.empty(tokens, case.num_heads, head_size, dtype=dtype),
        key=torch.empty(tokens, heads, head_size, dtype=dtype),
        value=torch.empty(tokens, heads, head_size, dtype=dtype),
        output=torch.empty(output_shape, dtype=output_dtype),
        key_cache=torch.empty(key_cache, dtype=stored),
        value_cache=torch.empty((*key_cache[:2], head_size, case.block_size), dtype=stored),
        alibi_slopes=alibi_slopes(case.num_heads) if case.alibi else None,
        sinks=sink_logits(case.num_heads, case.seed) if case.sinks else None,
    )
