"""CallLab: a Lab in which one Case has the tensors of a call, so that whatever takes a Case takes the call.

A call states its arguments, not how they were made. :func:`call_lab` finds the Case with the same op, sizes,
options and layout. Runs of this Case get the call's own numbers; varied Cases are generated as always.
"""

import dataclasses
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DTYPE_BYTES
from attnlab.case.errors import InvalidCall
from attnlab.case.masks import CAUSAL, MASKS
from attnlab.kernels.backend import Backend, RunOutput
from attnlab.kernels.run_call import for_call
from attnlab.lab.lab import Lab
from attnlab.lab.products import batch_key, cache_key
from attnlab.tensors.cache import (
    Batch,
    PagedCache,
    addresses,
    as_flash,
    distribution_of,
    freed_blocks,
    interleaved,
    on_device,
    with_empty_slots,
)
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import same_numbers, written_format

# What a Case does not set, or states in another way; all other fields of a call must be equal.
_NOT_COMPARED = (
    *("output", "before", "lse", "slot_mapping", "block_ids", "layout", "new_tokens"),
    *("unmodelled", "unknown_arguments", "read_as", "rejection", "origin"),
)


@dataclass(slots=True, kw_only=True)
class CallLab(Lab):
    """A lab that runs one backend, ``runner``, and in which the Case ``case`` is that of a call.

    ``given``: the call, without padding and with blocks of its own for each sequence. ``own_batch`` and
    ``own_cache``: its tokens and its cache, on the CPU.
    """

    runner: Backend
    case: Case
    given: KernelCall
    own_batch: Batch
    own_cache: PagedCache

    def where(self, case: Case) -> str:
        """Return the device of the Case's tensors."""
        return self.device or self.runner.device

    def batch(self, case: Case) -> Batch:
        """Return the call's tokens for its Case and for Cases with the same tokens."""
        if batch_key(case) != batch_key(self.case):
            return Lab.batch(self, case)
        where = self.where(case)
        make = partial(on_device, self.own_batch, where)
        return self.shared.get("batch", (batch_key(case), where), make)[0]

    def call(
        self, case: Case, cache: PagedCache | None = None, output: torch.Tensor | None = None
    ) -> KernelCall:
        """Return the Case's call, which names the layout of the given call's cache."""
        return dataclasses.replace(Lab.call(self, case, cache, output), layout=self.given.layout)

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        if self.on_step is not None:
            self.on_step("kernels")  # it may end the work
        return Lab._run_kernels(self, case, call)

    def cache(self, case: Case) -> PagedCache:
        """Return the call's cache for its Case, with other contents of empty slots if the Case has them."""
        own = case.replace(empty_slots=self.case.empty_slots)
        if cache_key(own) != cache_key(self.case):
            return Lab.cache(self, case)

        def make() -> PagedCache:
            found = on_device(self.own_cache, where)
            return found if case == own else with_empty_slots(found, case)

        where = self.where(case)
        return self.shared.get("cache", (cache_key(case), where), make)[0]


def call_lab(call: KernelCall, ran: Case, runner: Backend, **options: Any) -> CallLab:
    """Return the lab of a call whose tensors are on the CPU; ``case`` of it is the call's Case.

    ``ran``: has the platform and the release; ``options``: fields of the Lab. Raises InvalidCase or
    InvalidCall with the field that no Case has.
    """
    call, runner = unshared(_real_sequences(call)), for_call(call, runner)
    case = _case_of(call, ran, runner)
    batch = _batch_of(call, case)
    case = case.replace(distribution=distribution_of(batch.query, batch.key, batch.value))
    cache = _cache_of(call, case, batch)
    case = case.replace(empty_slots=_contents(cache))
    own: dict[str, Any] = {"given": call, "own_batch": batch, "own_cache": cache}
    lab = CallLab(**options, runner=runner, case=case, **own)
    _check_same(call, lab.call(case).cpu())
    return lab


