"""AttentionSetup: rows, slots, keys and constants of a call, as the X-ray needs them.

A slot is a place of a key and its value: first the slots of the cache (block × block_size + offset), then,
for an op that reads new tokens from its arguments, one slot per new token. An entry is a key that a row may
read: first the positions of its sequence in the cache, then new tokens, from the first of its sequence on.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnlab.case.ops import DECODE_FWD, PREFILL
from attnlab.contracts.target import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.defects.problem import Problem
from attnlab.kernels.model.cache_reads import format_of
from attnlab.tensors.call import KernelCall
from attnlab.weights.bounds import bounds_of
from attnlab.weights.device import moved
from attnlab.weights.stored_cache import StoredCache

OVERHANG = 8  # entries after the last new token of a sequence
DECODES = (TRITON_DECODE, ROCM_DECODE, DECODE_FWD)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSetup:
    """Some rows and heads of a call, R and H of them; N slots, E entries per row.

    - ``rows`` [R], ``heads`` [H]: output rows and query heads, int64.
    - ``seq``, ``position``, ``ctx_len``, ``seq_len``, ``cached``: [R] int64, of each row: its sequence, its
      position, and how many positions of its sequence come from the cache.
    - ``kernels``: [R] names of the kernels that write the rows.
    - ``entry_slot``, ``entry_position``: [R, E] int64; slot -1 if there is none.
    - ``is_new``: [E] bool, entries from the arguments.
    - ``query``: [R, H, head_size]; ``key``: [N, num_kv_heads, head_size], as the kernel reads the slots.
    - ``kv_head``: [H]; ``slopes``, ``sinks``: [H] or None; ``softcap``: None for no cap.
    - ``kept``: [N] the numbers of the slots in memory, ascending, if only some are in the setup; else None.
    - ``value_size``: the elements of a value, None for head_size. ``stored``: what the cache holds, if it has
      a scale per token and head.
    - ``relative``, ``fixed``: [R], the bound of a weight w is relative × w + fixed.

    All tensors are on one device, ``device``; those of ``call`` may be on another.
    """

    call: KernelCall
    target: Target
    rows: torch.Tensor
    heads: torch.Tensor
    seq: torch.Tensor
    position: torch.Tensor
    ctx_len: torch.Tensor
    seq_len: torch.Tensor
    cached: torch.Tensor
    kernels: tuple[str, ...]
    entry_slot: torch.Tensor
    entry_position: torch.Tensor
    is_new: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    kv_head: torch.Tensor
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    softcap: float | None
    sm_scale: float
    relative: torch.Tensor
    fixed: torch.Tensor
    kept: torch.Tensor | None = None
    value_size: int | None = None
    stored: StoredCache | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.query.device

    @property
    def num_slots(self) -> int:
        """Return N, the number of slots of the cache and of new tokens."""
        return self.key.shape[0]

    @property
    def width(self) -> int:
        """Return the number of elements of a value, and so of the lanes that a run measures."""
        return self.call.query.shape[2] if self.value_size is None else self.value_size

    @property
    def cache_slots(self) -> int:
        """Return the number of slots of the cache in the setup."""
        old = cache_slots(self.call)
        return old if self.kept is None else int((self.kept < old).sum())

    def of_memory(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of the setup for slots in memory; -1 for those that are not in it."""
        old = cache_slots(self.call)
        slots = torch.where((slots >= 0) & (slots < old), slots, -1)
        return slots if self.kept is None else places(self.kept, slots)

    def with_slots(self, kept: torch.Tensor) -> "AttentionSetup":
        """Return the setup of a part of all slots; ``kept``: [n], ascending."""
        entry_slot = places(kept, self.entry_slot)
        key = self.key[kept]
        return dataclasses.replace(self, kept=kept, entry_slot=entry_slot, key=key, stored=None)

    @property
    def query_len(self) -> torch.Tensor:
        """Return the number of new tokens of each row's sequence, [R]."""
        return self.seq_len - self.ctx_len

    @cached_property
    def products(self) -> torch.Tensor:
        """Return query × key of every slot, without the scale, [R, H, N] float64."""
        return self.products_of(torch.arange(len(self.heads), device=self.device), self.kv_head)

    def products_of(self, query_head: torch.Tensor, kv_head: torch.Tensor) -> torch.Tensor:
        """Return query × key for other heads; ``query_head`` indexes ``heads``; both [H]."""
        query = self.query[:, query_head].transpose(0, 1)
        return (query @ self.key[:, kv_head].permute(1, 2, 0)).transpose(0, 1)

    def of_heads(self, heads: torch.Tensor) -> "AttentionSetup":
        """Return the setup of some heads, given as indices into ``heads``."""
        by_head: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[heads]
            for name in ("heads", "kv_head", "slopes", "sinks")
        }
        return dataclasses.replace(self, **by_head, query=self.query[:, heads])

    def take(self, rows: torch.Tensor, heads: torch.Tensor) -> "AttentionSetup":
        """Return the setup of some rows and heads, given as indices into ``rows`` and ``heads``."""
        by_row: dict[str, Any] = {
            name: getattr(self, name)[rows]
            for name in (
                *("rows", "seq", "position", "ctx_len", "seq_len", "cached"),
                *("entry_slot", "entry_position", "relative", "fixed"),
            )
        }
        kernels = tuple(self.kernels[row] for row in rows.tolist())
        some = dataclasses.replace(self, **by_row, query=self.query[rows], kernels=kernels)
        return some.of_heads(heads)


