"""AttentionSetup: rows, slots, keys and constants of a call, as the X-ray needs them.

A slot is a place of a key and its value: first the slots of the cache (block × block_size + offset), then,
for an op that reads new tokens from its arguments, one slot per new token. An entry is a key that a row may
read: first the positions of its sequence in the cache, then new tokens, from the first of its sequence on.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import DECODE_FWD, PREFILL
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Target
from attnlab.kernels.model import format_of
from attnlab.lab.argument_reference import StoredHalf, query_as_read, wrong_reads
from attnlab.lab.problem import Problem
from attnlab.lab.reference import Int4Rounding
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import rotation_size
from attnlab.tensors.quantised import decoded_numbers, narrow_size, stored_numbers

# Where the weights of an X-ray are computed: on this machine's cores, or on its GPU if there are many.

MANY = 1 << 22  # weights, from which a GPU takes less time
BYTES = 100  # that an X-ray needs for each weight
_T = TypeVar("_T")


def device_for(weights: int, requested: str | None = None) -> torch.device:
    """Return the device for so many weights: a GPU that has the memory for them, else the CPU.

    ``requested``: "cpu" forbids the GPU.
    """
    cpu = torch.device("cpu")
    if weights < MANY or requested == "cpu" or not torch.cuda.is_available():
        return cpu
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.device("cuda") if weights * BYTES <= free + reserved else cpu


def moved(one: _T, device: torch.device | str) -> _T:
    """Return a dataclass with its tensors on a device, also those of dataclasses in it.

    A KernelCall stays where it is.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        value = getattr(one, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.to(device)
        elif dataclasses.is_dataclass(value) and not isinstance(value, KernelCall | Target):
            changes[field.name] = moved(value, device)
    return dataclasses.replace(one, **changes)  # type: ignore[type-var]


# StoredCache: what a cache with a scale per token and head holds in an X-ray, and wrong reads of it.
#
# The values of an X-ray are 1 in one element. They are stored with drawn scales that are powers of two, so
# they are exact, and the scale of another slot or head shows as a factor of a weight.

_LEAST = -2  # exponent of the smallest scale: INT4 stores 1 as 4 times it


def value_scales(call: KernelCall) -> torch.Tensor:
    """Return the scale of each value, 1 in one element, [num_blocks, block_size, num_kv_heads] float32."""
    blocks, kv_heads, _, block_size = call.value_cache.shape
    generator = torch.Generator().manual_seed(29)
    powers = torch.randint(_LEAST, 1, (blocks, block_size, kv_heads), generator=generator)
    return 2.0 ** powers.float()


def key_tokens(call: KernelCall) -> torch.Tensor:
    """Return the keys of the cache in its dtype, [slots, num_kv_heads, head_size]."""
    return call.key_cache.cpu().permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCache:
    """Keys and values of all slots, as they are stored.

    - ``key``, ``value``: [N, num_kv_heads, …]. A value is 1 in ``element`` [N] and 0 elsewhere.
    - ``sequences``: the slots of each sequence in order, to the end of its last block.
    """

    case: Case
    key: StoredHalf
    value: StoredHalf
    element: torch.Tensor
    sequences: tuple[torch.Tensor, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the wrong reads of the cache."""
        return tuple(wrong_reads(self.case))


def store(case: Case, call: KernelCall, lanes: torch.Tensor) -> StoredCache:
    """Return what the cache of a Case holds. ``lanes``: [N], the lane of each slot."""
    element = lanes % call.query.shape[2]
    tokens, scales = key_tokens(call), value_scales(call).flatten(0, 1)
    one_hot = torch.zeros(tokens.shape)
    one_hot[torch.arange(len(element)), :, element] = 1.0
    numbers, scale = stored_numbers(case, tokens)
    values, scales = stored_numbers(case, one_hot, scales)
    pairs = zip(table_slots(call), call.seq_lens.tolist(), strict=True)
    sequences = [row[: -(-length // call.block_size) * call.block_size] for row, length in pairs]
    return StoredCache(
        case=case,
        key=StoredHalf(numbers=numbers, scale=scale),
        value=StoredHalf(numbers=values, scale=scales),
        element=element,
        sequences=tuple(sequences),
    )


@lru_cache(maxsize=64)
def misread(stored: StoredCache, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys [N, num_kv_heads, head_size], and by what each value is multiplied [N, num_kv_heads],
    under a wrong read with a name; float64."""
    case, read = stored.case, wrong_reads(stored.case)[name]
    key = _decoded(case, stored.key)
    gain = torch.ones(key.shape[:2], dtype=torch.float64)
    for slots in stored.sequences:
        halves = read(case, _take(stored.key, slots), _take(stored.value, slots))
        key[slots], values = (_decoded(case, half) for half in halves)
        element = stored.element[slots, None, None].expand(-1, key.shape[1], 1)
        gain[slots] = values.gather(2, element)[..., 0]
    return key, gain


def _take(half: StoredHalf, slots: torch.Tensor) -> StoredHalf:
    scale = None if half.scale is None else half.scale[slots]
    return StoredHalf(numbers=half.numbers[slots], scale=scale)


def _decoded(case: Case, half: StoredHalf) -> torch.Tensor:
    assert half.scale is not None
    return decoded_numbers(case, half.numbers, half.scale)


# The rounding bound of the weights of an X-ray.


def bounds_of(
    problem: Problem, seq: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the relative and the fixed part of the bound of a weight, each [R].

    It is the worst-case bound of :mod:`attnlab.lab.reference` for values of 0 and 1.
    """
    call = problem.call
    query_norm = float(query.nan_to_num(0.0).norm(dim=2).max()) if query.numel() else 0.0
    key_norm = float(key.nan_to_num(0.0).norm(dim=2).max()) if key.numel() else 0.0
    found = {}
    for one in seq.unique().tolist():
        rounding = problem.rounding(one)
        length = problem.seq_len(one)
        slopes = call.alibi_slopes
        bias = 0.0 if slopes is None else float(slopes.abs().max()) * length
        error = rounding.score_error(
            *(query_norm, key_norm, call.query.shape[2], problem.sm_scale, bias),
            call.softcap or 0.0,
        )
        relative = min(rounding.relative(length, error), 1e3)
        found[one] = relative, rounding.fixed(length, 1.0) + 1e-9
    bounds = torch.tensor([found[one] for one in seq.tolist()], dtype=torch.float64)
    relative_of, fixed_of = bounds.view(len(seq), 2).T.contiguous()
    return relative_of, fixed_of


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

    def take(self, rows: torch.Tensor, heads: torch.Tensor | None = None) -> "AttentionSetup":
        """Return the setup of some rows and heads, given as indices into ``rows`` and ``heads``; None for all
        heads."""
        by_row: dict[str, Any] = {
            name: getattr(self, name)[rows]
            for name in (
                *("rows", "seq", "position", "ctx_len", "seq_len", "cached"),
                *("entry_slot", "entry_position", "relative", "fixed"),
            )
        }
        kernels = tuple(self.kernels[row] for row in rows.tolist())
        some = dataclasses.replace(self, **by_row, query=self.query[rows], kernels=kernels)
        return some if heads is None else some.of_heads(heads)

    def bound(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the bound of right weights [R, H, N]."""
        return weights * self.relative[:, None, None] + self.fixed[:, None, None]


def places(kept: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return where slots are among the kept ones, -1 for those that are not."""
    at = torch.searchsorted(kept, slots.contiguous()).clamp(max=len(kept) - 1)
    return torch.where(kept[at] == slots, at, -1)


def near_slots(setup: AttentionSetup, weighed: torch.Tensor | None = None) -> torch.Tensor:
    """Return the slots of new tokens, of the blocks of sequences and next to them, and ``weighed`` ones."""
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


def table_slots(call: KernelCall) -> torch.Tensor:
    """Return the slot of each position of each sequence by the block table, [sequences, positions] int64;
    -1 outside of the cache."""
    table, size = call.block_table.long().cpu(), call.block_size
    at = torch.arange(table.shape[1] * size)
    blocks = table[:, at // size]
    inside = (blocks >= 0) & (blocks < call.value_cache.shape[0])
    return torch.where(inside, blocks * size + at % size, -1)


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
    stored = call.key_cache.to(device).permute(0, 3, 1, 2, 4).flatten(3, 4).flatten(0, 1)
    format = format_of(call, target)
    key = format.decode(stored.contiguous()).double()
    if format.is_fp8:
        key = (key * call.k_scale).to(call.query.dtype).double()
    key = torch.cat([key, call.key.to(device).double()]) if has_new_slots(call) else key
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
    slots = table_slots(call)[seq]
    positions = torch.arange(slots.shape[1])
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


def _kernel_of(problem: Problem, seq: int) -> str:
    """Return the kernel that serves a sequence."""
    if len(problem.kernels) == 1:
        return problem.kernels[0]
    if not problem.is_decode(seq):
        return PREFILL
    return next(name for name in problem.kernels if name != PREFILL)


# Op arguments in an X-ray: how the op reads queries and keys, what it rounds, and how values are stored.


def check_readable(case: Case) -> None:
    """Raise InvalidCase for an op argument with which values of 0 and 1 do not show the weights."""
    if case.argument.no_xray:
        text = f"op_argument must let an X-ray read weights, got {case.op_argument}: {case.argument.no_xray}"
        raise InvalidCase(text)


def with_argument(setup: AttentionSetup, case: Case | None, is_native: bool) -> AttentionSetup:
    """Return the setup with queries and keys as the op of a Case with an op argument reads them."""
    if case is None:
        return setup
    if case.op_argument == "diffkv":
        return dataclasses.replace(setup, value_size=narrow_size(case))
    if case.op_argument != "fp8_query" and case.argument.cache is None:
        return setup
    device, setup = setup.device, moved(setup, "cpu")
    query, key = query_as_read(case, setup.query.to(setup.call.query.dtype)).double(), setup.key
    kernels = tuple(dict.fromkeys(setup.kernels))
    problem = Problem.of_call(setup.call, setup.target, kernels)
    extra, fixed = 0.0, 0.0
    if case.argument.cache is not None:
        key = decoded_numbers(case, *stored_numbers(case, key_tokens(setup.call)))
        if case.argument.is_packed:
            extra, fixed = _int4_errors(setup, problem, key, is_native)
    problem = dataclasses.replace(problem, case=case)
    bounds = bounds_of(problem, setup.seq, query, key)
    relative = (1 + bounds[0]) * math.exp(2 * extra) - 1
    found = dataclasses.replace(
        setup, query=query, key=key, relative=relative, fixed=bounds[1] + fixed
    )
    return moved(found, device)


def _int4_errors(
    setup: AttentionSetup, problem: Problem, key: torch.Tensor, is_native: bool
) -> tuple[float, float]:
    """Return by how much a score may be off in addition, and a weight whose value is 1.

    The second is that of :meth:`Int4Rounding.bound` for numbers of at most 15 times the scale 1.
    """
    int4 = Int4Rounding.of(problem.rounding(0), is_native)
    size, longest = setup.query.shape[2], int(setup.seq_len.max())
    score = int4.score_error(float(setup.query.norm(dim=2).max()), key, setup.sm_scale)
    sums = 15 * (int4.weight + longest * 2.0**-23)
    return score, sums + int4.output_error(rotation_size(size))
