"""PagedCache: keys and values in blocks, and which token each slot holds."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.case.shown import Shown
from attnlab.tensors.batch import Batch
from attnlab.tensors.fill import write_tokens
from attnlab.tensors.formats import ElementFormat, store, written_format

NOBODY = -1
_PATTERN = (1 << 20) + 7  # period of garbage in elements; no multiple of a block or head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Provenance(Shown):
    """Which token each slot of a cache holds, and which blocks each sequence owns.

    - ``seq``, ``pos``: [num_blocks, block_size] int32, the sequence and position whose token a slot
      holds, or NOBODY if it was never written.
    - ``block_table``: [num_seqs, max_blocks_per_seq] int64, the intended block table.
    """

    seq: torch.Tensor
    pos: torch.Tensor
    block_table: torch.Tensor

    def slot(self, seq: int, pos: int) -> tuple[int, int]:
        """Return (block, offset) of a sequence's position."""
        block_size = self.seq.shape[1]
        return int(self.block_table[seq, pos // block_size]), pos % block_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PagedCache(Shown):
    """A paged KV cache in the layout of vLLM's paged decode kernels.

    - ``key``: [num_blocks, num_kv_heads, head_size / x, block_size, x]
    - ``value``: [num_blocks, num_kv_heads, head_size, block_size]; if the Case has ``interleave_v``, in
      the order of :func:`interleaved`.

    Both have the dtype ``format.storage``. :meth:`to_flash` returns vLLM's other layout.
    """

    key: torch.Tensor
    value: torch.Tensor
    format: ElementFormat
    k_scale: float
    v_scale: float
    provenance: Provenance

    def to_flash(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of key and value as :func:`to_flash` does; values must not be interleaved."""
        return to_flash(self.key, self.value)


def interleaved(value: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return a value cache of the same shape with the slots of a block in packs of 16 bytes.

    ``value``: [..., head_size, block_size]. The memory of an interleaved block is [block_size / x,
    head_size, x], AITER's layout on ROCm (vllm/v1/attention/ops/prefix_prefill.py, vLLM 0.33.0). With
    ``back`` the packs are undone.
    """
    *blocks, head_size, block_size = value.shape
    x = 16 // value.element_size()
    shape = (block_size // x, head_size, x) if back else (head_size, block_size // x, x)
    return value.view(*blocks, *shape).transpose(-3, -2).reshape(value.shape)


def untouched(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return zeros that take no memory on a CPU until they are written.

    NumPy gets zeroed pages from the operating system, torch would write the zeros. On a GPU the tensor
    takes all its memory. Raises Unavailable if the address space is not available.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        zeros = np.zeros(size, dtype=np.uint8)
    except MemoryError as error:
        text = f"{size / 2**30:.1f} GiB of address space, although little of it would be used"
        raise Unavailable(f"this machine cannot provide {text}") from error
    return torch.from_numpy(zeros).view(dtype).view(shape)


def after_untouched(
    key: torch.Tensor, value: torch.Tensor, first_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value with ``first_block`` more blocks before theirs.

    On a CPU these are :func:`untouched` zeros. On a GPU they would take memory, so key and value share
    them (:func:`in_one_buffer`).
    """
    if key.device.type != "cpu":
        return in_one_buffer(key, value, first_block)
    blocks = first_block + len(key)
    longer = [untouched((blocks, *part.shape[1:]), part.dtype) for part in (key, value)]
    longer[0][first_block:], longer[1][first_block:] = key, value
    return longer[0], longer[1]


def in_one_buffer(
    key: torch.Tensor, value: torch.Tensor, first_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value after ``first_block`` blocks that both share.

    In one buffer the value's blocks follow the key's, and the value begins as much later. With offsets
    beyond 2^31 elements of float16 the two take 4 GiB, not 8. The shared blocks hold zeros or keys.
    """
    blocks, size, before = first_block + len(key), key.numel(), first_block * key[0].numel()
    buffer = torch.zeros(before + 2 * size, dtype=key.dtype, device=key.device)
    longer_key = buffer[: before + size].view(blocks, *key.shape[1:])
    longer_value = buffer[size:].view(blocks, *value.shape[1:])
    longer_key[first_block:], longer_value[first_block:] = key, value
    return longer_key, longer_value


def to_flash(
    key: torch.Tensor, value: torch.Tensor, first_block: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of key and value, both [num_blocks, block_size, num_kv_heads, head_size].

    This is the layout of FlashAttention, unified attention and the cache write. Blocks before
    ``first_block`` are not copied; they are :func:`untouched` zeros.
    """
    if first_block:
        used = to_flash(key[first_block:], value[first_block:])
        return after_untouched(*used, first_block)
    flash_key, flash_value = as_flash(key, value)
    return flash_key.contiguous(), flash_value.contiguous()


def as_flash(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value as :func:`to_flash` does, but as views where the strides allow it."""
    return key.permute(0, 3, 1, 2, 4).flatten(3, 4), value.permute(0, 3, 1, 2)


def freed_blocks(case: Case) -> list[int]:
    """Return how many blocks of each sequence are entirely before the window of its first new token.

    vLLM frees them because no row attends to them, but leaves them in the worker's block table
    (get_num_skipped_tokens, vllm/v1/core/single_type_kv_cache_manager.py, vLLM 0.33.0).
    """
    if case.freed == "kept":
        return [0] * len(case.lengths.ctx_lens)
    window, size = case.sliding_window, case.block_size
    return [max(0, ctx_len - window + 1) // size for ctx_len in case.lengths.ctx_lens]


def make_block_table(case: Case) -> torch.Tensor:
    """Return the Case's block table, int64: given, or with blocks in random order.

    If freed blocks are recycled, their entries are the last block of the next sequence.
    """
    table = _dealt_blocks(case)
    if case.freed == "recycled":
        last = [(seq_len - 1) // case.block_size for seq_len in case.lengths.seq_lens]
        for seq, count in enumerate(freed_blocks(case)):
            after = (seq + 1) % len(last)
            table[seq, :count] = table[after, last[after]].clone()
    return table


def _dealt_blocks(case: Case) -> torch.Tensor:
    """Return the block table before blocks are freed."""
    if case.block_table is not None:
        return torch.tensor(case.block_table)
    num_seqs = len(case.lengths.query_lens)
    generator = torch.Generator().manual_seed(case.seed + 1)
    blocks = torch.randperm(case.total_blocks - case.first_block, generator=generator)
    blocks += case.first_block
    return blocks[: num_seqs * case.blocks_per_seq].view(num_seqs, case.blocks_per_seq)


def make_cache(case: Case, batch: Batch) -> PagedCache:
    """Return the Case's cache on the batch's device; its provenance is on the CPU.

    It holds the tokens of the Case's fill policy. All other slots hold ``case.empty_slots``.
    """
    format = written_format(case)
    block_table = make_block_table(case)
    chunks = case.head_size // case.key_x
    head = (case.total_blocks - case.first_block, case.num_kv_heads)
    device = batch.key.device
    key = _empty((*head, chunks, case.block_size, case.key_x), format, case, 2, device)
    value = _empty((*head, case.head_size, case.block_size), format, case, 3, device)
    if case.first_block:
        key, value = after_untouched(key, value, case.first_block)
    lens = batch.lengths.cached_lens(case.staging.fill)
    begins = [count * case.block_size for count in freed_blocks(case)]
    rows, slots, provenance = _kept_addresses(
        tuple(batch.kv_start_loc),
        lens,
        block_table.numpy().tobytes(),
        tuple(block_table.shape),
        key.shape[0],
        case.block_size,
        tuple(begins),
        str(device),
    )
    new_key = store(case, batch.key, case.k_scale)
    new_value = store(case, batch.value, case.v_scale)
    write_tokens(key, value, new_key, new_value, rows, slots)
    value = interleaved(value) if case.interleave_v else value
    return PagedCache(
        key=key,
        value=value,
        format=format,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        provenance=copy.deepcopy(provenance),
    )


@lru_cache(maxsize=2)
def _kept_addresses(
    kv_start_loc: tuple[int, ...],
    lens: tuple[int, ...],
    block_table: bytes,
    table_shape: tuple[int, ...],
    num_blocks: int,
    block_size: int,
    begins: tuple[int, ...],
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, Provenance]:
    """Return what :func:`addresses` does, rows and slots on ``device``; caches share them.

    The element formats of a matrix of tests, for example, have the same addresses. ``block_table``: bytes.
    """
    table = torch.from_numpy(np.frombuffer(block_table, np.int64).reshape(table_shape).copy())
    rows, slots, provenance = addresses(kv_start_loc, lens, table, num_blocks, block_size, begins)
    return rows.to(device), slots.to(device), provenance


def addresses(
    kv_start_loc: Sequence[int],
    lens: tuple[int, ...],
    block_table: torch.Tensor,
    num_blocks: int,
    block_size: int,
    begins: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, Provenance]:
    """Return rows, slots and provenance of the tokens that are written to a cache.

    ``kv_start_loc``: the first row of each sequence in ``batch.key``. Rows are those of ``batch.key``; a
    slot is block × block_size + offset; both [n] int64. Of each sequence the positions from ``begins``
    (default 0) to ``lens`` are written.
    """
    counts = torch.tensor(lens)
    seq = torch.repeat_interleave(torch.arange(len(lens)), counts)
    pos = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[seq]
    if any(begins):
        kept = pos >= torch.tensor(begins)[seq]
        seq, pos = seq[kept], pos[kept]
    slots = block_table[seq, pos // block_size] * block_size + pos % block_size
    owner = torch.full((2, num_blocks * block_size), NOBODY, dtype=torch.int32)
    owner[0, slots], owner[1, slots] = seq.int(), pos.int()
    provenance = Provenance(
        seq=owner[0].view(num_blocks, block_size),
        pos=owner[1].view(num_blocks, block_size),
        block_table=block_table,
    )
    return torch.tensor(kv_start_loc)[seq] + pos, slots, provenance


def _empty(
    shape: tuple[int, ...], format: ElementFormat, case: Case, salt: int, device: torch.device
) -> torch.Tensor:
    """Return a cache tensor filled with zeros, NaN or finite garbage, as ``case.empty_slots`` says."""
    if case.empty_slots == "zeros":
        return untouched(shape, format.storage, device)
    if case.empty_slots == "nan":
        return torch.empty(shape, dtype=format.storage, device=device).fill_(format.nan)
    return format.encode(garbage(shape, seed=case.seed + salt, device=device))


def garbage(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return numbers as recycled memory may hold them: float16 with 0.5 ≤ |number| < 2.

    They are finite, so that no NaN reveals them, and never small, so that no element is right by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    bits = torch.empty(min(size, _PATTERN), dtype=torch.int16)
    bits.random_(-(2**15), 2**15, generator=generator)
    # IEEE binary16: keep the sign, the fraction and the exponent's last bit; set the rest to 0111x.
    numbers = (bits & -0x7801 | 0x3800).view(torch.float16)
    numbers = numbers.to(device)
    return numbers.repeat(-(-size // max(1, len(numbers))))[:size].view(shape)
