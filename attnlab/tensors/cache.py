"""PagedCache: keys and values in blocks, and who wrote each slot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable
from attnlab.case.shown import Shown
from attnlab.tensors.batch import Batch
from attnlab.tensors.fill import write_tokens
from attnlab.tensors.formats import ElementFormat, store, written_format

NOBODY = -1
_NEAR = {"first_block": 0, "num_blocks": None}
_PATTERN = (1 << 20) + 7  # garbage repeats after so many elements, at no block's or head's edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Provenance(Shown):
    """Who wrote each slot of a cache, and which slots each sequence owns.

    - ``seq``, ``pos``: [num_blocks, block_size] int32, the sequence and position whose token a slot
      holds, or NOBODY.
    - ``block_table``: [num_seqs, max_blocks_per_seq] int64, the block table as it was meant.
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
    """A paged KV cache in the layout that vLLM's paged decode kernels read.

    - ``key``: [num_blocks, num_kv_heads, head_size / x, block_size, x]
    - ``value``: [num_blocks, num_kv_heads, head_size, block_size]; with the Case's ``interleave_v`` as
      :func:`interleaved` lays it out.

    Both of ``format.storage``. :meth:`to_flash` gives the other layout that vLLM uses.
    """

    key: torch.Tensor
    value: torch.Tensor
    format: ElementFormat
    k_scale: float
    v_scale: float
    provenance: Provenance

    def to_flash(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value as :func:`to_flash` lays them out; copies. No interleaved values."""
        return to_flash(self.key, self.value)


def interleaved(value: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return a value cache with the slots of a block in packs of 16 bytes, of the same shape; ``back``
    undoes it.

    ``value``: [..., head_size, block_size]. Interleaved, a block holds [block_size / x, head_size, x], as
    AITER's writer leaves it on ROCm (vllm/v1/attention/ops/prefix_prefill.py, vLLM 0.33.0).
    """
    *blocks, head_size, block_size = value.shape
    x = 16 // value.element_size()
    shape = (block_size // x, head_size, x) if back else (head_size, block_size // x, x)
    return value.view(*blocks, *shape).transpose(-3, -2).reshape(value.shape)


def untouched(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return zeros that take memory page by page, as they are written: NumPy asks the system for pages
    that are zero, torch writes zeros itself. A GPU's take all of theirs. Raises Unavailable where not even
    the addresses are had."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        zeros = np.zeros(size, dtype=np.uint8)
    except MemoryError as error:
        text = f"{size / 2**30:.1f} GiB of addresses, of which little would be touched"
        raise Unavailable(f"this machine does not give {text}") from error
    return torch.from_numpy(zeros).view(dtype).view(shape)


def to_flash(
    key: torch.Tensor, value: torch.Tensor, first_block: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache in the layout of FlashAttention, unified attention and the cache write, copies:
    [num_blocks, block_size, num_kv_heads, head_size] for both. Blocks before ``first_block`` are not
    copied: they are :func:`untouched` zeros."""
    if first_block:
        near = to_flash(key[first_block:], value[first_block:])
        copies = tuple(untouched((len(key), *one.shape[1:]), one.dtype, one.device) for one in near)
        for copy, one in zip(copies, near, strict=True):
            copy[first_block:] = one
        return copies[0], copies[1]
    flash_key = key.permute(0, 3, 1, 2, 4).flatten(3, 4)
    return flash_key.contiguous(), value.permute(0, 3, 1, 2).contiguous()


def freed_blocks(case: Case) -> list[int]:
    """Return how many blocks of each sequence lie wholly before the window of its first new token.

    vLLM frees them once no row can see them, and a worker's block table goes on naming them
    (get_num_skipped_tokens, vllm/v1/core/single_type_kv_cache_manager.py, vLLM 0.33.0).
    """
    if case.freed == "kept":
        return [0] * len(case.lengths.ctx_lens)
    window, size = case.sliding_window, case.block_size
    return [max(0, ctx_len - window + 1) // size for ctx_len in case.lengths.ctx_lens]


def make_block_table(case: Case) -> torch.Tensor:
    """Return the Case's block table, int64: its own, or blocks dealt out in a random order.

    Where freed blocks are recycled, their entries name the last block of the next sequence.
    """
    table = _dealt_blocks(case)
    if case.freed == "recycled":
        last = [(seq_len - 1) // case.block_size for seq_len in case.lengths.seq_lens]
        for seq, count in enumerate(freed_blocks(case)):
            after = (seq + 1) % len(last)
            table[seq, :count] = table[after, last[after]].clone()
    return table


def _dealt_blocks(case: Case) -> torch.Tensor:
    """Return the block table before any block of it is freed."""
    if case.block_table is not None:
        return torch.tensor(case.block_table)
    num_seqs = len(case.lengths.query_lens)
    generator = torch.Generator().manual_seed(case.seed + 1)
    blocks = torch.randperm(case.total_blocks - case.first_block, generator=generator)
    blocks += case.first_block
    return blocks[: num_seqs * case.blocks_per_seq].view(num_seqs, case.blocks_per_seq)


def make_cache(case: Case, batch: Batch) -> PagedCache:
    """Return a cache that holds what the Case's fill policy writes, and in all other slots what
    ``case.empty_slots`` says; on the batch's device, its provenance on the CPU."""
    format = written_format(case)
    block_table = make_block_table(case)
    chunks = case.head_size // case.key_x
    head = (case.total_blocks, case.num_kv_heads)
    device = batch.key.device
    key = _empty((*head, chunks, case.block_size, case.key_x), format, case, 2, device)
    value = _empty((*head, case.head_size, case.block_size), format, case, 3, device)
    lens = batch.lengths.cached_lens(case.staging.fill)
    begins = [count * case.block_size for count in freed_blocks(case)]
    rows, slots, provenance = addresses(
        batch, lens, block_table, key.shape[0], case.block_size, begins
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
        provenance=provenance,
    )


def addresses(
    batch: Batch,
    lens: tuple[int, ...],
    block_table: torch.Tensor,
    num_blocks: int,
    block_size: int,
    begins: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, Provenance]:
    """Return for every token that is written its row in ``batch.key``, its slot (block × block_size
    + offset), and the provenance that results.

    ``lens``: how many tokens of each sequence are written; ``begins``: from which position on, 0 where
    it is left out.
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
    return torch.tensor(batch.kv_start_loc)[seq] + pos, slots, provenance


def _empty(
    shape: tuple[int, ...], format: ElementFormat, case: Case, salt: int, device: torch.device
) -> torch.Tensor:
    """Return a cache tensor that holds zeros, NaN or finite garbage everywhere; before ``first_block``
    untouched zeros."""
    if case.first_block:
        cache = untouched(shape, format.storage, device)
        used = (shape[0] - case.first_block, *shape[1:])
        cache[case.first_block :] = _empty(used, format, case.replace(**_NEAR), salt, device)
        return cache
    if case.empty_slots == "zeros":
        return torch.zeros(shape, dtype=format.storage, device=device)
    if case.empty_slots == "nan":
        return torch.empty(shape, dtype=format.storage, device=device).fill_(format.nan)
    return format.encode(garbage(shape, seed=case.seed + salt)).to(device)


def garbage(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return what recycled memory may hold: float16 numbers with 0.5 ≤ |number| < 2.

    Finite and never small, so that no element is right by luck and none is a NaN that gives it away.
    """
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    bits = torch.empty(min(size, _PATTERN), dtype=torch.int16)
    bits.random_(-(2**15), 2**15, generator=generator)
    # IEEE binary16: keep the sign, the fraction and the exponent's last bit; set the rest to 0111x.
    numbers = (bits & -0x7801 | 0x3800).view(torch.float16)
    return numbers.repeat(-(-size // max(1, len(numbers))))[:size].view(shape)