def _real_sequences(call: KernelCall) -> KernelCall:
    """Return the call without sequences that have no new token, and without the rows of padding."""
    lens = call.query_lens
    kept, rows = torch.nonzero(lens > 0).flatten(), int(lens.sum())
    last = int(kept[-1]) + 1 if len(kept) else 0
    if len(kept) == len(lens) and rows == len(call.query):
        return call
    changes: dict[str, Any] = {
        name: getattr(call, name)[kept] for name in ("seq_lens", "block_table")
    }
    for name in ("causal", "mm_prefix_range", "rswa_prefix_lens", "k_scale", "v_scale"):
        given = getattr(call, name)
        if isinstance(given, torch.Tensor) and given.dim() < 3 + (name == "mm_prefix_range"):
            changes[name] = given[kept]
    tokens = ("query", "key", "value", "output", "before", "lse")
    changes |= {name: one[:rows] for name in tokens if (one := getattr(call, name)) is not None}
    starts = torch.cat([call.query_start_loc[:1], call.query_start_loc[1:][kept]])
    padding = max(call.padding, len(lens) - last)
    return dataclasses.replace(call, **changes, query_start_loc=starts, padding=padding)


def unshared(call: KernelCall) -> KernelCall:
    """Return the call with a copy of each block for every sequence and column that reads it.

    Sequences with a common prefix share blocks; those of a Case share none. Columns after the end of a
    sequence stay, and so do those before its window, whose blocks may be recycled.
    """
    table, size = call.block_table.clone(), call.block_size
    seen, copies, freed = set[int](), list[int](), _hidden_blocks(call)
    for seq, seq_len in enumerate(call.seq_lens.tolist()):
        for column in range(freed[seq], -(-seq_len // size)):
            block = int(table[seq, column])
            if block in seen:
                table[seq, column] = len(call.key_cache) + len(copies)
                copies.append(block)
            seen.add(block)
    if not copies:
        return call
    caches: dict[str, Any] = {
        name: torch.cat([cache, cache[copies]])
        for name in ("key_cache", "value_cache", "k_scale", "v_scale")
        if isinstance(cache := getattr(call, name), torch.Tensor) and cache.dim() > 2
    }
    return dataclasses.replace(call, block_table=table, block_ids=None, **caches)


def _hidden_blocks(call: KernelCall) -> list[int]:
    """Return how many blocks of each sequence are before the window of its first new token."""
    first = call.seq_lens.long() - call.query_lens - call.sliding_window + 1
    has_window = call.sliding_window and call.visibility.is_plain and call.spec.attends_to_cache
    found: list[int] = (first.clamp(min=0) // call.block_size * bool(has_window)).tolist()
    return found


def _case_of(call: KernelCall, ran: Case, runner: Backend) -> Case:
    """Return the Case with the call's arguments; what it holds in memory is left at its default."""
    seqs, columns = call.block_table.shape
    blocks, query_lens = len(call.key_cache), call.query_lens
    ctx_lens = call.seq_lens.long() - query_lens
    dtypes: dict[str, Any] = {
        f"{name}_dtype": str(getattr(call, name).dtype).removeprefix("torch.")
        for name in ("block_table", "seq_lens", "query_start_loc")
    }
    case = Case(
        op=call.op,
        backend=runner.name,
        platform=ran.platform,
        release=ran.release,
        rocm_custom_paged_attn=ran.rocm_custom_paged_attn,
        aiter_paged_attn=ran.aiter_paged_attn,
        num_heads=call.query.shape[1],
        num_queries_per_kv=call.num_queries_per_kv,
        head_size=call.query.shape[2],
        block_size=call.block_size,
        dtype=str(call.query.dtype).removeprefix("torch."),
        kv_cache_dtype=call.kv_cache_dtype,
        k_scale=call.number("k_scale"),
        v_scale=call.number("v_scale"),
        alibi=call.alibi_slopes is not None,
        sinks=call.sinks is not None,
        sm_scale=call.sm_scale,
        softcap=call.softcap,
        num_splits=call.num_splits,
        interleave_v=call.interleave_v,
        kv_layout=_strides(call),
        pad_batch=call.padding,
        query_lens=tuple(query_lens.tolist()),
        ctx_lens=tuple(ctx_lens.tolist()),
        max_blocks_per_seq=columns,
        num_blocks=blocks if blocks >= seqs * columns else None,
        max_query_len=call.max_query_len,
        max_seq_len=call.max_seq_len,
        x=None if call.key_cache.shape[4] == _default_x(call) else call.key_cache.shape[4],
        output_init=_init(call.before),
        reference_dtype="float64",
        **dtypes,
        **_mask_fields(call),
    )
    return _with_defaults(case.replace(fill=_fill(call, case), freed=_freed(call, case)))


def _default_x(call: KernelCall) -> int:
    name = str(call.query.dtype).removeprefix("torch.")
    return 16 // (1 if call.kv_cache_dtype != "auto" else DTYPE_BYTES.get(name, 16))


def _with_defaults(case: Case) -> Case:
    """Return the Case without values that are the default: a Case with other lengths keeps a given one."""
    names = ("num_blocks", "max_blocks_per_seq", "max_query_len", "max_seq_len", "fill")
    lens = ("passed_max_query_len", "passed_max_seq_len")
    derived = ("total_blocks", "blocks_per_seq", *lens, "staging")
    for name in (*names, "block_table_dtype", "seq_lens_dtype", "query_start_loc_dtype"):
        plain = case.replace(**{name: None})
        if all(getattr(plain, one) == getattr(case, one) for one in derived):
            case = plain
    return case


def _strides(call: KernelCall) -> str:
    """Return the name of the strides: the call's own, or that of the memory of a recorded call."""
    if call.strides != "contiguous":
        return call.strides
    if call.layout == "HND" and call.spec.hnd:
        return "HND"
    row = call.query.shape[1] * call.query.shape[2]
    return "fused" if call.query.stride(0) > row else "contiguous"


def _mask_fields(call: KernelCall) -> dict[str, Any]:
    """Return the fields of the mask and its data."""
    rules = call.visibility
    names = rules.masks or (CAUSAL,)
    if len(names) > 1:
        raise InvalidCall(f"mask must be one, got {' and '.join(names)}")
    found: dict[str, Any] = {"mask": names[0], "sliding_window": rules.sliding_window}
    name = MASKS[names[0]].data
    if name == "chunk_lookback":
        found[name] = rules.chunk_lookback
    elif name == "tree_parents" and rules.qq_bias is not None:
        seen = torch.ones_like(rules.qq_bias).tril(-1).bool() & (rules.qq_bias == 0)
        found[name] = tuple(
            int(torch.nonzero(row).max()) if bool(row.any()) else token
            for token, row in enumerate(seen)
        )
    elif name is not None:
        given = rules.causal if name == "causal_seqs" else getattr(rules, name)
        assert isinstance(given, torch.Tensor)
        is_flat = given.dim() == 1
        found[name] = tuple(given.tolist() if is_flat else map(tuple, given.flatten(1).tolist()))
    return found


def _init(before: torch.Tensor | None) -> str:
    if before is None:
        return "recycled"
    if bool(before.isnan().all()):
        return "nan"
    return "recycled" if bool(before.any()) else "zeros"


class _Half(NamedTuple):
    """Keys or values of a call: the new tokens, and the cache by slot, [num_blocks × block_size,
    num_kv_heads, head_size], as stored, with its scale."""

    new: torch.Tensor
    stored: torch.Tensor
    scale: float


def _halves(call: KernelCall, case: Case) -> tuple[_Half, _Half]:
    """Return the keys and the values of a call."""
    value = interleaved(call.value_cache, back=True) if case.interleave_v else call.value_cache
    key, value = (one.flatten(0, 1) for one in as_flash(call.key_cache, value))
    return _Half(call.key, key, case.k_scale), _Half(call.value, value, case.v_scale)


def _slots(call: KernelCall, seq: int, first: int, last: int) -> torch.Tensor:
    positions, size = torch.arange(first, last), call.block_size
    return call.block_table[seq].long()[positions // size] * size + positions % size


def _fill(call: KernelCall, case: Case) -> str:
    """Return which new tokens the cache holds: those whose slots have the numbers of key and value."""
    if call.new_tokens != "given":
        return "all_rows"
    format, halves, lengths = written_format(case), _halves(call, case), case.lengths
    starts, held = lengths.token_start_loc, []
    for seq, (ctx_len, seq_len) in enumerate(zip(lengths.ctx_lens, lengths.seq_lens, strict=True)):
        slots, rows = _slots(call, seq, ctx_len, seq_len), slice(starts[seq], starts[seq + 1])
        encoded = [(format.encode(one.new[rows], one.scale), one.stored[slots]) for one in halves]
        held.append(all(_is_same(*pair) for pair in encoded))
    if all(held):
        return "all_rows"
    decodes = [is_held for is_held, n in zip(held, lengths.query_lens, strict=True) if n == 1]
    return "decode_rows" if decodes and all(decodes) else "context_only"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Answer whether two tensors have equal numbers or bytes; NaN equals NaN."""
    return one.shape == other.shape and bool(same_numbers(one, other).all())


def _freed(call: KernelCall, case: Case) -> str:
    """Return what blocks before the window are: recycled, or empty if their numbers are not all finite."""
    format, size, hidden = written_format(case), case.block_size, _hidden_blocks(call)
    halves = [format.decode(half.stored) for half in _halves(call, case)]
    rows = [row.tolist() for row in call.block_table]
    ends = [-(-seq_len // size) for seq_len in case.lengths.seq_lens]
    used = {
        block
        for row, first, end in zip(rows, hidden, ends, strict=True)
        for block in row[first:end]
    }
    if any(used & set(row[:count]) for row, count in zip(rows, hidden, strict=True)):
        return "recycled"
    for seq, count in enumerate(hidden):
        slots = _slots(call, seq, 0, count * size)
        if not all(bool(half[slots].isfinite().all()) for half in halves):
            return "empty"
    return "kept"


def _batch_of(call: KernelCall, case: Case) -> Batch:
    """Return the tokens of the sequences: context from the cache, new ones as the op gets them.

    Tokens before the window of every row count as zeros if they are not finite.
    """
    format, halves, lengths = written_format(case), _halves(call, case), case.lengths
    starts = lengths.token_start_loc
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seq, (ctx_len, seq_len) in enumerate(zip(lengths.ctx_lens, lengths.seq_lens, strict=True)):
        known = ctx_len if call.new_tokens == "given" else seq_len
        rows = slice(starts[seq] + known - ctx_len, starts[seq + 1])
        hidden = max(0, ctx_len - case.sliding_window + 1) if case.sliding_window else 0
        slots = _slots(call, seq, 0, known)
        for part, half in zip(parts, halves, strict=True):
            tokens = format.decode(half.stored[slots], half.scale).to(call.query.dtype)
            if case.mask == CAUSAL:
                tokens[:hidden] = tokens[:hidden].nan_to_num(0.0, 0.0, 0.0)
            part.append(torch.cat([tokens, half.new[rows]]))
    return Batch(
        lengths=lengths,
        query=call.query.contiguous(),
        key=torch.cat(parts[0]),
        value=torch.cat(parts[1]),
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
    )


def _cache_of(call: KernelCall, case: Case, batch: Batch) -> PagedCache:
    """Return the call's cache, and which slots hold a token of the batch; raise InvalidCall if one does not.

    An FP8 cache must hold what the Case's format gives for the numbers that are read from it.
    """
    size, format = case.block_size, written_format(case)
    lens = batch.lengths.cached_lens(case.staging.fill)
    begins = [count * size for count in freed_blocks(case)]
    table = call.block_table.long()
    rows, slots, provenance = addresses(
        batch.kv_start_loc, lens, table, len(call.key_cache), size, begins
    )
    for name, half in zip(("key", "value"), _halves(call, case), strict=True):
        stored = format.encode(getattr(batch, name)[rows], half.scale)
        if not _is_same(format.decode(stored), format.decode(half.stored[slots])):
            text = f"{name}_cache must hold numbers that the format {format.name} gives back"
            raise InvalidCall(f"{text}, got others")
    return PagedCache(
        key=call.key_cache.contiguous(),
        value=call.value_cache.contiguous(),
        format=format,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        provenance=provenance,
    )


def _contents(cache: PagedCache) -> str:
    """Return what the slots without a token hold: zeros, garbage, or something that is not finite."""
    key, value = as_flash(cache.key, cache.value)
    empty = cache.provenance.seq < 0
    held = [cache.format.decode(one[empty]) for one in (key, value)]
    if not all(bool(one.isfinite().all()) for one in held):
        return "nan"
    return "garbage" if any(bool(one.any()) for one in held) else "zeros"


def _check_same(call: KernelCall, built: KernelCall) -> None:
    """Raise InvalidCall for the first field in which the Case's call differs from the given one."""
    skipped = {*_NOT_COMPARED, "strides", *(("key", "value") if call.new_tokens != "given" else ())}
    for one in fields(KernelCall):
        if one.name in skipped:
            continue
        given, made = getattr(call, one.name), getattr(built, one.name)
        if one.name in ("k_scale", "v_scale"):
            given = call.number(one.name)
        if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor):
            if given.dtype == made.dtype and _is_same(given, made):
                continue
        elif not isinstance(given, torch.Tensor) and given == made:
            continue
        text = f"{one.name} must be one that a Case can state"
        raise InvalidCall(f"{text}, got {_shown(given)}")


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60}"