def places(kept: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return where slots are among the kept ones, -1 for those that are not."""
    at = torch.searchsorted(kept, slots.contiguous()).clamp(max=len(kept) - 1)
    return torch.where(kept[at] == slots, at, -1)


def near_slots(setup: AttentionSetup, weighed: torch.Tensor | None = None) -> torch.Tensor:
    """Return the slots of new tokens, of the blocks of sequences and next to them, and ``weighed`` ones, [n].

    ``weighed``: [N] bool.
    """
    call = setup.call
    none = torch.zeros(setup.num_slots, dtype=torch.bool, device=setup.device)
    near = none if weighed is None else weighed.clone()
    near[setup.cache_slots :] = True
    blocks = call.block_table.long().cpu().flatten()
    blocks = torch.cat([blocks + step for step in (-1, 0, 1)]).unique()
    blocks = blocks[(blocks >= 0) & (blocks < call.value_cache.shape[0])]
    slots = (blocks[:, None] * call.block_size + torch.arange(call.block_size)).flatten()
    near[slots.to(setup.device)] = True
    return torch.nonzero(near).flatten()


def cache_slots(call: KernelCall) -> int:
    """Return the number of slots of a call's cache."""
    return call.value_cache.shape[0] * call.value_cache.shape[3]


def one_number(scale: float | torch.Tensor) -> float:
    """Return a scale that is one number; the first of a tensor."""
    return float(torch.as_tensor(scale).flatten()[0])


def has_new_slots(call: KernelCall) -> bool:
    """Answer whether the op may read keys and values of new tokens from its arguments."""
    return call.spec.new_tokens_from != "cache" and call.new_tokens == "given"


def make_setup(
    call: KernelCall,
    target: Target,
    kernels: tuple[str, ...],
    rows: torch.Tensor,
    heads: torch.Tensor,
    device: torch.device | str = "cpu",
) -> AttentionSetup:
    """Return the setup of some rows and heads of a call, both on the CPU; its tensors are on ``device``.

    The keys are what the call's slots hold, decoded as the kernels read them.
    """
    problem = Problem.of_call(call, target, kernels)
    starts, seq_lens = call.query_start_loc.long().cpu(), call.seq_lens.long().cpu()
    seq = torch.searchsorted(starts, rows, right=True) - 1
    ctx_len = seq_lens[seq] - starts.diff()[seq]
    cached = torch.tensor([problem.cached_len(one) for one in range(len(seq_lens))])[seq]
    entry_slot, entry_position, is_new = _entries(call, starts, seq, ctx_len)
    key = _keys(call, target, device)
    query = call.query.to(device)[rows.to(device)][:, heads.to(device)].double()
    kv_head = heads // call.num_queries_per_kv
    names = tuple(_kernel_of(problem, int(one)) for one in seq)
    relative, fixed = bounds_of(problem, seq, query, key)
    slopes, sinks = call.alibi_slopes, call.sinks
    setup = AttentionSetup(
        call=call,
        target=target,
        rows=rows,
        heads=heads,
        seq=seq,
        position=ctx_len + rows - starts[seq],
        ctx_len=ctx_len,
        seq_len=seq_lens[seq],
        cached=cached,
        kernels=names,
        entry_slot=entry_slot,
        entry_position=entry_position,
        is_new=is_new,
        query=query,
        key=key,
        kv_head=kv_head,
        slopes=None if slopes is None else slopes.cpu().double()[heads],
        sinks=None if sinks is None else sinks.cpu().double()[heads],
        softcap=call.softcap or None,
        sm_scale=problem.sm_scale,
        relative=relative,
        fixed=fixed,
    )
    return moved(setup, device)


def _entries(
    call: KernelCall, starts: torch.Tensor, seq: torch.Tensor, ctx_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return entry_slot and entry_position [R, E], and is_new [E]."""
    table, block_size = call.block_table.long().cpu(), call.block_size
    positions = torch.arange(table.shape[1] * block_size)
    blocks = table[:, positions // block_size]
    slots = torch.where(
        (blocks >= 0) & (blocks < call.value_cache.shape[0]),
        blocks * block_size + positions % block_size,
        -1,
    )[seq]
    if not has_new_slots(call):
        return slots, positions.expand_as(slots), torch.zeros(len(positions), dtype=torch.bool)
    tokens = call.query.shape[0]
    longest = int(starts.diff().max()) if len(starts) > 1 else 0
    ahead = torch.arange(longest + OVERHANG)
    token = starts[seq][:, None] + ahead
    new_slots = torch.where(token < tokens, cache_slots(call) + token, -1)
    is_new = torch.arange(len(positions) + len(ahead)) >= len(positions)
    at = torch.cat([positions.expand_as(slots), ctx_len[:, None] + ahead], 1)
    return torch.cat([slots, new_slots], 1), at, is_new


def _keys(call: KernelCall, target: Target, device: torch.device | str) -> torch.Tensor:
    """Return the keys of all slots, [N, num_kv_heads, head_size] float64."""
    stored = call.key_cache.to(device).permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)
    format = format_of(call, target)
    key = format.decode(stored.contiguous()).double()
    if format.is_fp8:
        key = (key * call.k_scale).to(call.query.dtype).double()
    return torch.cat([key, call.key.to(device).double()]) if has_new_slots(call) else key


def _kernel_of(problem: Problem, seq: int) -> str:
    """Return the kernel that serves a sequence."""
    if len(problem.kernels) == 1:
        return problem.kernels[0]
    if not problem.is_decode(seq):
        return PREFILL
    return next(name for name in problem.kernels if name != PREFILL)
